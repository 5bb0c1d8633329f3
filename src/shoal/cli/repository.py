"""``shoal compose``, ``plan`` and ``fill``: make a repository, show its placement and memory, fill a template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli.console import (
    ERR,
    OUT,
    Gpu,
    Json,
    Placement,
    Reserved,
    Target,
    parse_pairs,
    plain,
    print_json,
    refuse_ignored,
)
from shoal.cli.records import takes_record
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.authoring.repository.graph import Graph
    from shoal.authoring.repository.plan import Tuning
    from shoal.authoring.repository.sizes import Sizes

_TUNED = {
    "instances": "scorer=2, or scorer=2@0,1",
    "place": "scorer=gpu:0, or scorer=cpu",
    "preferred-batch": "scorer=4,8",
    "queue-delay": "scorer=300",
}
Projects = Annotated[
    list[Path] | None,
    typer.Option(
        "--project",
        help="A folder with models of your own; may be repeated. Default: this one, if shoal lacks the ensemble.",
    ),
]
Weights = Annotated[
    str | None, typer.Option(metavar="FOLDER|FILE|OWNER/NAME", help="A language model's weights, if models need some.")
]
Quantize = Annotated[
    Literal["int8", "int4"] | None,
    typer.Option(help="Bits of a weight: on a host with --engine openvino, by NNCF; in llm-hf on a GPU, by torchao."),
]
_DEFAULT = Path("build/artifacts")  # where `shoal train` writes


@dataclass(frozen=True)
class ComposeAsked:
    """Options of one ``shoal compose``, as they were given."""

    ensembles: Annotated[
        list[str], typer.Argument(help="Names of ensembles or single models, which are the names of their folders.")
    ]
    repository: Annotated[Path, typer.Argument(help="The model repository to write.")]
    artifacts: Annotated[
        Path | None,
        typer.Option(
            help="Files that model folders lack, such as those of `shoal train`; build/artifacts if it exists."
        ),
    ] = None
    placement: Placement = None
    target: Target = "embedded"
    dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "int8"],
        typer.Option(
            help="The arithmetic of encoders and engines; auto: the plan's; of shoal's encoder bf16, if the CPU has it."
        ),
    ] = "auto"
    tuned: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `shoal tune` chose for these encoders: tuned.json.")
    ] = None
    accepts_error: Annotated[
        bool, typer.Option("--accept-error", help="Use INT8 although its error is large, or unknown.")
    ] = False
    gpu: Gpu = ""
    reserved: Reserved = 16
    projects: Projects = None
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="[MODEL=]PATH", help="An execution environment for all Python models, or for one."),
    ] = None
    stub: Annotated[
        list[str] | None,
        typer.Option(metavar="[MODEL=]PATH", help="The stub of an environment, if built apart from it."),
    ] = None
    swap: Annotated[
        list[str] | None,
        typer.Option(metavar="A=B", help="Use model B wherever a step, or a call, names model A; may be repeated."),
    ] = None
    weights: Weights = None
    engine: Annotated[
        Literal["auto", "hf", "openvino", "vllm", "onnx"] | None,
        typer.Option(help="A language model's engine; auto: openvino on a host where it can, otherwise hf."),
    ] = None
    quantize: Quantize = None
    is_together: Annotated[
        bool,
        typer.Option("--together", help="The models that code calls, such as those of llm_bls, run in its process."),
    ] = False
    instances: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=COUNT[@GPUS]", help="Instances of a model, on each of GPUS if given; may be repeated."
        ),
    ] = None
    place: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=gpu:NUMBERS|cpu", help="Place one model, whatever --placement says; may be repeated."
        ),
    ] = None
    preferred_batch: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=ROWS", help="Preferred batch sizes of a model, such as 2,4,8; may be repeated."),
    ] = None
    queue_delay: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=US", help="Microseconds that requests wait for a larger batch; may be repeated."),
    ] = None


@takes_record(ComposeAsked)
def compose(context: typer.Context, asked: ComposeAsked) -> None:
    """Write a model repository: model folders, artifacts, placement, execution environments."""
    from shoal.authoring.composition.compose import compose as compose_repository
    from shoal.authoring.composition.warmup import FAILED
    from shoal.authoring.repository.manifest import read_manifest
    from shoal.authoring.repository.model_folders import read_configs
    from shoal.authoring.repository.plan import Plan
    from shoal.serving.server.snapshot import find_services

    plan = Plan(asked.placement or "", asked.target, asked.dtype, _parse_gpus(asked.gpu), asked.reserved)
    if asked.placement == "cpu" and not asked.place:
        refuse_ignored(context, "--reserve-requests", "without a GPU, whose memory it sizes")
    if asked.tuned is None:
        refuse_ignored(context, "--accept-error", "without --tuned")
    path = compose_repository(
        asked.ensembles,
        asked.repository,
        artifacts=asked.artifacts or (_DEFAULT if _DEFAULT.is_dir() else None),
        plan=plan,
        projects=_find_projects(asked.projects, asked.ensembles),
        environments=_by_model(asked.env),
        stubs=_by_model(asked.stub),
        swap=parse_pairs("--swap", asked.swap, form="MODEL=MODEL", example="llm-hf=llm-vllm"),
        weights=asked.weights,
        tuning=_parse_tuning(asked.instances, asked.preferred_batch, asked.queue_delay, asked.place),
        tuned=asked.tuned,
        accepts_error=asked.accepts_error,
        quantize=asked.quantize or "",
        engine=asked.engine or "",
        is_together=asked.is_together,
    )
    for pid, url in find_services(path):
        note = f"process {pid} serves {path} at {url}, and goes on with what it was started with; start it again"
        OUT.print(f"note: {note} to serve this.", soft_wrap=True, markup=False, highlight=False)
    manifest = read_manifest(path)
    for note in manifest["notes"]:
        OUT.print(f"note: {plain(note)}", soft_wrap=True)
    if asked.artifacts and not any(config.artifacts for config in read_configs(path).values()):
        ERR.print(
            f"No model takes files from {asked.artifacts}: none has the parameter artifacts.",
            soft_wrap=True,
            markup=False,
        )
    for model, chosen in manifest["precision"].items():
        OUT.print(f"precision: {model} {chosen['dtype']} ({plain(chosen['reason'])})", soft_wrap=True)
    for model, reason in manifest["not_warmed_up"].items():
        if reason.startswith(FAILED):  # for the others, nothing can be done
            why = plain(reason.removeprefix(FAILED).removeprefix(": "))
            ERR.print(f"Model {model} does not run here, and is not warmed up: {why}", soft_wrap=True)
    OUT.print(f"repository: {path}", soft_wrap=True)
    serve_it = f"shoal serve {path}"
    OUT.print(f"next: {serve_it if asked.target == 'embedded' else f'{serve_it} --print'}", soft_wrap=True)


def _parse_tuning(
    instances: list[str] | None, sizes: list[str] | None, delays: list[str] | None, places: list[str] | None = None
) -> dict[str, Tuning]:
    """Parse the options that are given for single models, such as ``--instances MODEL=COUNT``."""
    from shoal.authoring.repository.plan import Instances, Tuning

    found: dict[str, Tuning] = {}
    options = {"instances": instances, "preferred-batch": sizes, "queue-delay": delays, "place": places}
    for option, given in options.items():
        for text in given or ():
            model, _, value = text.partition("=")
            old = found.get(model, Tuning())
            if (option == "preferred-batch" and old.preferred_batch_sizes) or (
                option == "queue-delay" and old.queue_delay is not None
            ):
                raise InputError(f"--{option} {model}=... is given twice.", "Give it once.")
            if option == "instances" and (match := re.fullmatch(r"(\d+)(?:@(\d+(?:,\d+)*))?", value)):
                gpus = tuple(map(int, match[2].split(","))) if match[2] else ()
                found[model] = replace(old, instances=(*old.instances, Instances(int(match[1]), gpus)))
            elif option == "place" and old.gpus is None and (match := re.fullmatch(r"cpu|gpu:(\d+(?:,\d+)*)", value)):
                found[model] = replace(old, gpus=tuple(map(int, match[1].split(","))) if match[1] else ())
            elif option == "preferred-batch" and re.fullmatch(r"\d+(,\d+)*", value):
                found[model] = replace(old, preferred_batch_sizes=tuple(map(int, value.split(","))))
            elif option == "queue-delay" and value.isascii() and value.isdigit():
                found[model] = replace(old, queue_delay=int(value))
            else:
                raise InputError(f"--{option} {text} cannot be read.", f"For example: --{option} {_TUNED[option]}")
    return found


def _by_model(options: list[str] | None) -> dict[str, Path]:
    """Parse options of the form ``PATH``, for every model (under the empty name), or ``MODEL=PATH``, for one model."""
    paths: dict[str, Path] = {}
    for option in options or ():
        model, sign, path = option.partition("=")
        is_named = sign and "/" not in model and not Path(option).exists()
        if (key := model if is_named else "") in paths:
            raise InputError(f"There are two paths for {key or 'all models'}: {paths[key]} and {option}.", "Give one.")
        paths[key] = Path(path if is_named else option)
    return paths


def _find_projects(given: list[Path] | None, ensembles: Sequence[str]) -> list[Path]:
    """Return the projects' folders: by default the current one, if shoal itself lacks an ensemble that is asked for."""
    from shoal.authoring.repository.model_folders import CATEGORIES
    from shoal.system.paths import shipped_root

    is_own = all(any((shipped_root() / each / name).is_dir() for each in CATEGORIES) for name in ensembles)
    return given or ([] if is_own else [Path()])


def plan(
    context: typer.Context,
    ensemble: Annotated[str, typer.Argument(help="The ensemble's name, which is the name of its folder.")],
    placement: Placement = None,
    target: Target = "embedded",
    gpu: Gpu = "",
    reserved: Reserved = 16,
    text_bytes: Annotated[int, typer.Option(help="Bytes of the largest text.", min=1)] = 65_536,
    projects: Projects = None,
    weights: Weights = None,
    engine: Annotated[
        Literal["hf", "openvino", "vllm", "onnx"] | None, typer.Option(help="A language model's engine.")
    ] = None,
    quantize: Quantize = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Memory of each GPU, where this machine does not have them.", min=1),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show on which devices the models run, how much memory this takes, and Triton's launch flags for it."""
    from shoal.authoring.check.targets import explain_cupy
    from shoal.authoring.composition.engines import Wanted
    from shoal.authoring.composition.weights import find, give
    from shoal.authoring.composition.weights import quantize as quantize_all
    from shoal.authoring.environment.targets import EMBEDDED
    from shoal.authoring.repository.devices import gpus_of, is_in_client
    from shoal.authoring.repository.engine_memory import HOST, find_excess
    from shoal.authoring.repository.find_graph import find_model_folders
    from shoal.authoring.repository.graph import Graph
    from shoal.authoring.repository.placement import place_all
    from shoal.authoring.repository.plan import Plan
    from shoal.authoring.repository.sizes import Largest, find_sizes

    chosen = Plan(placement or "", target, gpus=_parse_gpus(gpu), concurrency=reserved)
    if placement == "cpu":
        refuse_ignored(context, "--reserve-requests", "without a GPU, whose memory it sizes")
    found = None if weights is None else find(weights)
    folders = find_model_folders(_find_projects(projects, [ensemble]))
    wanted = Wanted([ensemble], folders, {}, None, "", Path())
    collected = wanted.choose(engine or "", chosen).models
    given = collected if found is None else give(collected, found)
    models = place_all(quantize_all(given, quantize) if quantize else given, chosen)
    on_cupy = next((model.name for model in models if gpus_of(model) and is_in_client(model)), "")
    if target == EMBEDDED and placement == "gpu" and on_cupy and (fault := explain_cupy(on_cupy)):
        ERR.print(f"[yellow]warning:[/] {plain(' '.join(fault))}", soft_wrap=True)
    drawn = Graph.build(models[-1], {model.name: model for model in models})
    sizes = find_sizes(drawn, chosen, Largest(drawn.config.spec.max_batch_size, text_bytes=text_bytes))
    if gpu_memory is not None and not sizes.engines.keys() - {HOST}:
        raise InputError("--gpu-memory has no effect: no language model is on a GPU.", "Leave it out.")
    places = {model.name: list(gpus_of(model)) for model in models if not model.is_ensemble}
    if as_json:
        print_json({"gpus": places, **sizes.as_dict()})
    else:
        _print_plan(places, drawn, sizes, placement)
    if excess := find_excess(sizes.engines, gpu_memory):
        raise InputError(*excess)


def _print_plan(places: dict[str, list[int]], drawn: Graph, sizes: Sizes, placement: str | None) -> None:
    from shoal.authoring.repository.devices import is_in_client

    for name, gpus in places.items():
        where = f"GPU {', '.join(map(str, gpus))}" if gpus else "host"
        is_here = placement == "hybrid" and is_in_client(drawn.members[name])
        OUT.print(f"{name}: {'client' if is_here else where}", soft_wrap=True)
    for line in sizes.explain():
        OUT.print(line, soft_wrap=True)
    if sizes.flags():
        OUT.print(f"flags: {' '.join(sizes.flags())}", soft_wrap=True)


def fill(
    file: Annotated[Path, typer.Argument(help="The template: a config.pbtxt, or YAML.")],
    substitutions: Annotated[str, typer.Argument(metavar="KEY:VALUE,...", help="Values of its placeholders ${KEY}.")],
    is_in_place: Annotated[
        bool, typer.Option("--in_place", "-i", help="Write the file itself, instead of standard output.")
    ] = False,
    keep_unset: Annotated[
        bool, typer.Option("--keep-unset", help="Leave placeholders in quotes without a value: NVIDIA's defaults.")
    ] = False,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Show the difference, and write nothing.")] = False,
) -> None:
    """Fill a template as TensorRT-LLM's fill_template.py does, but refuse mistakes.

    Nothing is written if a key is not in the template, a placeholder gets no value, or a value has a wrong type.
    """
    from shoal.authoring.composition.fill import fill_template, show_difference, write_filled

    before, after = fill_template(file, substitutions, keep_unset=keep_unset)
    if is_dry:
        typer.echo(show_difference(file, before, after))
    elif is_in_place:
        write_filled(file, after)
    else:
        typer.echo(after)


def _parse_gpus(text: str) -> tuple[int, ...] | None:
    """Parse ``0,1`` as indices and ``none`` as no GPU; an empty text leaves the choice to the plan."""
    if not text:
        return None
    try:
        return () if text == "none" else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--gpu {text!r} is not a list of GPUs.", "For example: --gpu 0,1, or --gpu none") from None

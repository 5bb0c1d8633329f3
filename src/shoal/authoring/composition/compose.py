"""Compose a model repository and its manifest from model folders, artifacts and a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shoal.authoring.check.targets import check_backends
from shoal.authoring.composition.artifacts import check_artifacts, check_present, choose_precisions, read_contents
from shoal.authoring.composition.engines import Chosen, Wanted
from shoal.authoring.composition.environments import find_environments
from shoal.authoring.composition.together import find_hosts, pack
from shoal.authoring.composition.transforms import Order, transform
from shoal.authoring.composition.tuned import read_tuned
from shoal.authoring.composition.validation import check_made
from shoal.authoring.composition.weights import find as find_weights
from shoal.authoring.composition.writing import Composition, write
from shoal.authoring.environment.targets import EMBEDDED
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.manifest import MANIFEST
from shoal.authoring.repository.plan import Plan, Tuning
from shoal.errors import SetupError
from shoal.system.paths import aside, check_path_supported, check_replaceable, exchange


def compose(
    ensembles: str | Sequence[str],
    repository: Path | str,
    *,
    artifacts: Path | str | None = None,
    plan: Plan | None = None,
    projects: Iterable[Path | str] = (),
    environments: Mapping[str, Path] | None = None,
    stubs: Mapping[str, Path] | None = None,
    is_warmed_up: bool = True,
    swap: Mapping[str, str] | None = None,
    weights: str | Path | None = None,
    tuning: Mapping[str, Tuning] | None = None,
    tuned: Path | str | None = None,
    accepts_error: bool = False,
    quantize: str = "",
    engine: str = "",
    is_together: bool = False,
) -> Path:
    """Write the model repository that serves one or more ensembles; returns its absolute path.

    A model that several ensembles use is written once. The repository is built in a temporary folder and replaces the
    old one atomically: after an interruption, the old one is unchanged. The same inputs give the same bytes.

    ``projects`` are folders with model folders of your own, in the categories ``preprocess``, ``postprocess``,
    ``models`` and ``ensembles``. ``artifacts`` is a folder with files that models name in their parameter
    ``artifacts``, separated by spaces: ``a.txt?`` is optional, and ``a.txt|b.json`` is either of the two files. Files
    in a model's version folder take precedence. ``environments`` maps the names of Python models (``""`` for all) to
    execution environments: an archive, a folder, or the output of `shoal env build`. ``stubs`` maps the same names to
    Python backend stubs, for environments without a stub. With ``is_warmed_up``, models get a warm-up request, made by
    running the pipeline's components on one text. ``swap`` replaces models in each step and each parameter ``calls``:
    ``{"llm-hf": "llm-vllm"}`` replaces ``llm-hf`` by ``llm-vllm``. ``weights`` is the folder of a language model's
    weights, a file in GGUF, which is converted to the folder ``REPOSITORY-weights``, or ``OWNER/NAME[@REVISION]`` on
    the Hugging Face hub. The weights are not copied: models with an empty parameter ``model`` get the folder's path.
    ``engine`` exchanges the engine ``llm-hf`` of a language model: ``hf`` (not), ``openvino``, ``vllm``, ``onnx``, or
    ``auto``: OpenVINO on a host where it is installed and computes what transformers does, otherwise ``hf``.
    For ``llm-openvino``, weights are exported once to the folder ``REPOSITORY-openvino``, in the form ``quantize``.
    ``tuning`` maps names of models to the settings of their instances and their dynamic batching. ``tuned`` is the plan
    file of ``shoal tune`` for the same encoders: its precision is the one for ``auto``, and it has the encoders for
    INT8; ``accepts_error`` allows any measured or unknown error of INT8. ``quantize``, ``int8`` or ``int4``, is the
    form of the weights in engines of language models that can have it. With ``is_together``, the models that code calls
    run in its process.

    Raises:
        InputError: Triton does not support the path, it holds something other than a composed repository, no model
            takes the plan's dtype, the target lacks a backend, a model cannot replace another, or a setting in
            ``tuning`` does not fit its model.
        ArtifactError: an artifact is missing, damaged or does not fit another; environment, stub and server do not fit
            together; or a model folder of your own has a mistake that `check` finds.
        SetupError: the disk is full, or the folder cannot be written.
    """
    plan = plan or Plan()
    target, names = Path(repository).resolve(), [ensembles] if isinstance(ensembles, str) else dict.fromkeys(ensembles)
    check_path_supported(target)
    folders = find_model_folders(projects)
    plan = replace(plan, tuning={**plan.tuning, **(tuning or {})})
    found = None if weights is None else find_weights(str(weights), target)
    wanted = Wanted([*names], folders, swap or {}, found, quantize, target)
    chosen = wanted.choose(engine, plan, has_environments=bool(environments))
    order = Order(
        plan=plan,
        artifacts=None if artifacts is None else Path(artifacts),
        weights=chosen.weights,
        tuned=None if tuned is None else read_tuned(Path(tuned)),
        accepts_error=accepts_error,
        quantize=chosen.quantize,
    )
    made = _draft([*names], folders, chosen, order)
    hosts = find_hosts(made.models, made.order.plan.tuning, environments or {}) if is_together else {}
    with _naming(target):
        check_replaceable(target, MANIFEST)
        made = _check(made, environments or {}, stubs or {})
        with aside(target) as folder:
            write(made, folder, is_warmed_up=is_warmed_up)
            check_made(folder, str(target), made.order.plan.target)
            pack(folder, hosts)
            exchange(folder, target)
    return target


def _draft(names: list[str], before: Mapping[str, ModelConfig], chosen: Chosen, order: Order) -> Composition:
    """Return the models for ``names`` after all transforms."""
    plan, said = order.settle(chosen.models)
    order = replace(order, plan=plan)
    models, notes = transform(chosen.models, order)
    members = {model.name: model for model in models}
    used = {*names, *(step.model for model in models for step in model.steps)}
    called = dict.fromkeys(name for model in models for name in model.calls if name not in used)
    graphs = [Graph.build(members[name], members) for name in [*names, *called]]
    return Composition(names, models, before, chosen.swap, order, [*chosen.notes, *said, *notes], graphs)


def _check(made: Composition, environments: Mapping[str, Path], stubs: Mapping[str, Path]) -> Composition:
    """Check models, artifacts and environments together; return the composition with what they decide."""
    models, artifacts, plan = made.models, made.order.artifacts, made.order.plan
    check_backends(models, plan.target)
    check_present(models, artifacts)
    check_artifacts(models, artifacts, is_embedded=plan.target == EMBEDDED)
    return replace(
        made,
        precisions=choose_precisions(models, artifacts, plan),
        environments=find_environments(models, environments, stubs, plan.target),
        contents=read_contents(artifacts),
    )


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Turn errors of the file system into one that names the repository."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if str(error.filename) in map(str, target.parents) else ""
        raise SetupError(
            f"{target} cannot be written: {error.strerror or error}{where}.",
            "What was there, if anything, is unchanged. Make room, or name another folder.",
        ) from error

"""``shoal new`` and ``shoal add-model``: skeletons of components, models and pipelines in your own project."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.cli.console import ERR, OUT, parse_pairs, plain, show_progress
from shoal.cli.usage import Command, Group
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.authoring.project.draft import Draft
    from shoal.authoring.project.scaffold.skeletons import Skeleton
    from shoal.kit.component.spec import TensorSpec

app = typer.Typer(cls=Group, no_args_is_help=True, help="Write a working, tested skeleton into your own project.")

Name = Annotated[str, typer.Argument(help="Its name: letters, digits, _, - and .")]
Project = Annotated[Path, typer.Option(help="The folder of your project.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the files, and write none.")]
Inputs = Annotated[list[str] | None, typer.Option("--input", metavar="NAME:DTYPE:DIMS", help="Such as TEXT:STRING:1.")]
Outputs = Annotated[
    list[str] | None, typer.Option("--output", metavar="NAME:DTYPE:DIMS", help="Such as LENGTH:FP32:1.")
]


@app.command(cls=Command)
def component(
    name: Name,
    inputs: Inputs = None,
    outputs: Outputs = None,
    category: Annotated[
        Literal["preprocess", "postprocess"] | None, typer.Option(help="Default: preprocess, or the category of MODEL.")
    ] = None,
    like: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Copy this component of shoal or of your project.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="PARAMETER=VALUE", help="With --like: a parameter of the copy.")
    ] = None,
    artifacts: Annotated[
        list[str] | None, typer.Option("--artifact", metavar="FILE=PATH", help="With --like: an artifact of the copy.")
    ] = None,
    is_streaming: Annotated[
        bool, typer.Option("--streaming", help="The component sends each answer in pieces, such as word by word.")
    ] = False,
    project: Project = Path(),
    is_dry: DryRun = False,
) -> None:
    """A component (code that runs before or after a model), a pipeline that uses it, and a test of the pipeline."""
    from shoal.authoring.project.scaffold.clone import draft_like
    from shoal.authoring.project.scaffold.skeletons import INPUTS, OUTPUTS, STREAMED, draft_component

    if like is not None:
        if is_streaming:
            raise InputError(
                "--streaming is for new components; a copy sends its answers as MODEL does.",
                "Leave out --streaming, or --like.",
            )
        given = parse_pairs("--artifact", artifacts, form="FILE=PATH", example="vocab.txt=build/artifacts/vocab.txt")
        made = draft_like(
            name,
            like,
            category=category,
            settings=parse_pairs("--set", settings, example="max_length=128"),
            artifacts={file: Path(path) for file, path in given.items()},
            inputs=_parse_tensors(inputs or (), "--input"),
            outputs=_parse_tensors(outputs or (), "--output"),
            project=project,
        )
    else:
        for option, values in (("--set", settings), ("--artifact", artifacts)):
            if values:
                raise InputError(
                    f"{option} {values[0]} is for a copy of a component.", "Name that component: --like MODEL"
                )
        made = draft_component(
            name,
            inputs=_parse_tensors(inputs or (), "--input") or INPUTS,
            outputs=_parse_tensors(outputs or (), "--output") or (STREAMED if is_streaming else OUTPUTS),
            category=category or "preprocess",
            project=project,
            is_streaming=is_streaming,
        )
    _finish(made, project, is_dry=is_dry)


@app.command(cls=Command)
def model(
    name: Name,
    features: Annotated[int, typer.Option(help="How many numbers the model takes per row.")],
    project: Project = Path(),
    is_dry: DryRun = False,
) -> None:
    """A model in your own code (linear, in NumPy), a script that trains it, a pipeline that uses it, and a test."""
    from shoal.authoring.project.scaffold.skeletons import draft_model

    _finish(draft_model(name, features, project=project), project, is_dry=is_dry)


@app.command(cls=Command)
def pipeline(
    name: Name,
    steps: Annotated[
        list[str] | None,
        typer.Option("--step", metavar="MODEL", help="The name of a model; may be repeated. Default: a new component."),
    ] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="MODEL.INPUT=SOURCE", help="What an input reads: MODEL.OUTPUT, or an input of the request."
        ),
    ] = None,
    project: Project = Path(),
    is_dry: DryRun = False,
) -> None:
    """A pipeline of existing models, given by name, and a test of the pipeline."""
    from shoal.authoring.project.scaffold.pipelines import draft_pipeline

    given = parse_pairs("--map", maps, example="encoder.INPUT__0=tokenizer.INPUT_IDS")
    made = draft_pipeline(name, steps or (), maps=given, project=project)
    _finish(made, project, is_dry=is_dry)


def add_model(
    source: Annotated[str, typer.Argument(help="A model's file, folder or Hugging Face name; or FILE.py:CLASS.")],
    name: Annotated[str, typer.Argument(help="Its name in your project. Default: that of its file or folder.")] = "",
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="[NAME:]DTYPE:DIMS", help="TorchScript: each argument's tensor, such as INT64:-1."
        ),
    ] = None,
    mask: Annotated[str | None, typer.Option(help="TorchScript, ONNX: the input that gives each row's length.")] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME", help="Forests: the name of each class, in the order of the classes."),
    ] = None,
    task: Annotated[
        Literal["embeddings", "classify", "rerank", "predict", "generate"] | None,
        typer.Option(help="What the model is for, if its files do not say it."),
    ] = None,
    pooling: Annotated[Literal["mean", "cls"] | None, typer.Option(help="Encoders, for embedding.")] = None,
    normalise: Annotated[
        bool | None, typer.Option("--normalise/--no-normalise", help="Encoders: embeddings of length 1.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Encoders: also write the component of this name.")] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Encoders: the most tokens per text.")] = None,
    revision: Annotated[str | None, typer.Option(help="Encoders: the commit on the hub.")] = None,
    form: Annotated[Literal["torchscript", "onnx"] | None, typer.Option("--format", help="Encoders.")] = None,
    max_batch_size: Annotated[int | None, typer.Option(min=0, help="Default: 512, or what the file allows.")] = None,
    project: Project = Path(),
    is_dry: DryRun = False,
) -> None:
    """Add an existing model to your project as a model folder: PyTorch, ONNX, forests, encoders, decoders.

    The configuration is derived from the model's file. Options give what the file does not say.
    """
    from shoal.authoring.project.importing.add_model import add_model as add
    from shoal.authoring.project.importing.imported import split_source
    from shoal.authoring.project.recipes import name_model
    from shoal.kit.generation.weights import DECODER

    options: dict[str, Any] = {
        "inputs": inputs, "mask": mask, "labels": labels, "task": task, "pooling": pooling,
        "normalise": normalise, "tokenizer": tokenizer, "max_length": max_length, "revision": revision, "format": form,
        "max_batch_size": max_batch_size, "project": project, "is_dry": is_dry,
    }  # fmt: skip
    name, said = name or name_model(split_source(source)[0]), list[str]()
    if Path(source).suffix.lower() == ".pt":
        ERR.print(f"{plain(source)} is a program, and is run now, as you: add files that you trust.", soft_wrap=True)
    with show_progress() as show:
        paths = add(source, name, tell=said.append, on_progress=show, **options)
    for line in said:
        _print(line)
    _print_paths(paths, is_dry=is_dry)
    weights = project / "models" / name / "1"
    if not is_dry and (weights / DECODER).is_file():
        compose = ["shoal", "compose", "llm", project / "build" / "llm", "--project", project, "--weights", weights]
        _print_next(["shoal", "check", project], [*compose, "--swap", f"llm-hf={name}"])
    elif not is_dry:
        steps = [part for step in (tokenizer, name) if step for part in ("--step", step)]
        at = ["--project", project] if project != Path() else []
        _print_next(["shoal", "check", project], ["shoal", "new", "pipeline", f"{name}_alone", *steps, *at])


def _parse_tensors(texts: Iterable[str], option: str) -> tuple[TensorSpec, ...]:
    from shoal.authoring.project.scaffold.names import parse_tensor

    return tuple(parse_tensor(text, option) for text in texts)


# --- answers -----------------------------------------------------------------------------------------------------


def _finish(made: Skeleton, project: Path, *, is_dry: bool) -> None:
    """Write the files and print the next commands; with ``is_dry``, only print the files."""
    _print_paths(made.draft.write(is_dry=is_dry), is_dry=is_dry)
    for line in made.said:
        _print(line)
    if is_dry:
        _print_texts(made.draft)
        return
    repository = project / "build" / made.pipeline
    more = ["--artifacts", project / "build" / "artifacts"] if made.needs_artifacts else []
    _print_next(
        ["shoal", "check", project],
        ["pytest", project / made.test],
        ["shoal", "compose", made.pipeline, repository, *more, "--project", project],
        ["shoal", "serve", repository],
    )


def _print_paths(paths: Iterable[Path], *, is_dry: bool) -> None:
    for path in paths:
        _print(f"{'would be written' if is_dry else 'written'}: {path}")


def _print_texts(draft: Draft) -> None:
    for name, content in draft.files.items():
        if isinstance(content, str) and content:
            for line in ("", f"--- {draft.root / name}", *content.rstrip("\n").split("\n")):
                _print(line)


def _print_next(*commands: Sequence[Any]) -> None:
    for command in commands:
        _print(f"next: {shlex.join(map(str, command))}")


def _print(line: str) -> None:
    OUT.print(line, soft_wrap=True, markup=False)

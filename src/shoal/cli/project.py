"""``shoal new`` and ``shoal add-model``: skeletons of components, models and pipelines in your own project."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from shoal.cli.usage import Command, Group
from shoal.console import OUT, show_progress
from shoal.errors import InputError, ShoalError

if TYPE_CHECKING:
    from shoal.component.spec import TensorSpec
    from shoal.project.draft import Draft
    from shoal.project.scaffold.pipelines import Question
    from shoal.project.scaffold.skeletons import Skeleton

T = TypeVar("T")
app = typer.Typer(cls=Group, no_args_is_help=True, help="Write a working, tested skeleton into your own project.")

Name = Annotated[str | None, typer.Argument(help="Its name: letters, digits, _ and -.", show_default=False)]
Project = Annotated[Path, typer.Option(help="The folder of your project.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the files, and write none.")]
Inputs = Annotated[list[str] | None, typer.Option("--input", metavar="NAME:DTYPE:DIMS", help="Such as TEXT:STRING:1.")]
Outputs = Annotated[
    list[str] | None, typer.Option("--output", metavar="NAME:DTYPE:DIMS", help="Such as LENGTH:FP32:1.")
]


@app.command(cls=Command)
def component(
    name: Name = None,
    inputs: Inputs = None,
    outputs: Outputs = None,
    category: Annotated[
        Literal["preprocess", "postprocess"] | None, typer.Option(help="Default: preprocess, or that of MODEL.")
    ] = None,
    like: Annotated[str | None, typer.Option(metavar="MODEL", help="Copy this one of shoal's or of yours.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="PARAMETER=VALUE", help="With --like.")] = None,
    artifacts: Annotated[list[str] | None, typer.Option("--artifact", metavar="FILE=PATH", help="With --like.")] = None,
    is_streaming: Annotated[
        bool, typer.Option("--streaming", help="It answers in pieces, such as word by word.")
    ] = False,
    project: Project = Path(),
    is_dry: DryRun = False,
) -> None:
    """A component (code that runs before or after a model), a pipeline that uses it, and a test that serves it."""
    from shoal.project.scaffold.clone import draft_like
    from shoal.project.scaffold.names import parse_settings
    from shoal.project.scaffold.skeletons import INPUTS, OUTPUTS, STREAMED, draft_component

    name = _ask_name(name, "component")
    if like is not None:
        if is_streaming:
            raise InputError("A copy answers as what it is a copy of.", "Leave out --streaming, or --like.")
        given = parse_settings(artifacts or (), "--artifact")
        made = draft_like(
            name,
            like,
            category=category,
            settings=parse_settings(settings or (), "--set"),
            artifacts={file: Path(path) for file, path in given.items()},
            inputs=_parse_tensors(inputs or (), "--input"),
            outputs=_parse_tensors(outputs or (), "--output"),
            project=project,
        )
    else:
        for option, values in (("--set", settings), ("--artifact", artifacts)):
            if values:
                raise InputError(f"{option} {values[0]} is of a component that exists.", "Name it: --like MODEL")
        takes = _ask_tensors(inputs, "--input", INPUTS)
        gives = _ask_tensors(outputs, "--output", STREAMED if is_streaming else OUTPUTS)
        made = draft_component(
            name, inputs=takes, outputs=gives, category=category or "preprocess", project=project,
            is_streaming=is_streaming,
        )  # fmt: skip
    _finish(made, project, is_dry=is_dry)


@app.command(cls=Command)
def model(
    name: Name = None,
    features: Annotated[int | None, typer.Option(help="How many numbers it takes.", show_default=False)] = None,
    project: Project = Path(),
    is_dry: DryRun = False,
) -> None:
    """A model whose code is yours: linear, in NumPy, with a script that fits it, a pipeline and a test."""
    from shoal.project.scaffold.skeletons import draft_model

    name = _ask_name(name, "model")
    if features is None:
        features = _ask("How many features does it take", _parse_number, "--features 4")
    _finish(draft_model(name, features, project=project), project, is_dry=is_dry)


@app.command(cls=Command)
def pipeline(
    name: Name = None,
    steps: Annotated[
        list[str] | None,
        typer.Option("--step", metavar="MODEL", help="A model by name; repeat it. Default: a new component."),
    ] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="MODEL.INPUT=SOURCE", help="What an input reads: MODEL.OUTPUT or a request's name."
        ),
    ] = None,
    project: Project = Path(),
    is_dry: DryRun = False,
) -> None:
    """A pipeline of models by name, with a test that serves it."""
    from shoal.project.scaffold.names import parse_settings
    from shoal.project.scaffold.pipelines import draft_pipeline

    name = _ask_name(name, "pipeline")
    if steps is None and is_terminal():
        steps = str(
            typer.prompt("Its models in their order, blanks between; none: a new component", default="")
        ).split()
    given = parse_settings(maps or (), "--map")
    ask = _ask_source if is_terminal() else None
    made = draft_pipeline(name, steps or (), maps=given, project=project, ask=ask)
    _finish(made, project, is_dry=is_dry)


def add_model(
    source: Annotated[
        str, typer.Argument(help="A model's file, or an encoder's or decoder's folder or Hugging Face name.")
    ],
    name: Annotated[str, typer.Argument(help="Its name in your project.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="[NAME:]DTYPE:DIMS", help="TorchScript: each argument, such as INT64:-1."),
    ] = None,
    mask: Annotated[str | None, typer.Option(help="TorchScript, ONNX: the input that says how long a row is.")] = None,
    features: Annotated[int | None, typer.Option(min=1, help="Forests: how many it must take.")] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME", help="Forests: the name of each class, in their order."),
    ] = None,
    head: Annotated[
        Literal["embedding", "classification", "regression"] | None, typer.Option(help="Encoders: what they give.")
    ] = None,
    pooling: Annotated[Literal["mean", "cls"] | None, typer.Option(help="Encoders, for embedding.")] = None,
    normalise: Annotated[
        bool | None, typer.Option("--normalise/--no-normalise", help="Encoders: embeddings of length 1.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Encoders: also write the component of this name.")] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Encoders: the most tokens of a text.")] = None,
    revision: Annotated[str | None, typer.Option(help="Encoders: the commit on the hub.")] = None,
    form: Annotated[Literal["torchscript", "onnx"] | None, typer.Option("--format", help="Encoders.")] = None,
    max_batch_size: Annotated[int | None, typer.Option(min=0, help="Default: 512, or what the file allows.")] = None,
    is_decoder: Annotated[
        bool, typer.Option("--decoder", help="A language model that continues text, for ONNX Runtime.")
    ] = False,
    project: Project = Path(),
    is_dry: DryRun = False,
) -> None:
    """Add an existing model to your project as a model folder: PyTorch, ONNX, forests, encoders, decoders.

    Its configuration is derived from the model; what a file does not say must be given.
    """
    from shoal.project.importing.add_model import add_model as add

    options: dict[str, Any] = {
        "inputs": inputs, "mask": mask, "num_features": features, "labels": labels, "head": head, "pooling": pooling,
        "normalise": normalise, "tokenizer": tokenizer, "max_length": max_length, "revision": revision, "format": form,
        "max_batch_size": max_batch_size,
    }  # fmt: skip
    said: list[str] = []
    with show_progress() as show:
        paths = add(
            source, name, project=project, is_decoder=is_decoder, is_dry=is_dry, tell=said.append, on_progress=show,
            **options,
        )  # fmt: skip
    for line in said:
        _print(line)
    _print_paths(paths, is_dry=is_dry)
    if not is_dry:
        steps = [part for step in (tokenizer, name) if step for part in ("--step", step)]
        at = ["--project", project] if project != Path() else []
        then = ["shoal", "new", "pipeline", f"{name}_alone", *steps, *at]
        if is_decoder:
            weights = project / "models" / name / "1"
            then = ["shoal", "compose", "llm", project / "build" / "llm", "--project", project, "--weights", weights]
            then += ["--swap", f"llm-hf={name}"]
        _print_next(["shoal", "check", project], then)


# --- questions, only on a terminal -------------------------------------------------------------------------------


def is_terminal() -> bool:
    """Whether standard input is a terminal, so that questions can be asked."""
    return sys.stdin.isatty()


def _ask(question: str, parse: Callable[[str], T], option: str, default: str | None = None) -> T:
    """Ask on a terminal until the answer can be parsed; elsewhere use the default, if there is one."""

    def read(answer: str) -> T:
        try:
            return parse(answer)
        except ShoalError as error:
            raise typer.BadParameter(str(error)) from None

    if is_terminal():
        answer: T = typer.prompt(question, default=default, value_proc=read)
        return answer
    if default is None:
        raise InputError(f"{question}?", f"Give it: {option}")
    return parse(default)


def _ask_name(name: str | None, kind: str) -> str:
    return name or _ask(f"What is the {kind} called", str, f"shoal new {kind} NAME")


def _ask_tensors(given: Sequence[str] | None, option: str, default: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    if given:
        return _parse_tensors(given, option)
    kind, verb = option.removeprefix("--"), "take" if option == "--input" else "give"
    known = " ".join(f"{t.name}:{t.dtype.removeprefix('TYPE_')}:{','.join(map(str, t.dims))}" for t in default)
    question = f"What does it {verb}, as NAME:DTYPE:DIMS, blanks between {kind}s"
    return _ask(question, lambda answer: _parse_tensors(answer.split(), option), option, known)


def _parse_tensors(texts: Iterable[str], option: str) -> tuple[TensorSpec, ...]:
    from shoal.project.scaffold.names import parse_tensor

    return tuple(parse_tensor(text, option) for text in texts)


def _parse_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{text!r} is not a whole number.", "For example: 4") from None


def _ask_source(question: Question) -> str:
    from shoal.project.scaffold.text import describe

    fits = ", ".join(map(str, question.fits))
    asked = f"What does {question.key} read, {describe(question.tensor, '')}: {fits}, or a name in the request"
    return str(typer.prompt(asked, default=str(question.nearest)))


# --- answers -----------------------------------------------------------------------------------------------------


def _finish(made: Skeleton, project: Path, *, is_dry: bool) -> None:
    """Write the files, or show them, and print the next commands."""
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
            _print(f"\n--- {draft.root / name}\n{content}".rstrip("\n"))


def _print_next(*commands: Sequence[Any]) -> None:
    for command in commands:
        _print(f"next: {shlex.join(map(str, command))}")


def _print(line: str) -> None:
    OUT.print(line, soft_wrap=True, markup=False)

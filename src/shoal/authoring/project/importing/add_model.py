"""Import of a model into a user's project, with a configuration derived from the model itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from shoal.authoring.composition.validation import check_made
from shoal.authoring.project.draft import Draft
from shoal.authoring.project.importing.foreign import FILES
from shoal.authoring.project.importing.imported import Imported, split_source, stage
from shoal.authoring.project.importing.tasks import GENERATE, check_file, check_task, read_task
from shoal.authoring.project.scaffold.names import check_name, find_project_folders
from shoal.authoring.repository.config import CONFIG, as_config, write_config
from shoal.errors import InputError, needs, printable
from shoal.system.progress import OnProgress

_SCRATCH, _PROGRESS = _GIVEN = ("scratch", "on_progress")  # parameters of draft functions that add_model sets itself


@dataclass(frozen=True)
class _Kind:
    """A kind of model, and the function that drafts a model folder from a model of this kind."""

    what: str
    module: str
    function: str
    extra: str = "serve"

    def load(self) -> Callable[..., Imported]:
        with needs(self.extra):
            module = import_module(f"shoal.authoring.project.importing.{self.module}")
        draft: Callable[..., Imported] = getattr(module, self.function)
        return draft


_TORCHSCRIPT = _Kind("a TorchScript model", "torchscripts", "draft_torchscript")
_ONNX = _Kind("an ONNX model", "graphs", "draft_graph")
_FOREST = _Kind("a forest", "forests", "draft_forest")
_ENCODER = _Kind("an encoder", "encoders", "draft_encoder", "train")
_DECODER = _Kind("a decoder", "decoders", "draft_decoder", "train")
_COMPONENT = _Kind("a component", "components", "draft_own_component")
KINDS = {
    ".pt": _TORCHSCRIPT,
    **dict.fromkeys((".onnx", ".cbm"), _ONNX),
    **dict.fromkeys((".json", ".ubj", ".txt", ".tl", ".skops"), _FOREST),
    ".py": _COMPONENT,
}
# Kinds of objects, by the package that defines their class or a base class.
_PACKAGES = {"sklearn": _FOREST, "xgboost": _FOREST, "lightgbm": _FOREST, "treelite": _FOREST, "torch": _TORCHSCRIPT}
_SAVED_FIRST = {
    "transformers": "Save it and its tokenizer with save_pretrained; then name their folder.",
    "onnx": 'Save it: onnx.save(model, "model.onnx"); then name the file.',
}


def add_model(
    source: Any,
    name: str,
    *,
    project: Path | str = ".",
    task: str | None = None,
    is_dry: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    on_progress: OnProgress = lambda stage, done, total: None,
    **options: Any,
) -> list[Path]:
    """Import a model as the model folder ``models/NAME`` of a project; return the paths of the new files.

    ``source`` is a file (TorchScript ``.pt``, ONNX ``.onnx``, XGBoost ``.json`` or ``.ubj``, LightGBM ``.txt``,
    Treelite ``.tl``, scikit-learn ``.skops``, CatBoost ``.cbm``), a component ``FILE.py:CLASS``, whose file is run, an
    object (an estimator, a booster, a torch.jit.ScriptModule), or the Hugging Face name or the folder of an encoder or
    a language model. ``task`` is what it is for: ``embeddings``,
    ``classify``, ``predict`` or ``generate``; a folder's files say it, if they can. A model that generates is exported
    to ONNX by ``draft_decoder``. ``options`` are the keyword arguments of the function for the kind of model:
    ``draft_torchscript``, ``draft_graph`` (ONNX), ``draft_forest`` or ``draft_encoder``. An option that is None counts
    as not given.

    Nothing is written if ``shoal check`` reports an error, and no file is overwritten. ``is_dry``: only return the
    paths. ``tell`` is called with each note for the user. The notes say what was derived, and from what; they are also
    written into ``config.pbtxt`` as a comment. ``on_progress`` is called with a stage's name, 0 and 1 when the stage
    starts, and with the name, 1 and 1 when it ends.

    Raises:
        InputError: the kind of ``source`` is unknown, the name or an option is invalid, a file exists, or an option is
            missing that cannot be derived from the model.
        ArtifactError: the model is damaged, or cannot be served.
        SetupError: a library that reads the model is not installed, or the project's folder cannot be written.
    """
    root = Path(project)
    available = find_project_folders(root)
    check_name(name, available)
    check_task(task)
    kind = _find_kind(source)
    if kind is not _ENCODER:
        check_file(f"{source}" if isinstance(source, str | Path) else f"a {type(source).__name__}", task)
    elif (task := read_task(Path(source), task) if Path(source).is_dir() else task) == GENERATE:
        kind = _DECODER
    else:
        options["task"] = task
    with stage(on_progress, f"loading the libraries for {kind.what}"):
        draft = kind.load()
    given = _check_options(kind, draft, {key: value for key, value in options.items() if value is not None})
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        scratch = Path(folder)
        taken = signature(draft).parameters
        if _SCRATCH in taken:
            (scratch / "made").mkdir()
            given[_SCRATCH] = scratch / "made"
        if _PROGRESS in taken:
            given[_PROGRESS] = on_progress
        with nullcontext() if _PROGRESS in taken else stage(on_progress, f"reading and trying {kind.what}"):
            imported = draft(source, name, **given)
        for other in {Path(path).parts[1] for path in imported.beside}:
            check_name(other, {**available, name: as_config(imported.message, root / "models" / name)})
        for line in imported.said:
            tell(line)
        with stage(on_progress, "checking the model folder"):
            files = _files(imported, name, scratch / "checked")
        return Draft(root, {**imported.beside, **files}).write(is_dry=is_dry)


def _find_kind(source: Any) -> _Kind:
    if not isinstance(source, str | Path):
        return _kind_of_object(source)
    path, _ = split_source(source)
    suffix = path.suffix.lower()
    if path.is_dir() or (not path.exists() and suffix not in {**KINDS, **FILES}):
        return _ENCODER  # a folder, or a name on a hub
    if not path.exists():
        raise InputError(f"There is no file {path}.", "Name the model's file.")
    if suffix not in KINDS:
        if found := FILES.get(suffix):
            raise InputError(f"{path} is {found.what}, which cannot be added.", found.fix)
        what = f"{path} is not a model that can be added. Known suffixes: {', '.join(KINDS)}."
        raise InputError(what, "Convert it to a file with one of these suffixes.")
    return KINDS[suffix]


def _kind_of_object(source: Any) -> _Kind:
    for parent in type(source).__mro__:
        package = parent.__module__.partition(".")[0]
        if package in _PACKAGES:
            return _PACKAGES[package]
        if package in _SAVED_FIRST:
            raise InputError(f"A {type(source).__name__} cannot be added as an object.", _SAVED_FIRST[package])
    raise InputError(
        f"A {type(source).__name__} is not a model that can be added.",
        f"Give a file, an encoder's name, or an object of {', '.join(_PACKAGES)}.",
    )


def _check_options(kind: _Kind, draft: Callable[..., Imported], options: Mapping[str, Any]) -> dict[str, Any]:
    taken = signature(draft).parameters.values()
    known = [p.name for p in taken if p.kind == Parameter.KEYWORD_ONLY and p.name not in _GIVEN]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(
            f"Unknown option for {kind.what}: {', '.join(unknown)}.", f"It takes: {', '.join(known) or 'none'}."
        )
    return dict(options)


def _files(imported: Imported, name: str, repository: Path) -> Mapping[str, str | bytes | Path]:
    """Write the model folder to the temporary ``repository``, check it, and return its files by their project paths.

    Raises:
        ArtifactError: Triton would refuse the model folder.
    """
    folder = repository / name
    for path, file in imported.files.items():
        _put(folder / path, file)
    for path, content in imported.beside.items():
        _put(repository.joinpath(*Path(path).parts[1:]), content)
    comment = "\n# ".join(printable(" ".join(line.split())) for line in imported.said)
    write_config(imported.message, folder / CONFIG, comment=comment)
    check_made(repository, f"models/{name}")
    text = (folder / CONFIG).read_text(encoding="utf-8")
    return {f"models/{name}/{path}": file for path, file in {CONFIG: text, **imported.files}.items()}


def _put(path: Path, content: str | bytes | Path) -> None:
    """Write text or bytes to ``path``; if ``content`` is the path of a file, link to the file, which may be large."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path):
        path.symlink_to(content.resolve())
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)

"""Work folder of an unfinished training: results of finished stages, and the encoder's checkpoint.

The folder is beside the artifact folder, and is removed when the artifact folder is written. A training interrupted at
any moment resumes from the work folder: results of finished stages are read, and the encoder continues from its last
checkpoint.
"""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import InputError, SetupError
from shoal.system.paths import lock

SETTINGS = "settings.json"
HASHES = {"corpus": "texts or targets", "weights": "weights of the encoder"}  # settings that are hashes
SAVE_EVERY = 60.0  # seconds of training that an interruption may lose
MAX_SAVING = 0.05  # share of the time that may go into saving, for encoders of gigabytes

Arrays = Mapping[str, np.ndarray[Any, Any]]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file atomically: it exists whole or not at all.

    Raises:
        SetupError: the file cannot be written.
    """
    aside = path.with_name(f"{path.name}.new")
    try:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise SetupError(
            f"The training cannot be saved in {path.parent}: {error.strerror}.",
            "Make room, and run the same command again.",
        ) from None


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of nested settings; the name of an inner setting is ``outer.inner``."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def describe_changes(begun: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Describe how flattened settings differ; empty if they do not."""
    changes = []
    for name, value in wanted.items():
        if begun.get(name) == value:
            continue
        if name in HASHES:
            changes.append(f"other {HASHES[name]}")
        else:
            changes.append(f"{name.rpartition('.')[2]} {begun.get(name)!r}, now {value!r}")
    return "; ".join(changes)


@dataclass(frozen=True)
class Result:
    """Result of a training stage: arrays, and values stored as JSON (``facts``)."""

    arrays: Arrays
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Checkpoint:
    """Checkpoint of one encoder under training, in one file that is replaced atomically."""

    path: Path
    save_every: float = SAVE_EVERY
    _saved_at: float = field(default_factory=time.perf_counter)
    _cost: float = 0.0

    def load(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the saved tensors by name, and the values saved with them; None if nothing was saved."""
        if not self.path.is_file():
            return None
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a mapping)
            return tensors, json.loads(file.metadata()["facts"])

    def is_due(self) -> bool:
        """Whether it is time to save again; with ``save_every`` 0 it always is."""
        wanted = max(self.save_every, self._cost / MAX_SAVING) if self.save_every else 0.0
        return time.perf_counter() - self._saved_at >= wanted

    def save(self, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Replace the saved state.

        Raises:
            SetupError: the state cannot be written, for example because the disk is full; the previous state is kept.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        start = time.perf_counter()
        aside = self.path.with_suffix(".new")
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            save_file(whole, aside, {"facts": json.dumps(dict(facts))})
            aside.replace(self.path)
        except (OSError, SafetensorError) as error:
            aside.unlink(missing_ok=True)
            size = sum(tensor.nbytes for tensor in whole.values()) / 2**30
            raise SetupError(
                f"The training cannot be saved in {self.path.parent}: {error}.",
                f"This needs twice {size:.1f} GiB of free space there. Make room, and run the same command again.",
            ) from None
        self._saved_at = time.perf_counter()
        self._cost = self._saved_at - start

    def remove(self) -> None:
        """Delete the checkpoint, once the result of its stage is stored."""
        self.path.unlink(missing_ok=True)


class Work:
    """Store in ``folder`` for the results and checkpoints of one training."""

    def __init__(self, folder: Path, save_every: float) -> None:
        self.folder, self._save_every = folder, save_every
        self.is_resumed = False

    def holds_something(self) -> bool:
        """Whether a stage is finished or a checkpoint has been written."""
        return any(path.suffix in (".npz", ".safetensors") for path in self.folder.iterdir())

    def once(self, stage: str, make: Callable[[], Result]) -> Result:
        """Return the stage's result: read it if the stage is finished, else compute it with ``make`` and store it."""
        path = self.folder / f"{stage}.npz"
        if path.is_file():
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            facts = json.loads(str(arrays.pop("facts")))
            return Result(arrays, facts)
        result = make()
        packed = io.BytesIO()
        np.savez(packed, facts=np.array(json.dumps(result.facts)), **dict(result.arrays))
        write_whole(path, packed.getvalue())
        return result

    def checkpoint(self, stage: str) -> Checkpoint:
        """Return the checkpoint of the encoder that this stage trains."""
        return Checkpoint(self.folder / f"{stage}.safetensors", self._save_every)


def work_folder(out: Path) -> Path:
    """Return the work folder of the training that writes the artifact folder ``out``."""
    return out.with_name(f".{out.name}.training")


@contextmanager
def open_work(out: Path, settings: Mapping[str, Any], *, is_fresh: bool, save_every: float) -> Iterator[Work]:
    """Create and lock the work folder of the training that writes ``out``, or open that of an interrupted training.

    ``settings`` are flat, as from `flatten`. The folder is removed when the training ends; after an error, it is
    removed only if no stage is finished and no checkpoint saved.

    Raises:
        InputError: an interrupted training of ``out`` had other settings, or the folder cannot be written.
        SetupError: another process is using the folder.
    """
    folder = work_folder(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{out} cannot be written: {error.strerror} ({error.filename}).", "Name another --out."
        ) from None
    with lock(folder, f"Another process is training {out.name} in {out.parent}.", "Name another --out."):
        work = Work(folder, save_every)
        if is_fresh:
            _empty(folder)
        _settle(work, out, settings)
        try:
            yield work
        except BaseException:
            if not work.holds_something():
                shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _settle(work: Work, out: Path, settings: Mapping[str, Any]) -> None:
    """Save the settings of a new training, or check that an interrupted training had the same settings."""
    path = work.folder / SETTINGS
    work.is_resumed = path.is_file() and work.holds_something()
    if not work.is_resumed:
        _empty(work.folder)  # what may be left of a training whose folder was half removed
        write_whole(path, json.dumps(dict(settings), indent=1) + "\n")
        return
    begun = json.loads(path.read_text(encoding="utf-8"))
    if changes := describe_changes(begun, settings):
        raise InputError(
            f"A training of {out} was interrupted that had other settings: {changes}.",
            f"Run the earlier command again to finish it, or add --fresh to start over; or remove {work.folder}.",
        )

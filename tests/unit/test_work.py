"""A training's state on disk: finished stages, checkpoints, settings, the lock."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.errors import InputError, SetupError
from shoal.readability.work import Checkpoint, Result, open_work

SETTINGS = {"corpus": "a", "seed": 0, "preset.num_folds": 5}


class StoppedError(Exception):
    pass


def test_a_finished_stage_is_not_made_again(tmp_path: Path) -> None:
    calls = []

    def make() -> Result:
        calls.append(1)
        return Result({"scores": np.array([1.5, np.nan])}, {"head": "mean", "share of “the”": 0.1})

    def interrupted() -> None:
        with open_work(tmp_path / "out", SETTINGS, is_fresh=False, save_every=60) as work:
            assert not work.is_resumed
            work.once("fold-1", make)
            raise StoppedError

    with pytest.raises(StoppedError):
        interrupted()
    with open_work(tmp_path / "out", SETTINGS, is_fresh=False, save_every=60) as work:
        assert work.is_resumed
        result = work.once("fold-1", make)
    np.testing.assert_array_equal(result.arrays["scores"], [1.5, np.nan])
    assert result.facts == {"head": "mean", "share of “the”": 0.1}
    assert len(calls) == 1
    assert list(tmp_path.iterdir()) == []


def leave_behind(out: Path) -> None:
    def interrupted() -> None:
        with open_work(out, SETTINGS, is_fresh=False, save_every=60) as work:
            work.once("fold-1", lambda: Result({}, {}))
            raise StoppedError

    with pytest.raises(StoppedError):
        interrupted()


def test_other_settings_are_refused_by_default(tmp_path: Path) -> None:
    out = tmp_path / "out"
    leave_behind(out)
    message = (
        r"A training of .*out was interrupted that had other settings: other texts or targets; seed 0, now 1;"
        r" num_folds 5, now 3\. Run the earlier command again"
    )
    with (
        pytest.raises(InputError, match=message),
        open_work(out, {"corpus": "b", "seed": 1, "preset.num_folds": 3}, is_fresh=False, save_every=60),
    ):
        pass
    with open_work(out, SETTINGS | {"seed": 1}, is_fresh=True, save_every=60) as work:
        assert not work.is_resumed
        assert work.once("fold-1", lambda: Result({}, {"new": True})).facts == {"new": True}
    assert list(tmp_path.iterdir()) == []


def test_a_half_removed_folder_is_not_used(tmp_path: Path) -> None:
    out = tmp_path / "out"
    leave_behind(out)
    (tmp_path / ".out.training" / "settings.json").unlink()
    with open_work(out, SETTINGS | {"seed": 1}, is_fresh=False, save_every=60) as work:
        assert not work.is_resumed
        assert work.once("fold-1", lambda: Result({}, {"new": True})).facts == {"new": True}


def test_two_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with open_work(out, SETTINGS, is_fresh=False, save_every=60):
        with (
            pytest.raises(SetupError, match=r"Another process is training out in .*\. Name another --out\."),
            open_work(out, SETTINGS, is_fresh=True, save_every=60),
        ):
            pass
        assert (tmp_path / ".out.training" / "settings.json").is_file()


def test_an_error_before_anything_was_kept_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> None:
        with open_work(tmp_path / "out", SETTINGS, is_fresh=False, save_every=60):
            raise StoppedError

    with pytest.raises(StoppedError):
        fails()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "encoder.safetensors", save_every=0)
    assert checkpoint.load() is None
    assert checkpoint.is_due()
    for step in (1, 2):
        checkpoint.save({"w": torch.full((2, 3), float(step)).T, "n": torch.tensor(4)}, {"step": step})
    (tmp_path / "encoder.new").write_bytes(b"half of the next one")
    loaded = checkpoint.load()
    assert loaded is not None
    tensors, facts = loaded
    assert torch.equal(tensors["w"], torch.full((3, 2), 2.0))
    assert (int(tensors["n"]), facts) == (4, {"step": 2})
    assert not Checkpoint(tmp_path / "other").is_due()
    checkpoint.remove()
    checkpoint.remove()
    assert checkpoint.load() is None


def test_no_room_for_a_checkpoint(tmp_path: Path) -> None:
    """The kernel refuses a file of more than 10 kB; what was saved before is still there."""
    checkpoint = Checkpoint(tmp_path / "encoder.safetensors", save_every=0)
    checkpoint.save({"w": torch.ones(3)}, {"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(SetupError, match=r"cannot be saved in .*File too large.* This needs twice 0\.1 GiB"):
            checkpoint.save({"w": torch.zeros(2**24)}, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["encoder.safetensors"]
    loaded = checkpoint.load()
    assert loaded is not None
    assert loaded[1] == {"step": 1}


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(InputError, match=r"out cannot be written: Not a directory \(.*\)\. Name another --out\."),
        open_work(tmp_path / "file" / "out", SETTINGS, is_fresh=False, save_every=60),
    ):
        pass

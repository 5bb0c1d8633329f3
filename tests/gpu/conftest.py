"""Fixtures of tests that need a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.plan import Plan
from shoal.clients.local import Pipeline, load

GPU_LIBRARIES = ("cupy", "nvforest", "pylibcudf", "rmm", "torch")


def missing_for_gpu() -> str:
    """Return why these tests cannot run; empty where they can."""
    absent = [name for name in GPU_LIBRARIES if importlib.util.find_spec(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    import torch

    return "" if torch.cuda.is_available() else "there is no GPU"


needs_gpu = pytest.mark.skipif(bool(missing_for_gpu()), reason=f"GPU tests: {missing_for_gpu()}")


@pytest.fixture(scope="session")
def gpu_pipeline(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    repository = compose(
        "ensemble_all", tmp_path_factory.mktemp("gpu") / "r", artifacts=artifacts, plan=Plan(placement="gpu")
    )
    loaded = load(repository / "ensemble_all")
    yield loaded
    loaded.close()

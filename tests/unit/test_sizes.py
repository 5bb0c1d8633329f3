"""The arithmetic of placements."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.call_graph import collect
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.manifest import launch_flags, read_manifest
from shoal.authoring.repository.placement import place_all
from shoal.authoring.repository.plan import Plan
from shoal.authoring.repository.sizes import MIB, Largest, find_sizes
from shoal.kit.component.files import sha256
from shoal.kit.component.spec import TensorSpec
from shoal.serving.server.container import container_command

LARGEST = Largest(rows=512, width=256, text_bytes=1000)
IDS, FEATURES, SCORE, TEXTS = 512 * 256 * 8, 512 * 207 * 4, 512 * 4, 512 * 1000


@pytest.fixture(scope="module")
def graph() -> Graph:
    return placed(Plan())


def placed(plan: Plan) -> Graph:
    models = place_all(collect("ensemble_all", find_model_folders()), plan)
    return Graph.build(models[-1], {model.name: model for model in models})


def test_the_size_of_a_tensor() -> None:
    assert LARGEST.num_bytes(TensorSpec("X", "TYPE_INT64", (-1,))) == IDS
    assert LARGEST.num_bytes(TensorSpec("X", "TYPE_FP32", (207,))) == FEATURES
    assert LARGEST.num_bytes(TensorSpec("X", "TYPE_STRING", (1,))) == TEXTS


@pytest.mark.parametrize("gpus", [(0,), (0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("concurrency", [1, 16, 100])
def test_placement_gpu(gpus: tuple[int, ...], concurrency: int) -> None:
    plan = Plan(placement="gpu", gpus=gpus, concurrency=concurrency)
    sizes = find_sizes(placed(plan), plan, LARGEST)
    between = concurrency * (2 * IDS + FEATURES + 5 * SCORE)  # two scores in, three out of postprocess
    assert sum(line.total for line in sizes.lines if line.pool == "cuda") == between
    assert 2 * between <= sizes.cuda_pool < 2 * between + 64 * MIB
    assert sizes.pinned_pool == 256 * MIB
    # Four models with an instance on each GPU; only the request comes through shared memory.
    shared = len(gpus) * (4 * 2 * MIB + 3 * (TEXTS + SCORE))
    assert sum(line.total for line in sizes.lines if line.pool == "shared") == shared
    assert sizes.flags() == [
        *(f"--cuda-memory-pool-byte-size={gpu}:{sizes.cuda_pool}" for gpu in gpus),
        f"--pinned-memory-pool-byte-size={sizes.pinned_pool}",
    ]


def test_placement_hybrid() -> None:
    """In the whole ensemble of such a repository what preprocess gives lies on the host, what models give does not."""
    plan = Plan(placement="hybrid", concurrency=10)
    sizes = find_sizes(placed(plan), plan, LARGEST)
    pools = {pool: sum(line.total for line in sizes.lines if line.pool == pool) for pool in ("cuda", "pinned")}
    assert pools == {"cuda": 10 * 2 * SCORE, "pinned": 10 * (2 * IDS + FEATURES + 3 * SCORE)}


def test_placement_cpu(graph: Graph) -> None:
    sizes = find_sizes(graph, Plan(), LARGEST)
    assert (sizes.cuda_pool, sizes.pinned_pool, sizes.flags()) == (0, 0, [])
    tensors = TEXTS + 2 * (2 * IDS + FEATURES) + (2 + 2) * SCORE + 4 * SCORE
    assert sum(line.total for line in sizes.lines if line.pool == "shared") == 4 * 2 * MIB + 3 * tensors


def test_native_backends_need_no_shared_memory(graph: Graph) -> None:
    sizes = find_sizes(graph, Plan(target="26.06"), LARGEST)
    assert not [line for line in sizes.lines if line.what.startswith(("bert-large", "cuml"))]


def test_the_arithmetic_is_shown() -> None:
    lines = find_sizes(placed(Plan(placement="gpu")), Plan(placement="gpu"), LARGEST).explain()
    assert "cuda   tree_feats: 423,936 x 16 = 6,782,976" in lines
    assert "CUDA pool, of each GPU: 2 x 40,501,248 -> 134,217,728" in lines


# --- repositories ------------------------------------------------------------------------------------------------


def contents(repository: Path) -> dict[str, str]:
    return {str(p.relative_to(repository)): sha256(p) for p in repository.rglob("*") if p.is_file()}


def test_placements_differ_in_configs(artifacts: Path, tmp_path: Path) -> None:
    made = {
        name: contents(
            compose("ensemble_all", tmp_path / name, artifacts=artifacts, plan=Plan(placement=name, target="26.06"))
        )
        for name in ("cpu", "hybrid", "gpu")
    }
    assert set(made["cpu"]) == set(made["hybrid"]) == set(made["gpu"])
    for name in ("hybrid", "gpu"):
        differing = {path for path in made["cpu"] if made[name][path] != made["cpu"][path]}
        assert {Path(path).name for path in differing} == {"config.pbtxt", "manifest.json"}
    assert launch_flags(tmp_path / "cpu") == []
    assert launch_flags(tmp_path / "gpu")[0].startswith("--cuda-memory-pool-byte-size=0:")
    assert read_manifest(tmp_path / "gpu")["gpus"] == [0]


def test_the_container_gets_its_gpus_and_pools(artifacts: Path, tmp_path: Path) -> None:
    plan = Plan(placement="gpu", target="26.06", gpus=(1, 3))
    command = container_command(compose("ensemble_all", tmp_path / "r", artifacts=artifacts, plan=plan))
    assert "--gpus all \\\n" in command  # a choice of GPUs would be renumbered inside
    assert "--cuda-memory-pool-byte-size=3:134217728 --pinned-memory-pool-byte-size=268435456 " in command
    assert "pylibcudf-cu13" in command

"""Mistakes in where models run, and in how much memory their tensors take."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import Edit, Plant, config

NAMES = ("first", "left", "right", "join")
HERE = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }\n'


def on_gpu(gpus: str = "gpus: [ 0 ]", more: str = HERE, dims: str = "[ 4 ]") -> dict[str, Edit]:
    """The base with every model on a GPU."""
    inputs = {"join": ("A", "B")}
    return {
        f"{name}/config.pbtxt": config(name, inputs.get(name, ("X",)))
        .replace("kind: KIND_CPU", f"kind: KIND_GPU {gpus}")
        .replace("[ 4 ]", dims)
        + more
        for name in NAMES
    }


def sized(dims: str) -> dict[str, Edit]:
    """The base with larger rows."""
    edits: dict[str, Edit] = {
        f"{n}/config.pbtxt": config(n, ("A", "B") if n == "join" else ("X",)).replace("[ 4 ]", dims) for n in NAMES
    }
    return {**edits, **ends(dims)}


def ends(dims: str) -> dict[str, Edit]:
    from tests.support.planted import ENSEMBLE

    return {"all/config.pbtxt": ENSEMBLE.replace("[ 4 ]", dims)}


PLANTS = (
    page("gpu-tensor-copied-to-host", "left/config.pbtxt", on_gpu(), line="instance_group"),
    page("host-round-trip", "left/config.pbtxt", on_gpu(), at="all/config.pbtxt", line="first_y"),
    page("gpu-hop", "left/config.pbtxt", on_gpu(), at="all/config.pbtxt", line="first_y"),
    page("gpu-may-hop", good=on_gpu(), at="all/config.pbtxt", line="first_y"),
    Plant(
        "a pool of 64 MiB",
        "cuda-pool-small",
        "all/config.pbtxt",
        "max_batch_size",
        {**on_gpu(dims="[ 1048576 ]"), **ends("[ 1048576 ]")},
        {**on_gpu(dims="[ 4096 ]"), **ends("[ 4096 ]")},
    ),
    Plant(
        "a container's /dev/shm",
        "shared-memory-small",
        "all/config.pbtxt",
        "max_batch_size",
        sized("[ 1048576 ]"),
        sized("[ 4096 ]"),
    ),
)

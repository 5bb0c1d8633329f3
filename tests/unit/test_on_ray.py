"""Workers on Ray; ``tests/slow/test_shards_killed.py`` has a cluster."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal.clients.bulk.shards.folders import open_folder
from shoal.clients.bulk.shards.on_ray import divide, make_ray_workers
from shoal.clients.bulk.shards.shard_task import ScoringJob
from shoal.clients.client.client import Client
from shoal.errors import InputError, SetupError


def test_the_resources_of_ray_workers() -> None:
    for nodes, number, expected in (
        ([(0, 0), (1, 0), (1, 0)], 2, (1, 0)),
        ([(2, 0), (8, 0), (8, 0)], 3, (4, 0)),
        ([(3, 0)] * 3, 4, (1, 0)),
        ([(16, 2)], 3, (5, 0.5)),
        ([(16, 1), (16, 0), (16, 0)], 4, (4, 0.25)),
        ([(16, 4), (16, 4)], 2, (16, 4)),
    ):
        assert divide(nodes, number) == expected
    with pytest.raises(InputError, match="has 2 CPUs and 0 GPUs for 3 workers"):
        divide([(1, 0), (1, 0)], 3)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray(tmp_path: Path) -> None:
    job = ScoringJob("", "local", tmp_path, Client, None, None, "", {}, {})
    with pytest.raises(SetupError, match=r"ray is not installed. Type: pip install 'shoal\[ray\]'"):
        make_ray_workers("auto", open_folder(str(tmp_path)), job, 1)

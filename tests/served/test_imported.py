"""Imported models answer on the real server as in this process, which other tests compare with their library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.clients.client.client import Client
from shoal.serving.server.launch import Server
from tests.served.imported import IMPORTED
from tests.support.imports import here


@pytest.mark.parametrize("name", IMPORTED)
def test_an_imported_model_answers_as_here(name: str, project: Path, server: Server) -> None:
    expected = here(project, name, **IMPORTED[name])
    with Client(server.grpc_url) as client:
        served = client.infer(name, IMPORTED[name])
    assert served.keys() == expected.keys()
    for output, array in expected.items():
        assert served[output].dtype == array.dtype
        if array.dtype.kind == "f":
            np.testing.assert_allclose(served[output], array, rtol=0, atol=1e-5)
        else:
            assert np.array_equal(served[output], array)

"""The libraries that a binary needs, read from its ELF sections."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import numpy as np

from shoal.authoring.environment.stub import parse_version, read_binary


def test_the_highest_version_of_each_family_is_needed() -> None:
    """Compare with the names in the file's bytes, which have no order."""
    unordered = 0
    for path in [Path(sys.executable).resolve(), *Path(np.__file__).parent.rglob("*.so")]:
        said = re.findall(rb"\0GLIBC_([\d.]+)(?=\0)", content := path.read_bytes())
        versions = [parse_version(version.decode()) for version in said]
        unordered += versions[-1:] != [max(versions, default=())]
        assert read_binary(io.BytesIO(content), path.name).requires.get("GLIBC", ()) == max(versions, default=()), path
    assert unordered

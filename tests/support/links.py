"""Files that change while they are read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.support.faults import KINDS, Fault  # fmt: skip


def linked(source: Path, copy: Path, changed: str, fault: Fault) -> Path:
    """A folder of hard links, but for one file, which is damaged."""
    shutil.copytree(source, copy, copy_function=os.link)
    path = copy / changed
    path.unlink()
    shutil.copyfile(source / changed, path)
    fault(path)
    return copy


def said_of(path: Path, message: str) -> str:
    return message.replace("{path}", str(path)).replace("{kind}", KINDS[path.name])

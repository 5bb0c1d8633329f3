"""New files of a user's project: listed before they are written, never overwriting existing ones."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import InputError, SetupError
from shoal.paths import check_path_supported


@dataclass(frozen=True)
class Draft:
    """Files to write under ``root``, by relative path: text, bytes, or the path of a file to copy."""

    root: Path
    files: Mapping[str, str | bytes | Path]

    def write(self, *, is_dry: bool = False) -> list[Path]:
        """Write all files, or none if one fails; return their paths. ``is_dry``: only return the paths.

        Raises:
            InputError: a file exists, or Triton does not support the folder's path.
            SetupError: a file cannot be written.
        """
        check_path_supported(self.root.resolve())
        paths = [self.root / name for name in self.files]
        for path in paths:
            if path.exists():
                raise InputError(
                    f"{path} already exists; it will not be overwritten.", "Choose another name, or remove it."
                )
        if is_dry:
            return paths
        written: list[Path] = []
        path = self.root
        try:
            for path, content in zip(paths, self.files.values(), strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                written.append(path)
                if isinstance(content, Path):
                    shutil.copyfile(content, path)
                elif isinstance(content, bytes):
                    path.write_bytes(content)
                else:
                    path.write_text(content, encoding="utf-8")
        except BaseException as error:
            for made in written:
                with suppress(OSError):
                    made.unlink()
            if isinstance(error, OSError):
                raise _refuse(path, error) from error
            raise
        return paths


def _refuse(path: Path, error: OSError) -> SetupError:
    """Build the error for a file that cannot be written."""
    another = "name another folder: --project FOLDER"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        blocking = next((folder for folder in path.parents if folder.is_file()), path.parent)
        return SetupError(
            f"{path} cannot be written: {blocking} is a file, and a folder is needed.",
            f"Rename or remove it, or {another}",
        )
    fix = "Free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Make the folder writable for this user"
    return SetupError(f"{path} cannot be written: {error.strerror or error}.", f"{fix}, or {another}")

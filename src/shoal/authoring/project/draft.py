"""New files of a user's project. They can be listed without being written, and never overwrite existing files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import InputError, SetupError
from shoal.system.files import copy_file
from shoal.system.paths import check_path_supported


@dataclass(frozen=True)
class Draft:
    """Files to write into the folder ``root``.

    ``files`` maps each path in ``root`` to the content: text, bytes, or the path of a file to copy.
    """

    root: Path
    files: Mapping[str, str | bytes | Path]

    def write(self, *, is_dry: bool = False) -> list[Path]:
        """Write all files and return their paths; if a file cannot be written, remove the files written before it.

        ``is_dry``: check the paths and return them, without writing.

        Raises:
            InputError: a file already exists, or Triton does not support the path of ``root``.
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
                    copy_file(content, path)
                elif isinstance(content, bytes):
                    path.write_bytes(content)
                else:
                    path.write_text(content, encoding="utf-8")
        except BaseException as error:
            for made in written:
                with suppress(OSError):
                    made.unlink()
            if isinstance(error, OSError):
                raise SetupError(
                    f"{path} cannot be written: {error.strerror or error}.",
                    f"Make {path.parent} a folder with free space that this user may write, or name another folder:"
                    " --project FOLDER",
                ) from error
            raise
        return paths

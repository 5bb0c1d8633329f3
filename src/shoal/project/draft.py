"""New files of a user's project: shown before they are written, and never over what stands there."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import InputError
from shoal.paths import check_path_supported


@dataclass
class Draft:
    """Files that shall be written under ``root``, by their paths there: text, bytes, or the path of a file to copy."""

    root: Path
    files: dict[str, str | bytes | Path] = field(default_factory=dict)

    def add(self, files: Mapping[str, str | bytes | Path]) -> None:
        """Add files; later ones take the place of earlier ones of the same path."""
        self.files.update(files)

    def check(self) -> None:
        """Check that nothing stands where a file shall be written.

        Raises:
            InputError: a file is there, or Triton cannot bear the folder's path.
        """
        check_path_supported(self.root.resolve())
        for name in self.files:
            if (self.root / name).exists():
                raise InputError(
                    f"{self.root / name} is there already; it will not be replaced.",
                    "Take another name, or remove it.",
                )

    def write(self, *, is_dry: bool = False) -> list[Path]:
        """Write all files, or nothing; returns their paths. ``is_dry``: only say what would be written.

        Raises:
            InputError: as of ``check``.
        """
        self.check()
        paths = [self.root / name for name in self.files]
        if is_dry:
            return paths
        written: list[Path] = []
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
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise
        return paths

"""Record of an environment's contents."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.environment.elf import Version, show_version

ARCHIVE, CONDA, VENV = "archive", "folder", "venv"
SENTENCES = (
    "escapes",
    "editable",
    "leaks",
    "unmet",
    "prefixes",
)  # Environment's fields that list problems


@dataclass(frozen=True)
class Package:
    """A distribution in the environment; ``num_bytes`` is the total size of the files that it lists."""

    name: str
    version: str
    num_bytes: int


@dataclass(frozen=True, order=True)
class Need:
    """The highest version of a symbol family that a file asks for, and the file."""

    version: Version = ()
    path: str = ""


@dataclass
class Environment:
    """Contents of one environment.

    ``python`` is ``3.12.1``, or ``3.12`` where the patch version is unknown. ``glibc`` and ``glibcxx`` are the highest
    that any binary needs; ``own_glibcxx`` is that of its own libstdc++, empty where it has none. Each of ``escapes``,
    ``editable``, ``leaks``, ``unmet`` and ``prefixes`` is a list of sentences, empty in a good environment:

    * ``escapes``: entries that would get out of the folder that they are unpacked into;
    * ``editable``: packages that are links to source folders;
    * ``leaks``: search paths to packages outside, such as a user's own site-packages;
    * ``unmet``: packages that others need and that are missing, as such a leak leaves behind;
    * ``prefixes``: absolute paths that exist on the machine that made it.
    """

    source: Path
    kind: str
    python: str = ""
    numpy: str = ""
    machine: str = ""
    glibc: Need = field(default_factory=Need)
    glibcxx: Need = field(default_factory=Need)
    own_glibcxx: Version = ()
    own_libraries: set[str] = field(default_factory=set)
    has_interpreter: bool = False
    has_activate: bool = False
    packages: list[Package] = field(default_factory=list)
    num_entries: int = 0
    num_bytes: int = 0
    num_hard_links: int = 0
    escapes: list[str] = field(default_factory=list)
    editable: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    unmet: list[str] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)

    @property
    def python_minor(self) -> str:
        """The version that a stub must be built for: ``3.12``."""
        return ".".join(self.python.split(".")[:2])

    @property
    def has_libpython(self) -> bool:
        """Whether ``lib/`` holds the shared library that stubs load."""
        return f"libpython{self.python_minor}.so.1.0" in self.own_libraries

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        fields = asdict(self)
        del fields["own_libraries"]
        return {
            **fields,
            "source": str(self.source),
            "glibc": show_version(self.glibc.version),
            "glibc_needed_by": self.glibc.path,
            "glibcxx": show_version(self.glibcxx.version),
            "glibcxx_needed_by": self.glibcxx.path,
            "own_glibcxx": show_version(self.own_glibcxx),
            "has_libpython": self.has_libpython,
        }

    def summary(self) -> dict[str, str]:
        """Return the main facts, one line each."""
        needs = f"glibc {show_version(self.glibc.version) or 'of any version'} ({self.glibc.path})"
        if self.glibcxx.version:
            needs += f", GLIBCXX_{show_version(self.glibcxx.version)} ({self.glibcxx.path})"
        size = self.num_bytes / 2**20
        return {
            "environment": f"{self.source} ({self.kind}, {self.num_entries:,} entries, {size:,.1f} MiB)",
            "Python": f"{self.python} on {self.machine or 'any machine'}, NumPy {self.numpy or 'missing'}",
            "needs": needs,
            "libpython": "in lib/" if self.has_libpython else "not in lib/",
            "packages": f"{len(self.packages)}, the largest:",
        }

    def remarks(self) -> list[str]:
        """Return all problems, one sentence each."""
        hard_links = [f"{self.num_hard_links} entries are hard links"] if self.num_hard_links else []
        return [sentence for name in SENTENCES for sentence in getattr(self, name)] + hard_links

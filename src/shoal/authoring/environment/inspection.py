"""Inspect an environment, packed or in a folder, without running or unpacking it."""

from __future__ import annotations

import json
import os
import posixpath
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from email.parser import BytesHeaderParser
from pathlib import Path, PurePosixPath
from typing import IO, Any

from shoal.authoring.environment.archive import FILE, FOLDER, HARD_LINK, SYMLINK, Entry, read_archive, read_folder
from shoal.authoring.environment.stub import MAGIC, Version, read_binary, show_version
from shoal.errors import ArtifactError, SetupError

ARCHIVE, CONDA, VENV = "archive", "folder", "venv"
_PROBLEMS = ("escapes", "editable", "leaks", "prefixes")  # Environment's fields that list problems
_SPOOL = 64 * 2**20  # a binary larger than this is read from a temporary file
_GLANCE = 96 * 2**20  # unpacked bytes of an archive that `glance` reads, which takes a second at most
_GLANCE_ENTRIES = 20_000  # as above
_SITE = re.compile(r"lib/python(\d+\.\d+)/site-packages/")
_MODULE = re.compile(r"lib/python\d\.\d+/(?:site-packages/|lib-dynload/)?(\w+)")
_EXTENSION = re.compile(r"\.cpython-\d+-(?:(\w+)-linux-\w+|(\w+))\.so$")  # names a processor, or another system
_PROCESSORS = {"64": "x86_64", "32": "i686"}  # conda's names -> platform.machine()'s
_KNOWN_PTH = re.compile(r"distutils-precedence|_virtualenv|.*-nspkg")  # others may add folders to sys.path


@dataclass(frozen=True)
class Package:
    """A package in the environment; ``num_bytes`` is the total size of the files that its record lists."""

    name: str
    version: str
    num_bytes: int


@dataclass(frozen=True, order=True)
class Need:
    """The highest version of a library, such as glibc, that a binary of an environment needs, and the binary's path."""

    version: Version = ()
    path: str = ""


@dataclass
class Environment:
    """Contents of one environment.

    ``python`` is the version, such as ``3.12.1``, or ``3.12`` if the patch version is unknown. ``glibc`` and
    ``glibcxx`` are the highest versions that any binary needs; ``own_glibcxx`` is the version that the environment's
    own libstdc++ provides, empty if it has no libstdc++. Each of ``escapes``, ``editable``, ``leaks`` and ``prefixes``
    is a list of sentences, empty in a good environment:

    * ``escapes``: entries of the archive that must not be unpacked, such as those that would be written outside the
      folder;
    * ``editable``: editable installs, that is, packages that are links to their source folders;
    * ``leaks``: settings that let Python import packages from outside the environment, such as the user's
      site-packages;
    * ``prefixes``: paths and links that are valid only on the machine where the environment was made.

    ``modules`` are the names of the modules that can be imported from the environment. If ``is_open`` is True, other
    modules may be importable, too.
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
    prefixes: list[str] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    is_open: bool = False

    @property
    def python_minor(self) -> str:
        """Python version without the patch number, such as ``3.12``; the stub must be built for it."""
        return ".".join(self.python.split(".")[:2])

    @property
    def has_libpython(self) -> bool:
        """Whether ``lib/`` of the environment contains Python's shared library, which stubs load."""
        return f"libpython{self.python_minor}.so.1.0" in self.own_libraries

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, ready for JSON, except ``own_libraries``, ``modules`` and ``is_open``."""
        fields = asdict(self)
        for name in ("own_libraries", "modules", "is_open"):
            del fields[name]
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
        """Return the main facts, one line each, by label."""
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
        return [sentence for name in _PROBLEMS for sentence in getattr(self, name)] + hard_links


# --- reading -------------------------------------------------------------------------------------------------------


def inspect(source: Path, *, reads_binaries: bool = True) -> Environment:
    """Read the contents of an environment: a packed ``.tar.gz``, an unpacked folder, or a venv.

    Without ``reads_binaries``, the library versions that binaries need are not read: they take most of the time.

    Raises:
        ArtifactError: there is no environment at ``source``, or it is damaged.
    """
    kind = _find_kind(source)
    reading = _Reading(Environment(source.absolute(), kind), reads_binaries)
    for entry in read_archive(source) if kind == ARCHIVE else read_folder(source):
        reading.take(entry)
    return reading.finish()


def glance(source: Path) -> Environment:
    """Read an environment as ``inspect`` does, but only what takes less than a second; ``packages`` is not complete.

    Of a folder, only ``lib/`` and the first level of its packages are read; of an archive, only the beginning. A longer
    archive is assumed to contain everything that models need. ``python`` is empty if the beginning does not show it.

    Raises:
        ArtifactError: there is no environment at ``source``, or it is damaged.
    """
    kind = _find_kind(source)
    reading = _Reading(Environment(source.absolute(), kind), reads_binaries=False)
    env = reading.environment
    if kind != ARCHIVE:
        for entry in read_folder(source, _list_shallow(source)):
            reading.take(entry)
        env.has_interpreter |= os.path.lexists(source / "bin/python3")  # a link may lead to another machine's Python
        return reading.finish()
    for entry in read_archive(source):
        reading.take(entry)
        if env.num_bytes > _GLANCE or env.num_entries > _GLANCE_ENTRIES:
            break
    else:
        return reading.finish()
    if env.python:
        reading.finish()
        env.is_open = env.has_activate = env.has_interpreter = True
        env.numpy = env.numpy or "1"
        env.own_libraries.add(f"libpython{env.python_minor}.so.1.0")
    return env


def _list_shallow(folder: Path) -> list[Path]:
    """List the paths in an environment's folder that show its Python, NumPy, libraries and importable modules."""
    # conda links lib/python3.1 to lib/python3.11
    libraries = [path for path in folder.glob("lib/python3.*") if path.is_dir() and not path.is_symlink()]
    found = [
        folder / "pyvenv.cfg",
        folder / "bin/activate",
        folder / "bin/python3",
        *folder.glob("lib/*.so*"),
        *libraries,
    ]
    for library in libraries:
        for parent in (library, library / "site-packages", library / "lib-dynload"):
            found += parent.iterdir() if parent.is_dir() else ()
        found += library.glob("site-packages/*.dist-info/direct_url.json")
        found += library.glob("site-packages/numpy-*.dist-info/METADATA")
        found += library.glob("site-packages/numpy/version.py")
    return [path for path in found if os.path.lexists(path)]


class _Reading:
    """State of a single pass over an environment's entries, since an archive can be read only from beginning to end."""

    def __init__(self, environment: Environment, reads_binaries: bool) -> None:
        self.environment = environment
        self.reads_binaries = reads_binaries
        self.sizes: dict[str, int] = {}
        self.records: dict[str, list[str]] = {}  # folder of a distribution -> its files
        self.metadata: dict[str, tuple[str, str]] = {}  # folder of a distribution -> its name and version
        self.full_version = ""
        self.built_for = ""  # by conda's record of Python, or by the name of an extension module

    def take(self, entry: Entry) -> None:
        """Record what one entry shows about the environment."""
        env = self.environment
        env.num_entries += 1
        env.num_bytes += entry.size
        if entry.refusal:
            env.escapes.append(f"'{entry.path[:200]}': {entry.refusal}")
            return
        path = PurePosixPath(entry.path).as_posix()
        self._note_place(path, entry)
        if entry.kind == FILE:
            self.sizes[path] = entry.size
            self._read(path, entry)

    def _note_place(self, path: str, entry: Entry) -> None:
        env = self.environment
        if module := _MODULE.match(path):
            env.modules.add(module[1])
        if extension := _EXTENSION.search(path):
            self.built_for = self.built_for or extension[1] or extension[2]
        found = re.fullmatch(r"bin/python(\d\.\d+)", path) or _SITE.match(f"{path}/")
        if found and not env.python:
            env.python = found[1]
        if entry.kind == FOLDER:
            return
        env.num_hard_links += entry.kind == HARD_LINK
        if env.kind != ARCHIVE and entry.kind == SYMLINK and not (env.source / path).exists():
            env.prefixes.append(f"{path} links to {entry.link}, which is not there")
            return
        env.has_activate |= path == "bin/activate"
        env.has_interpreter |= path == "bin/python3"
        name = path.rsplit("/", 1)[-1]
        if path == f"lib/{name}" and ".so" in name:
            env.own_libraries.add(name)
        if entry.kind == SYMLINK and entry.link.startswith("/"):
            env.prefixes.append(f"{path} links to {entry.link}")

    def _read(self, path: str, entry: Entry) -> None:
        """Read a file if it is metadata of a package, or a binary, which shows the library versions that it needs."""
        readers = {
            "pyvenv.cfg": self._read_venv,
            "activate": self._read_activate,
            "direct_url.json": self._read_origin,
            "METADATA": self._read_metadata,
            "RECORD": self._read_record,
        }
        folder, _, name = path.rpartition("/")
        is_in_site = bool(_SITE.fullmatch(f"{folder}/"))
        if folder.endswith("/site-packages/numpy"):
            readers["version.py"] = self._read_numpy
        read = readers.get(name)
        if name == "pyvenv.cfg" and folder:
            read = None  # a template, or a file of a test
        elif is_in_site and name.endswith(".pth"):  # elsewhere torch saves weights as .pth
            read = self._read_links
        elif folder == "conda-meta" and name.endswith(".json"):
            read = self._read_conda
        if read:
            read(path, b"".join(entry.chunks()))
        elif self.reads_binaries:
            self._read_binary(path, entry)

    def _read_binary(self, path: str, entry: Entry) -> None:
        chunks = entry.chunks()
        first = next(chunks, b"")
        if not first.startswith(MAGIC):
            return
        try:
            with entry.file.open("rb") if entry.file else _spool(first, chunks) as file:
                binary = read_binary(file, path)
        except ArtifactError:
            return  # object files and debug symbols of odd kinds need nothing from the loader
        env = self.environment
        if path.startswith("bin/python"):
            env.machine = binary.machine
        if not binary.needed and not binary.requires:
            return
        env.machine = env.machine or binary.machine
        env.glibc = max(env.glibc, Need(binary.requires.get("GLIBC", ()), path))
        env.glibcxx = max(env.glibcxx, Need(binary.requires.get("GLIBCXX", ()), path))
        if path.startswith("lib/libstdc++.so.6"):
            env.own_glibcxx = max(env.own_glibcxx, binary.provides.get("GLIBCXX", ()))

    def _read_activate(self, path: str, content: bytes) -> None:
        if path == "bin/activate" and b"PYTHONPATH" in content:  # written by hand: it adds to another environment
            self.environment.is_open = self.environment.has_interpreter = True

    def _read_venv(self, path: str, content: bytes) -> None:
        pairs = (line.partition("=") for line in content.decode(errors="replace").splitlines())
        settings = {name.strip(): value.strip() for name, _, value in pairs}
        self.full_version = settings.get("version", settings.get("version_info", ""))
        self.environment.prefixes.append(f"{path} names {settings.get('home', '')}, where its Python is")
        if settings.get("include-system-site-packages", "").lower() == "true":
            self.environment.is_open = True
            self.environment.leaks.append(f"{path} lets the base Python's packages in")

    def _read_numpy(self, path: str, content: bytes) -> None:
        """Read NumPy's version from its own file: an archive that was packed by hand may lack its record."""
        del path
        found = re.search(rb"version = ['\"]([\d.]+)", content)
        self.environment.numpy = found[1].decode() if found else "1"

    def _read_origin(self, path: str, content: bytes) -> None:
        origin = _read_json(content)
        about = origin.get("dir_info")
        if isinstance(about, dict) and about.get("editable"):
            package = PurePosixPath(path).parent.name.split("-")[0]
            self.environment.editable.append(f"{package} is an editable install of {origin.get('url', 'a folder')}")

    def _read_metadata(self, path: str, content: bytes) -> None:
        folder = PurePosixPath(path).parent.as_posix()
        if _SITE.match(path) and folder.endswith(".dist-info") and folder.count("/") == 3:
            message = BytesHeaderParser().parsebytes(content)
            if not message["Name"]:
                return
            self.metadata[folder] = str(message["Name"]), str(message["Version"])

    def _read_record(self, path: str, content: bytes) -> None:
        folder = PurePosixPath(path).parent
        lines = content.decode(errors="replace").splitlines()
        self.records[folder.as_posix()] = [f"{folder.parent}/{line.split(',')[0].strip(chr(34))}" for line in lines]

    def _read_links(self, path: str, content: bytes) -> None:
        lines = [line.strip() for line in content.decode(errors="replace").splitlines()]
        inside = str(self.environment.source)
        self.environment.is_open |= not _KNOWN_PTH.match(path.rpartition("/")[2])
        for line in lines:
            if not line or line.startswith(("#", "import ", "import\t")):  # as Python's site module reads them
                continue
            at = posixpath.normpath(posixpath.join(inside, posixpath.dirname(path), line))
            if at != inside and not at.startswith(f"{inside}/"):
                kind = "a user's own packages" if "/.local/" in line else "packages outside"
                self.environment.leaks.append(f"{path} lets {kind} in: {line}")

    def _read_conda(self, path: str, content: bytes) -> None:
        record = _read_json(content)
        name, version = str(record.get("name", "")), str(record.get("version", ""))
        if not name:
            return
        if name == "python":
            self.full_version = version
            system, _, bits = str(record.get("subdir", "")).partition("-")
            self.built_for = _PROCESSORS.get(bits, bits) if system == "linux" else f"{system}-{bits}".strip("-")
        files = record.get("files")
        self.records[path] = [str(file) for file in files] if isinstance(files, list) else []
        self.metadata.setdefault(path, (name, version))

    def finish(self) -> Environment:
        """Fill in the fields that depend on all entries, and return the environment."""
        env = self.environment
        if self.full_version.startswith(env.python or "3"):
            env.python = self.full_version
        env.machine = env.machine or self.built_for
        seen: set[str] = set()
        for folder, (name, version) in sorted(self.metadata.items(), key=lambda item: item[0], reverse=True):
            if normalise(name) not in seen:  # a Python package that conda installed has a record of each kind
                seen.add(normalise(name))
                size = sum(self.sizes.get(PurePosixPath(file).as_posix(), 0) for file in self.records.get(folder, ()))
                env.packages.append(Package(name, version, size))
        env.packages.sort(key=lambda package: package.name.lower())
        env.numpy = next((package.version for package in env.packages if normalise(package.name) == "numpy"), env.numpy)
        env.editable.sort()
        env.leaks.sort()
        env.prefixes.sort()
        if not env.python:
            raise ArtifactError(
                f"{env.source} holds no Python environment.", "Name an environment that conda-pack or venv made."
            )
        return env


def _find_kind(source: Path) -> str:
    return VENV if (source / "pyvenv.cfg").is_file() else CONDA if source.is_dir() else ARCHIVE


def normalise(name: str) -> str:
    """Normalise a distribution's name as indexes do (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _spool(first: bytes, chunks: Iterator[bytes]) -> IO[bytes]:
    """Return a seekable file with the given content, in memory or, if it is large, in the temporary folder."""
    file = tempfile.SpooledTemporaryFile(_SPOOL)  # noqa: SIM115  # the caller closes it
    try:
        file.write(first)
        file.writelines(chunks)
    except OSError as error:
        file.close()
        raise SetupError(
            f"{tempfile.gettempdir()} cannot take a library of the environment: {error.strerror}.",
            "Name another folder: TMPDIR=... shoal env ...",
        ) from error
    file.seek(0)
    return file


def _read_json(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

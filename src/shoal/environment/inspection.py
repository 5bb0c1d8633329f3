"""Inspect an environment, packed or in a folder, without running or unpacking it."""

from __future__ import annotations

import json
import posixpath
import re
import tempfile
from collections.abc import Iterator
from email.parser import BytesHeaderParser
from pathlib import Path, PurePosixPath
from typing import IO, Any

from shoal.environment.archive import FILE, FOLDER, HARD_LINK, SYMLINK, Entry, read_archive, read_folder
from shoal.environment.contents import ARCHIVE, CONDA, VENV, Environment, Need, Package
from shoal.environment.elf import MAGIC, read_binary
from shoal.errors import ArtifactError, SetupError, needs

_SPOOL = 64 * 2**20  # a binary larger than this is read from a temporary file
_SITE = re.compile(r"lib/python(\d+\.\d+)/site-packages/")


def inspect(source: Path, *, reads_binaries: bool = True) -> Environment:
    """Read an environment: a packed ``.tar.gz``, an unpacked folder, or a venv.

    Without ``reads_binaries`` the requirements of binaries, which take most of the time, are left out.

    Raises:
        ArtifactError: there is none, or it is damaged.
    """
    is_folder = source.is_dir()
    kind = VENV if (source / "pyvenv.cfg").is_file() else CONDA if is_folder else ARCHIVE
    reading = _Reading(Environment(source.absolute(), kind), reads_binaries)
    for entry in read_folder(source) if is_folder else read_archive(source):
        reading.take(entry)
    return reading.finish()


class _Reading:
    """One pass over the entries: an archive can be read from front to back only."""

    def __init__(self, environment: Environment, reads_binaries: bool) -> None:
        self.environment = environment
        self.reads_binaries = reads_binaries
        self.sizes: dict[str, int] = {}
        self.records: dict[str, list[str]] = {}  # folder of a distribution -> its files
        self.metadata: dict[str, tuple[str, str, list[str]]] = {}  # the same -> name, version, requirements
        self.full_version = ""

    def take(self, entry: Entry) -> None:
        """Record one entry."""
        env = self.environment
        env.num_entries += 1
        env.num_bytes += entry.size
        if entry.refusal:
            env.escapes.append(f"{entry.path[:200]!r}: {entry.refusal}")
            return
        path = PurePosixPath(entry.path).as_posix()
        self._note_place(path, entry)
        if entry.kind == FILE:
            self.sizes[path] = entry.size
            self._read(path, entry)

    def _note_place(self, path: str, entry: Entry) -> None:
        env = self.environment
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
        found = re.fullmatch(r"bin/python(\d\.\d+)", path) or _SITE.match(path)
        if found and not env.python:
            env.python = found[1]
        if entry.kind == SYMLINK and entry.link.startswith("/"):
            env.prefixes.append(f"{path} links to {entry.link}")

    def _read(self, path: str, entry: Entry) -> None:
        """Read a file that holds metadata: a binary's requirements, or a package's records."""
        readers = {
            "pyvenv.cfg": self._read_venv,
            "direct_url.json": self._read_origin,
            "METADATA": self._read_metadata,
            "RECORD": self._read_record,
        }
        folder, _, name = path.rpartition("/")
        is_in_site = bool(_SITE.fullmatch(f"{folder}/"))
        read = readers.get(name)
        if name == "pyvenv.cfg" and folder:
            read = None  # a template, or a test's
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
        if not binary.needed and not binary.requires:
            return
        if env.machine == "" or path.startswith("bin/python"):
            env.machine = binary.machine
        env.glibc = max(env.glibc, Need(binary.requires.get("GLIBC", ()), path))
        env.glibcxx = max(env.glibcxx, Need(binary.requires.get("GLIBCXX", ()), path))
        if path.startswith("lib/libstdc++.so.6"):
            env.own_glibcxx = max(env.own_glibcxx, binary.provides.get("GLIBCXX", ()))

    def _read_venv(self, path: str, content: bytes) -> None:
        lines = re.findall(r"(?m)^(\S+)\s*=\s*(.*?)\s*$", content.decode(errors="replace"))
        settings: dict[str, str] = dict(lines)
        self.full_version = settings.get("version", settings.get("version_info", ""))
        self.environment.prefixes.append(f"{path} names {settings.get('home', '')}, where its Python is")
        if settings.get("include-system-site-packages", "").lower() == "true":
            self.environment.leaks.append(f"{path} lets the base Python's packages in")

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
            self.metadata[folder] = (
                str(message["Name"]),
                str(message["Version"]),
                [str(line) for line in message.get_all("Requires-Dist", [])],
            )

    def _read_record(self, path: str, content: bytes) -> None:
        folder = PurePosixPath(path).parent
        lines = content.decode(errors="replace").splitlines()
        self.records[folder.as_posix()] = [f"{folder.parent}/{line.split(',')[0].strip(chr(34))}" for line in lines]

    def _read_links(self, path: str, content: bytes) -> None:
        lines = [line.strip() for line in content.decode(errors="replace").splitlines()]
        inside = str(self.environment.source)
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
        files = record.get("files")
        self.records[path] = [str(file) for file in files] if isinstance(files, list) else []
        self.metadata.setdefault(path, (name, version, []))

    def finish(self) -> Environment:
        """Return the environment, with the fields that need all entries."""
        env = self.environment
        if self.full_version.startswith(env.python or "3"):
            env.python = self.full_version
        seen: set[str] = set()
        for folder, (name, version, _) in sorted(self.metadata.items(), key=lambda item: item[0], reverse=True):
            if normalise(name) not in seen:  # a conda package of Python's has both records
                seen.add(normalise(name))
                size = sum(self.sizes.get(PurePosixPath(file).as_posix(), 0) for file in self.records.get(folder, ()))
                env.packages.append(Package(name, version, size))
        env.packages.sort(key=lambda package: package.name.lower())
        env.numpy = next((package.version for package in env.packages if normalise(package.name) == "numpy"), "")
        env.editable.sort()
        env.leaks.sort()
        env.prefixes.sort()
        env.unmet = sorted(self._find_unmet(seen))
        if not env.python:
            raise ArtifactError(f"{env.source} holds no Python environment.", "Name one that conda-pack or venv made.")
        return env

    def _find_unmet(self, present: set[str]) -> set[str]:
        with needs("env"):
            from packaging.markers import default_environment
            from packaging.requirements import InvalidRequirement, Requirement
        env = self.environment
        there = {
            **{name: str(value) for name, value in default_environment().items()},
            "python_version": env.python_minor,
            "python_full_version": env.python,
            "platform_machine": env.machine or "x86_64",
            "extra": "",
        }
        unmet = set()
        for name, _, requirements in self.metadata.values():
            for line in requirements:
                try:
                    wanted = Requirement(line)
                except InvalidRequirement:
                    continue  # older than the standard; pip skips them too
                try:
                    applies = not wanted.marker or wanted.marker.evaluate(there)
                except ValueError:
                    applies = False
                if normalise(wanted.name) not in present and applies:
                    unmet.add(f"{name} needs {wanted.name}, which is not there")
        return unmet


def normalise(name: str) -> str:
    """Normalise a distribution's name as indexes do (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _spool(first: bytes, chunks: Iterator[bytes]) -> IO[bytes]:
    """Return a seekable file with this content; a large one is in the temporary folder."""
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

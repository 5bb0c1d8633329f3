"""Request for an environment, and the packages that its source lists.

The source is an environment.yml, a requirements.txt, or the folder of an existing environment.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.authoring.environment.targets import EMBEDDED
from shoal.errors import InputError, needs
from shoal.kit.component.files import sha256
from shoal.system.files import read_text


@dataclass(frozen=True)
class BuildRequest:
    """A build request: the source of an environment, the target server, and build options.

    ``python`` is a version such as ``3.12``. If it is empty, the version is the one that ``source`` pins, else the
    target's version if shoal's components support it, else that of this process. ``stub`` is ``auto``, ``wheel``,
    ``compile``, ``none`` or the path of a finished stub; ``builder`` is the program that compiles a stub (see
    ``stub_source``). ``channels`` replace the conda channels that ``source`` names. ``overrides`` are requirement lines
    that pip installs last, even if other packages require other versions.
    """

    source: Path
    out: Path
    target: str = EMBEDDED
    python: str = ""
    engine: str = "rattler"
    stub: str = "auto"
    is_for_gpu: bool = False
    builder: Path | None = None
    channels: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildSettings:
    """Settings for making an environment: Python version, conda channels and log file.

    ``glibc`` is the highest glibc version that packages may need, such as ``2.35``.
    """

    python: str
    channels: tuple[str, ...]
    log: Path
    glibc: str = ""


@dataclass(frozen=True)
class Wanted:
    """Packages that an environment shall contain.

    ``conda`` are conda's package specifications, such as ``numpy <2``. ``pip`` are lines of a requirements file,
    including the lines of other requirements files that it names. ``folder`` is an existing environment, which needs no
    packages.
    """

    source: Path
    channels: tuple[str, ...] = ()
    conda: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def digest(self) -> str:
        """Hash of the channels, the packages, the local files that the lines for pip name, and an existing environment.

        It does not depend on which packages the channels and package indexes offer.
        """
        named = [Path(line.removeprefix("-c ").split(" ")[0]) for line in self.pip]
        files = [path for path in named if path.is_file()]
        if self.folder:  # the contents of an environment are represented by the records of its packages
            records = ("conda-meta/*.json", "lib/python3.*/site-packages/*.dist-info/RECORD")
            files += [path for pattern in records for path in sorted(self.folder.glob(pattern))]
        parts = (self.channels, self.conda, self.pip, str(self.folder or ""), *map(sha256, files))
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def specs(self) -> tuple[str, ...]:
        """Package specifications for conda: ``conda``, and pip itself if pip installs other packages."""
        return (*self.conda, "pip") if self.pip and "pip" not in self.conda else self.conda

    @property
    def is_pip_only(self) -> bool:
        """Whether a venv can hold these packages, that is, conda installs nothing but Python and pip."""
        return all(re.split(r"[\s=<>!~]", spec)[0] in ("python", "pip") for spec in self.conda)

    @property
    def python(self) -> str:
        """Python version that ``conda`` pins, such as ``3.12``; empty if it does not pin one version."""
        for spec in self.conda:
            found = re.fullmatch(r"python\s*(?:={1,2}\s*)?(\d\.\d+)(?:\.[\d*]+)*", spec.strip())
            if found:
                return found[1]
        return ""

    def with_python(self, version: str) -> Wanted:
        """Return a copy in which ``conda`` also pins Python to ``version``, such as ``3.12``.

        Raises:
            InputError: ``conda`` already pins another version.
        """
        if self.python and self.python != version:
            raise InputError(
                f"{self.source.name} asks for Python {self.python}, which excludes Python {version}.",
                "Leave --python out, or change the file.",
            )
        return replace(self, conda=(f"python {version}.*", *self.conda))


def read_wanted(source: Path) -> Wanted:
    """Read the packages that ``source`` lists.

    A folder is an existing environment, a ``.yml`` or ``.yaml`` file is read as conda's environment.yml, and any other
    file as a requirements.txt.

    Raises:
        InputError: the file cannot be read, is not valid, or asks for an editable install.
    """
    if source.is_dir():
        return Wanted(source, folder=source.absolute())
    text = _read_text(source, f"{source} cannot be read", "Name an environment.yml or a requirements.txt.")
    if source.suffix in (".yml", ".yaml"):
        return _read_yaml(source, text)
    wanted = Wanted(source, pip=_pip_lines(text.splitlines(), source))
    if not wanted.pip:
        raise InputError(f"{source} lists no packages.", "Write one package per line.")
    return wanted


def _read_yaml(source: Path, text: str) -> Wanted:
    with needs("env"):
        import yaml
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{source} is not YAML: {' '.join(str(error).split())}", "Fix that line.") from None
    if not isinstance(content, dict) or not isinstance(content.get("dependencies"), list):
        raise InputError(f"{source} has no list `dependencies`.", "Write it as conda's environment.yml.")
    conda: list[str] = []
    pip: list[str] = []
    for item in content["dependencies"]:
        if isinstance(item, dict) and set(item) == {"pip"} and isinstance(item["pip"], list):
            pip += map(str, item["pip"])
        elif isinstance(item, str):
            conda.append(item)
        else:
            raise InputError(f"{source} has the dependency {item!r}, which is not text.", "Write NAME=VERSION.")
    channels = content.get("channels")
    channels = tuple(map(str, channels)) if isinstance(channels, list) else ()
    return Wanted(source, channels=channels, conda=tuple(conda), pip=_pip_lines(pip, source))


def _pip_lines(lines: list[str], source: Path, seen: tuple[Path, ...] = ()) -> tuple[str, ...]:
    """Return lines for pip, with absolute paths; the lines of requirements files that they name are included."""
    found: list[str] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():  # a backslash joins a line to the next one
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            raise InputError(f"{source.name} has a quote that is not closed: {line.strip()}", "Close it.") from None
        if not words:
            continue
        option, _, value = words[0].partition("=")
        value = value or " ".join(words[1:])
        if option in ("-e", "--editable"):
            raise InputError(
                f"{source.name} asks for an editable install of {value}.",
                "Triton's machine will not have that folder: name a version, or a wheel.",
            )
        if option in ("-r", "--requirement", "-c", "--constraint"):
            path = source.parent / value
            if option.startswith(("-c", "--c")):
                found.append(f"-c {path.absolute()}")
            elif path.absolute() not in seen:
                text = _read_text(path, f"{source.name} refers to {path}, which cannot be read")
                found += _pip_lines(text.splitlines(), path, (*seen, path.absolute()))
            continue
        line = re.sub(r"(^|\s)#.*$", "", line).strip()
        for word in words[:2] if option in ("-f", "--find-links") else words[:1]:
            if (source.parent / word).exists():  # pip gets the lines in a file in another folder
                line = line.replace(word, str((source.parent / word).absolute()), 1)
        found.append(line)
    return tuple(found)


def _read_text(path: Path, what: str, fix: str = "") -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"{what}: {reason}.", fix) from None

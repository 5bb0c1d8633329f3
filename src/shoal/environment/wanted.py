"""What an environment is made from: an environment.yml, a requirements file, a lock file, or one that is there."""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import InputError, needs

EXPLICIT = "@EXPLICIT"  # the first line of conda's own lock files
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Wanted:
    """What an environment is to hold.

    ``conda`` are match specs, such as ``numpy <2``; ``pip`` are lines for pip, with the files that they refer to read
    in; ``urls`` are the packages of a lock file, each with its hash; ``folder`` is an environment that is there.
    """

    source: Path
    channels: tuple[str, ...] = ()
    conda: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    lock: Path | None = None
    folder: Path | None = None

    @property
    def digest(self) -> str:
        """The same for the same contents, wherever their files lie."""
        at = str(self.folder or "")
        lock = self.lock.read_bytes() if self.lock else b""
        parts = repr((self.channels, self.conda, self.pip, self.urls, at)).encode()
        return hashlib.sha256(parts + lock).hexdigest()

    @property
    def is_pip_only(self) -> bool:
        """Whether a venv could hold it: nothing of conda's but Python and pip."""
        others = [spec for spec in self.conda if re.split(r"[\s=<>!~]", spec)[0] not in ("python", "pip")]
        return not (others or self.urls or self.lock)

    @property
    def python(self) -> str:
        """The Python that the specs pin, such as ``3.12``; empty where they leave it open."""
        for spec in self.conda:
            found = re.fullmatch(r"python\s*={0,2}\s*(\d\.\d+)(?:\.[\d*]+)*", spec.strip())
            if found:
                return found[1]
        return ""

    def with_python(self, version: str) -> Wanted:
        """With Python pinned to ``version``, such as ``3.12``.

        Raises:
            InputError: it is pinned to another one.
        """
        if self.python and self.python != version:
            raise InputError(
                f"{self.source.name} asks for Python {self.python}, and --python for {version}.", "Change one of them."
            )
        others = tuple(spec for spec in self.conda if re.split(r"[\s=<>!~]", spec)[0] != "python")
        return replace(self, conda=(f"python {version}.*", *others))


def read_wanted(source: Path) -> Wanted:
    """Read what ``source`` asks for; its content tells which kind of file it is.

    Raises:
        InputError: it is of no known kind, or asks for an editable install.
    """
    if source.is_dir():
        return Wanted(source, folder=source.absolute())
    try:
        text = source.read_text(encoding="utf-8") if source.stat().st_size <= _MAX_BYTES else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(
            f"{source} cannot be read: {reason}.", "Name an environment.yml, a requirements.txt or a lock file."
        ) from None
    if EXPLICIT in text.splitlines():
        urls = [line.strip() for line in text.splitlines() if re.match(r"\s*(https?|file)://|\s*/", line)]
        return Wanted(source, urls=tuple(urls))
    if source.suffix in (".yml", ".yaml", ".lock"):
        return _read_yaml(source, text)
    return Wanted(source, pip=_pip_lines(text.splitlines(), source))


def _read_yaml(source: Path, text: str) -> Wanted:
    with needs("env"):
        import yaml
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{source} is not YAML: {' '.join(str(error).split())}", "Mend that line.") from None
    if isinstance(content, dict) and {"environments", "packages"} <= content.keys():
        return Wanted(source, lock=source.absolute())
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
            raise InputError(f"{source} has the dependency {item!r}, which is no text.", "Write NAME=VERSION.")
    return Wanted(source, channels=_texts(content.get("channels")), conda=tuple(conda), pip=_pip_lines(pip, source))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _pip_lines(lines: list[str], source: Path, seen: tuple[Path, ...] = ()) -> tuple[str, ...]:
    """Lines for pip, with the requirement files that they name read in, and paths made absolute."""
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
                found += _pip_lines(_read_lines(path, source), path, (*seen, path.absolute()))
        elif words[0].startswith(("./", "../")):
            found.append(str((source.parent / words[0]).absolute()))
        else:
            found.append(re.sub(r"(^|\s)#.*$", "", line).strip())
    return tuple(found)


def _read_lines(path: Path, asker: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{asker.name} refers to {path}, which cannot be read: {error.strerror}.") from None

"""Run external tools: their output goes to a log, and the reason of a failure into one line."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.errors import SetupError
from shoal.processes import bound

# Variables that would let packages of this process, or of this user, into the environment that is being made.
_LEAKS = (
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT",
    "PIP_PYTHON", "PIP_REQUIRE_VIRTUALENV",
)  # fmt: skip
_LONG = 600  # characters of a reason
_TAIL = 200  # lines in which a reason is looked for
_REASONS = ("No space left on device", "ERROR:", "ensurepip is not", "fatal:", "CMake Error", "error:", "Error:")


def run(
    command: Sequence[str | Path],
    *,
    log: Path,
    what: str,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    given: str = "",
) -> None:
    """Run ``command`` without access to a user's own packages; ``what`` describes it in the error.

    ``given`` is its standard input. It runs in a session of its own: an interruption ends all that it started.

    Raises:
        SetupError: it failed, or does not exist.
    """
    words = [str(word) for word in command]
    kept = {name: value for name, value in os.environ.items() if name not in _LEAKS}
    with log.open("ab") as file:
        file.write(f"$ {without_secrets(shlex.join(words))}\n".encode())
        file.flush()
        start = file.tell()
        process = subprocess.Popen(
            bound(words),
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**kept, "PYTHONNOUSERSITE": "1", **(variables or {})},
            start_new_session=True,
        )
        try:
            process.communicate(given.encode())
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if process.returncode:
        reason = _reason(log, start) or f"exit code {process.returncode}"
        raise SetupError(f"{what} failed: {reason}", f"Its log: {log}")


def _reason(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()][-_TAIL:]
    for reason in _REASONS:
        found = next((line for line in lines if reason in line), "")
        if found:
            return _shorten(found)
    return _shorten(lines[-1]) if lines else ""


def _shorten(line: str) -> str:
    """Keep both ends of a long line: its beginning says what failed, its end says why."""
    return line if len(line) <= _LONG else f"{line[: _LONG // 2]} ... {line[-_LONG // 2 :]}"


def without_secrets(text: str) -> str:
    """Mask the passwords and tokens in URLs of private channels."""
    return re.sub(r"/t/[^/\s]+/", "/t/***/", re.sub(r"://[^/@\s]+@", "://***@", text))


def install(prefix: Path, lines: Sequence[str], *, is_offline: bool, log: Path) -> None:
    """Install packages by pip into the environment at ``prefix``, from the index of the user's own configuration.

    This process's pip does it where it has one, else the environment's. Offline, only ``PIP_FIND_LINKS`` is used.

    Raises:
        SetupError: pip failed.
    """
    python = prefix / "bin" / "python3"
    has_pip = importlib.util.find_spec("pip") is not None
    # -P: a file in the user's folder must not shadow one of Python's modules
    pip: list[str | Path] = (
        [sys.executable, "-P", "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
    )
    requirements = prefix.with_name(f"{prefix.name}.requirements.txt")
    requirements.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--no-input", "--disable-pip-version-check", *(["--no-index"] if is_offline else [])]
    run([*pip, "install", *options, "--requirement", requirements], log=log, what="Installing packages by pip")
    requirements.unlink()

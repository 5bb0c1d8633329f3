"""Chat templates in Jinja's language, rendered in a separate process.

A template comes with a model's weights, so it is code from outside. Jinja's sandbox denies it Python's objects, but
does not limit its work: code in the same process cannot stop ``'x' * 10**9`` or nested loops. So templates are rendered
in a process with limits on memory and time. If a limit ended the process, a new one is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import InputError, SetupError, needs
from shoal.kit.generation import rendering

OLDEST_JINJA = (3, 1, 6)  # older sandboxes have known escapes
SECONDS = 2.0  # for one rendering, without the start of the process
MEMORY_MIB = 512  # above the memory that the process has at its start
MAX_CHARS = 2**24  # of a rendered text
_GIVEN = frozenset({"messages", "tools", "add_generation_prompt"})  # variables that no request may set
_FIX = "Change the messages, or the model's chat template."


class ChatTemplate:
    """Chat template of a model. Thread-safe.

    ``source`` is the template in Jinja's language, with the extensions that transformers gives to chat templates.
    ``special_tokens`` are variables in it, such as ``bos_token``. ``variables`` are the names of those that a request
    may give it, such as ``enable_thinking``: all that it reads, but for messages, tools and special tokens.
    ``reads_tools`` says whether it reads ``tools``. Each object has one process
    that renders. That process ends with ``close``, or when this process ends, even if this process is killed.

    Raises:
        InputError: the template is not valid.
        SetupError: jinja2 3.1.6 or newer is not installed, or no Python interpreter is found.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        with needs("llm"):
            import jinja2
        if tuple(map(int, jinja2.__version__.split(".")[:3])) < OLDEST_JINJA:
            raise SetupError(
                f"jinja2 is {jinja2.__version__}, whose sandbox has known escapes.",
                f"Type: pip install 'jinja2>={'.'.join(map(str, OLDEST_JINJA))}'",
            )
        self._settings = {
            "source": source,
            "path": sys.path,
            "seconds": SECONDS,
            "memory": MEMORY_MIB * 2**20,
            "max_chars": MAX_CHARS,
        }
        self._special_tokens = dict(special_tokens or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            read = self._start().split()
        self.variables = frozenset(read) - _GIVEN - self._special_tokens.keys()
        self.reads_tools = "tools" in read

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the messages as one text; with ``add_generation_prompt`` it ends where the assistant's answer begins.

        ``variables`` are the template's other variables, by name.

        Raises:
            InputError: the template refuses the messages, fails, or takes more than 2 s, 512 MiB or 16 Mi characters.
        """
        request = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            **(variables or {}),
            "add_generation_prompt": add_generation_prompt,
        }
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return self._exchange(request, "cannot render these messages", _FIX)

    def close(self) -> None:
        """End the process that renders. A later ``render`` starts a new one."""
        with self._lock:
            self._stop()

    def _start(self) -> str:
        """Start the process, and return the names of the template's variables, separated by spaces."""
        self._stop()
        # -I, -S: PYTHON* variables and the current folder change nothing. Triton's stub ignores the former, too.
        command = [find_python(), "-I", "-S", rendering.__file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            return self._exchange(self._settings, "is not valid", "Fix it in the model's folder.")
        except InputError:
            self._stop()
            raise

    def _exchange(self, request: Mapping[str, Any], fault: str, fix: str) -> str:
        """Send a request and return the answer's text; if there is no answer, end the process."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                line = b""
            else:
                line = process.stdout.readline()  # an answer or the end of the process, which sets itself an alarm
        except BaseException:  # the answer to this request must not become the next one's
            self._stop()
            raise
        if not line.endswith(b"\n"):
            self._stop(kill=False)
            raise InputError(f"The model's chat template {fault}: it {_explain(process.returncode)}.", fix)
        answer = json.loads(line)
        if "error" in answer:
            raise InputError(f"The model's chat template {fault}: {answer['error']}.", fix)
        return str(answer["text"])

    def _stop(self, *, kill: bool = True) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        with contextlib.suppress(BrokenPipeError), process:  # closes the pipes, and waits for its end
            pass


def find_python() -> str:
    """Return the path of a Python interpreter; in Triton's stub, ``sys.executable`` may be empty or the stub itself.

    Raises:
        SetupError: no interpreter of this version is found.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in (sys.prefix, sys.base_prefix):
        path = Path(folder, "bin", version)
        if os.access(path, os.X_OK):
            return str(path)
    if Path(sys.executable or "").name.startswith("python"):
        return sys.executable
    raise SetupError(f"There is no {version} in {sys.prefix}/bin.", "Serve with an environment that holds its Python.")


def _explain(code: int) -> str:
    if code == -signal.SIGALRM:
        return f"takes more than {SECONDS:g} s"
    if code == rendering.MEMORY:
        return f"takes more than {MEMORY_MIB} MiB of memory"
    return f"ends its process ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"

"""Choose the stub that an environment needs, if any, and provide it."""

from __future__ import annotations

import shutil
from pathlib import Path

from shoal.environment.compile import check_builder, compile_stub
from shoal.environment.contents import Environment
from shoal.environment.elf import parse_version
from shoal.environment.spec import Request
from shoal.environment.stub import read_stub
from shoal.environment.targets import Target
from shoal.environment.wheel import take_stub
from shoal.errors import InputError

AUTO, WHEEL, COMPILE, NONE = STUBS = ("auto", "wheel", "compile", "none")
GIVEN = "given"  # the record's name for a finished stub


def check_choice(request: Request, target: Target) -> None:
    """Refuse a choice of stub that could only fail, before anything is built.

    Raises:
        InputError: the choice is unknown, no program can compile a stub, or the wheel's would have to support NumPy 2.
        ArtifactError: the finished stub is not a stub.
        SetupError: the machine lacks what compiling needs.
    """
    choice = request.stub
    if choice == COMPILE:
        check_builder(request.builder, target, "--stub compile")
    elif choice == WHEEL and request.is_for_numpy_2:
        raise InputError("The wheel's stubs corrupt tensors under NumPy 2.", "Leave --numpy2 out, or --stub wheel.")
    elif choice not in STUBS:
        if not Path(choice).is_file():
            raise InputError(f"Unknown stub {choice!r}.", f"Known: {', '.join(STUBS)}, or the path of a stub.")
        read_stub(Path(choice))


def provide_stub(request: Request, environment: Environment, target: Target, stub: Path, log: Path) -> str:
    """Put the stub that ``environment``, a folder, needs at ``stub``; returns how it was made, empty if none is needed.

    Raises:
        InputError: no program can compile a stub.
        ArtifactError: the compiled file is not a stub.
        SetupError: it is not available, or the compiler lacks something.
    """
    choice, python = request.stub, environment.python_minor
    if choice == AUTO:
        is_for_numpy_2 = request.is_for_numpy_2 or parse_version(environment.numpy) >= (2,)
        choice = choose(target, python, is_for_numpy_2)
    if choice == NONE:
        return ""
    if choice == WHEEL:
        take_stub(python, stub, is_offline=request.is_offline, log=log)
    elif choice == COMPILE:
        compile_stub(request, environment, target, stub, log)
    else:
        shutil.copyfile(choice, stub)
        choice = GIVEN
    stub.chmod(0o755)
    return choice


def choose(target: Target, python: str, is_for_numpy_2: bool) -> str:
    """Resolve ``auto``: none where the target's own stub fits, the wheel's for the embedded server, else compiled.

    For the embedded server the wheel's stub is always put beside the environment: its own choice follows the Python
    that happens to start it.
    """
    bears_numpy = target.bears_numpy_2 or not is_for_numpy_2
    if target.is_embedded:
        return WHEEL if bears_numpy else COMPILE
    return NONE if python == target.python and bears_numpy else COMPILE

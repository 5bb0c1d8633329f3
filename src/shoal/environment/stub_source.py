"""Choose the stub that an environment needs, if any, and provide it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from shoal.environment.compile import FIRST_PYBIND11, check_builder, compile_stub
from shoal.environment.contents import Environment
from shoal.environment.elf import parse_version
from shoal.environment.stub import read_stub
from shoal.environment.targets import FIRST_NUMPY_2, Target
from shoal.environment.wheel import take_stub
from shoal.errors import InputError

AUTO, WHEEL, COMPILE, NONE = STUBS = ("auto", "wheel", "compile", "none")
GIVEN = "given"  # the record's name for a finished stub


@dataclass(frozen=True)
class StubOrder:
    """An order for a stub: its source, the environment (a folder) and the target server.

    ``choice`` is one of ``STUBS``, or the path of a finished stub. ``builder`` is the program that compiles one.
    """

    choice: str
    environment: Environment
    target: Target
    is_for_numpy_2: bool = False
    is_for_gpu: bool = False
    builder: Path | None = None
    is_offline: bool = False


def check_choice(choice: str, builder: Path | None, target: Target, *, is_for_numpy_2: bool) -> None:
    """Refuse a choice that could only fail, before anything is built.

    Raises:
        InputError: the choice is unknown, no program can compile a stub, or the wheel's would have to support NumPy 2.
        ArtifactError: the finished stub is not a stub.
        SetupError: the machine lacks what compiling needs.
    """
    if choice == COMPILE:
        check_builder(builder, target, "--stub compile")
    elif choice == WHEEL and is_for_numpy_2:
        raise InputError("The wheel's stubs corrupt tensors under NumPy 2.", "Leave --numpy2 out, or --stub wheel.")
    elif choice not in STUBS:
        _check_given(choice)


def provide_stub(order: StubOrder, stub: Path, log: Path) -> str:
    """Put the stub that is needed at ``stub``; returns how it was made, empty where none is needed.

    Raises:
        InputError: the choice is unknown, or no program can compile a stub.
        ArtifactError: the file is not a stub.
        SetupError: it is not available, or the compiler lacks something.
    """
    if order.choice not in STUBS:
        return _copy(Path(order.choice), stub)
    python, numpy = order.environment.python_minor, order.environment.numpy
    has_numpy_2 = parse_version(numpy) >= (2,)
    choice = choose(order.target, python, has_numpy_2 or order.is_for_numpy_2) if order.choice == AUTO else order.choice
    if choice == WHEEL:
        take_stub(python, stub, is_offline=order.is_offline, log=log)
    elif choice == COMPILE:
        wants_newer = (has_numpy_2 or order.is_for_numpy_2) and order.target.release < FIRST_NUMPY_2
        compile_stub(
            order.target,
            order.environment.source / "bin" / "python3",
            stub,
            what=f"Python {python} with NumPy {numpy or 'missing'} for target {order.target.name}",
            builder=order.builder,
            needs_pybind11=FIRST_PYBIND11 if wants_newer else "",
            is_for_gpu=order.is_for_gpu,
            log=log,
        )
    return "" if choice == NONE else choice


def _check_given(choice: str) -> None:
    if not Path(choice).is_file():
        raise InputError(f"Unknown stub {choice!r}.", f"Known: {', '.join(STUBS)}, or the path of a stub.")
    read_stub(Path(choice))


def _copy(given: Path, stub: Path) -> str:
    _check_given(str(given))
    shutil.copyfile(given, stub)
    stub.chmod(0o755)
    return GIVEN


def choose(target: Target, python: str, is_for_numpy_2: bool) -> str:
    """Resolve ``auto``: none where the target's own stub fits, the wheel's for the embedded server, else compiled.

    For the embedded server the wheel's stub is always put beside the environment: its own choice follows the Python
    that happens to start it.
    """
    bears_numpy = target.bears_numpy_2 or not is_for_numpy_2
    if target.is_embedded:
        return WHEEL if bears_numpy else COMPILE
    return NONE if python == target.python and bears_numpy else COMPILE

"""Check that an environment, a stub and a server fit, before Triton fails or silently computes wrong values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.authoring.environment.inspection import ARCHIVE, VENV, Environment
from shoal.authoring.environment.stub import Stub, parse_version, show_version
from shoal.authoring.environment.targets import EMBEDDED, FIRST_FOLDER, Target
from shoal.errors import ArtifactError

_BUILD = "shoal env build --target {target} --python {python}"
_COMPILE = f"{_BUILD} --stub compile --stub-builder PROGRAM"


@dataclass(frozen=True)
class Misfit:
    """One reason why environment, stub and server do not fit together; ``fix`` is what to do, or a command to type."""

    what: str
    fix: str


def find_misfits(environment: Environment, stub: Stub | None, target: Target) -> list[Misfit]:
    """List every reason why ``target`` cannot run models in ``environment`` with ``stub``; empty if they fit together.

    If ``stub`` is None, the check is for the target's own stub.
    """
    return [
        *_damage(environment),
        *_completeness(environment, stub),
        *_python(environment, stub, target),
        *_numpy(environment, stub, target),
        *_stub(environment, stub, target),
        *_c_library(environment, stub, target),
        *_cxx_library(environment, stub, target),
        *_form(environment, target),
    ]


def check_fit(environment: Environment, stub: Stub | None, target: Target, name: str = "") -> None:
    """Check that environment, stub and target fit together.

    ``name`` is what an error calls the environment, by default its path.

    Raises:
        ArtifactError: they do not fit together. The error gives the first reason and the number of other reasons.
    """
    misfits = find_misfits(environment, stub, target)
    if misfits:
        more = f" (and {len(misfits) - 1} more: shoal env fit lists them)" if len(misfits) > 1 else ""
        raise ArtifactError(
            f"{name or environment.source} does not fit target {target.name}: {misfits[0].what}{more}", misfits[0].fix
        )


def _damage(env: Environment) -> Iterator[Misfit]:
    if env.escapes:
        yield Misfit(f"It holds {env.escapes[0]}.", "Do not use it; have its maker pack it again.")
    for sentence in env.editable:
        yield Misfit(f"In it, {sentence}.", "Install that package as a wheel: pip install PATH, without -e.")
    for sentence in env.leaks:
        yield Misfit(f"Its {sentence}.", "Rebuild it with PYTHONNOUSERSITE=1, as env/build_env.sh does.")


def _completeness(env: Environment, stub: Stub | None) -> Iterator[Misfit]:
    if not env.has_activate:
        yield Misfit("It has no bin/activate, which Triton requires.", "Pack it with conda-pack, or make it with venv.")
    if not env.has_interpreter:
        yield Misfit("It has no bin/python3, by which its packages are found.", "Link bin/python3 to its Python.")
    if stub and not env.has_libpython and not _brings_libpython(stub):
        yield Misfit(
            f"Its lib/ has no libpython{stub.python}.so.1.0, which the stub loads.",
            "Use a Python built with --enable-shared; link its library into lib/.",
        )
    if not env.numpy and not env.is_open:
        yield Misfit("It has no NumPy, which Triton's Python backend imports.", "Install numpy into it.")


def _brings_libpython(stub: Stub) -> bool:
    """Whether the stub comes from a wheel that also contains the libpython that the stub loads."""
    return any(name.startswith("libpython") and "-" in name for name in stub.libraries)


def _python(env: Environment, stub: Stub | None, target: Target) -> Iterator[Misfit]:
    python = env.python_minor
    if python != (stub.python if stub else target.python):
        other = (
            f"the stub is for Python {stub.python}"
            if stub
            else f"the stub of {target.name} is for Python {target.python}"
        )
        fix = "Make both for one Python" if stub else "Make a stub for that Python"
        yield Misfit(
            f"It is for Python {python}, and {other}.", f"{fix}: {_BUILD.format(target=target.name, python=python)}"
        )


def _numpy(env: Environment, stub: Stub | None, target: Target) -> Iterator[Misfit]:
    is_fit = stub.supports_numpy_2 if stub else target.supports_numpy_2
    if parse_version(env.numpy) >= (2,) and not is_fit:
        of = "this stub" if stub else f"the stub of {target.name}"
        yield Misfit(
            f"It has NumPy {env.numpy}, and {of} silently corrupts tensors under NumPy 2 (its pybind11 is too old).",
            f"Use numpy<2, or a stub for NumPy 2: {_COMPILE.format(target=target.name, python=env.python_minor)}",
        )


def _stub(env: Environment, stub: Stub | None, target: Target) -> Iterator[Misfit]:
    machines = {name for name in (env.machine, stub.machine if stub else "", target.machine) if name}
    if len(machines) > 1:
        parts = f"environment {env.machine or 'any'}, stub {stub.machine if stub else 'none'}, server {target.machine}"
        yield Misfit(f"Their machine types differ: {parts}.", "Make them on a machine like the server's.")
    if stub and stub.is_of_wheel and not target.is_embedded:
        yield Misfit(
            f"The stub is of the wheel nvidia-pytriton and needs its libraries, which {target.name} lacks.",
            "Leave the stub out: the target has its own for this Python."
            if target.python == env.python_minor
            else f"Compile a stub: {_COMPILE.format(target=target.name, python=env.python_minor)}",
        )
    if stub and stub.release and stub.release != target.version:
        yield Misfit(
            f"The stub is of release {stub.release}, and the server is of release {target.version}:"
            " they communicate through shared memory whose layout changes between releases.",
            f"Make a stub for that release: {_BUILD.format(target=target.name, python=env.python_minor)}",
        )


def _c_library(env: Environment, stub: Stub | None, target: Target) -> Iterator[Misfit]:
    for version, who in ((env.glibc.version, env.glibc.path), (stub.glibc if stub else (), "the stub")):
        if target.glibc and version > target.glibc:
            yield Misfit(
                f"{who} needs glibc {show_version(version)}; {target.system} has {show_version(target.glibc)}.",
                "Build it on a system as old as the server's, or use a newer release.",
            )


def _cxx_library(env: Environment, stub: Stub | None, target: Target) -> Iterator[Misfit]:
    given = env.own_glibcxx or target.glibcxx  # lib/ of the environment comes first on the loader's path
    where = "its own libstdc++" if env.own_glibcxx else target.system
    for version, who in ((env.glibcxx.version, env.glibcxx.path), (stub.glibcxx if stub else (), "the stub")):
        if given and version > given:
            yield Misfit(
                f"{who} needs GLIBCXX_{show_version(version)}; {where} gives {show_version(given)}.",
                "Add the newest libstdcxx-ng to the environment (conda-forge).",
            )


def _form(env: Environment, target: Target) -> Iterator[Misfit]:
    if env.kind != ARCHIVE and target.release < FIRST_FOLDER:
        yield Misfit(f"{target.name} does not accept an unpacked environment.", "Give it the packed custom_env.tar.gz.")
    if env.kind == VENV and target.name != EMBEDDED:
        yield Misfit(
            f"It is a venv: its Python is outside of it, and {target.name} runs in a container without it.",
            "Pack an environment that holds its Python: shoal env build --engine rattler",
        )

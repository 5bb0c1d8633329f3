"""NVIDIA's container with shoal's service in front of the image's own Triton: a ``docker run``, and a Dockerfile."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from shoal.authoring.environment.imports import find_package
from shoal.authoring.environment.stub import parse_version
from shoal.authoring.environment.targets import OLDEST_PYTHON
from shoal.errors import InputError, SetupError
from shoal.serving.gateway.options import Options
from shoal.serving.server.container import Container, mount_option
from shoal.serving.server.runtime import SERVER_VARIABLE

FILES = "/mnt"  # where folders of this machine are in the container, under their own paths
_TRITON = "/opt/tritonserver/bin/tritonserver"
_STOP_SECONDS = 15  # after --grace, as in docs/serving.md
_USER = 10001


@dataclass(frozen=True)
class Given:
    """Options of ``shoal serve`` as they were given, with the paths of files as they are in the container.

    ``folders`` are the folders of these files on this machine, and whether the service writes there.
    """

    words: Sequence[str]
    folders: Mapping[Path, bool]

    @property
    def mounts(self) -> list[str]:
        """Options of ``docker run`` that mount the folders."""
        return [
            mount_option(folder, f"{FILES}{folder}", is_written=is_written)
            for folder, is_written in sorted(self.folders.items())
        ]


def service_command(container: Container, given: Given, options: Options) -> str:
    """Return the shell command that installs shoal in the container, and serves the repository there.

    The container is in the network of this machine, so that addresses, ports and clients are those of ``shoal serve``.

    Raises:
        InputError: shoal's service cannot run in the container.
        SetupError: the folder or the wheel from which shoal was installed is gone.
    """
    _check_service(container)
    source = find_source()
    if source.startswith("/"):
        given = Given(given.words, {Path(source): False, **given.folders})
        source = f"{FILES}{source}"
    stop = f"--stop-timeout={_find_patience(options)}"
    more = ["--init", "--network host", stop, *given.mounts, f"-e {SERVER_VARIABLE}={_TRITON}"]
    install = container.install(source)
    return container.show(more, f"{install}exec {shlex.join(['shoal', 'serve', '/models', *given.words])}")


def service_dockerfile(container: Container, given: Given, options: Options) -> str:
    """Return a Dockerfile of an image with shoal and the repository in it, and in comments how to build and run it.

    Raises:
        InputError: shoal's service cannot run in the container, or could not be reached there.
        SetupError: the folder or the wheel from which shoal was installed is gone.
    """
    _check_service(container)
    ports = (options.http_port, options.grpc_port, options.metrics_port)
    if options.host not in ("0.0.0.0", "::") or 0 in ports:
        raise InputError(
            f"In an image, the service cannot be reached at the address {options.host} and the ports"
            f" {', '.join(map(str, ports))}.",
            "Give --host 0.0.0.0, with --keys FILE or --open, and ports that are not 0.",
        )
    about = distribution("shoal")
    wheel = f"shoal-{about.version}-py3-none-any.whl"
    own = [line for line in about.requires or () if "extra ==" not in line]
    lines = shlex.join(dict.fromkeys([*own, *container.packages]))
    kept = " ".join(f"--no-emit-package {find_package(module)}" for module in sorted(container.modules))
    pin = f"uv pip compile --generate-hashes --python-version {container.python} {kept} requirements.in"
    published = [f"-p {port}:{port}" for port in ports]
    mounts = [*(mount_option(path, path) for path in container.mounts), *given.mounts]
    stop = f"--stop-timeout={_find_patience(options)}"
    run = ["docker run --rm --init", *container.options, stop, *published, *mounts, "IMAGE"]
    curl = ["curl", "-fsk", f"http{'s' * bool(options.tls_cert)}://127.0.0.1:{ports[2]}/health/ready"]
    health = f"HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD {json.dumps(curl)}"
    if options.client_ca:
        health = "# No HEALTHCHECK: with --client-ca, /health/ready needs a client's certificate too."
    return "\n".join(
        (
            "# Build it in an empty folder:",
            f"#   cp -r {shlex.quote(str(container.repository.resolve()))} models",
            f"#   pip wheel --no-deps --wheel-dir . {shlex.quote(find_source())}",
            f"#   printf '%s\\n' {lines} > requirements.in",
            f"#   {pin} -o requirements.txt",
            "#   docker build -t IMAGE .",
            f"# Run it; user {_USER} must be able to read what is mounted, and to write to --audit and --log:",
            f"#   {' '.join(run)}",
            f"FROM {container.image}",
            f"ENV {SERVER_VARIABLE}={_TRITON} PYTHONNOUSERSITE=1 HOME=/tmp",
            f"COPY requirements.txt {wheel} /opt/shoal/",
            "RUN pip install --no-cache-dir --require-hashes -r /opt/shoal/requirements.txt && \\",
            f"    pip install --no-cache-dir --no-deps /opt/shoal/{wheel}",
            f"COPY --chown={_USER}:{_USER} models /models",
            f"USER {_USER}",
            f"EXPOSE {' '.join(map(str, ports))}",
            health,
            f"CMD {json.dumps(['shoal', 'serve', '/models', *given.words])}",
        )
    )


def find_source() -> str:
    """Return from where shoal was installed: an absolute path of a folder or a wheel, or a requirement for pip.

    Raises:
        SetupError: the folder or the wheel is gone.
    """
    about = distribution("shoal")
    record = json.loads(about.read_text("direct_url.json") or "{}")  # PEP 610
    url = str(record.get("url", ""))
    if url.startswith("file:"):
        path = unquote(urlsplit(url).path)
        if not Path(path).exists():
            raise SetupError(f"{path}, from which shoal was installed, is gone.", "Install it again, from a clone.")
        return path
    if revision := record.get("vcs_info"):
        return f"shoal @ {revision['vcs']}+{url}@{revision['commit_id']}"
    return f"shoal @ {url}" if url else f"shoal=={about.version}"


def _find_patience(options: Options) -> int:
    """Return the seconds that Docker waits before it kills the service."""
    return math.ceil(options.grace) + _STOP_SECONDS


def _check_service(container: Container) -> None:
    """Refuse an image whose Python is too old for shoal, and models that the service cannot serve."""
    bare = "print the command of Triton alone: --print --bare"
    if parse_version(container.python) < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise InputError(
            f"shoal needs Python {oldest} or newer; {container.image} has {container.python}.",
            f"Use --target 24.12 or newer; or {bare}",
        )
    if container.undeclared:
        raise InputError(
            f"{container.undeclared[0]} declares no inputs or no outputs, which shoal's service reads in config.pbtxt.",
            f"Declare them; or {bare}",
        )
    if container.num_ranks > 1:
        raise InputError(
            f"The engine needs {container.num_ranks} processes of Triton, and shoal's service starts one.",
            f"Build the engine for one GPU; or {bare}",
        )

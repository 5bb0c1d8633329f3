"""Start, readiness check and stop of a Triton server for one repository."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from shoal.authoring.repository.launch_flags import CACHE_MIB, find_launch_flags
from shoal.authoring.repository.manifest import read_manifest
from shoal.errors import InputError, ServerError, SetupError
from shoal.kit.component.ledger import VARIABLE
from shoal.serving.server.checks import check_start
from shoal.serving.server.orphans import ENVIRONMENT, SHARED_MEMORY, Lease, clean_up, find_prefix, make_folder, watch
from shoal.serving.server.runtime import Runtime
from shoal.system.paths import check_path_supported
from shoal.system.processes import bound, processes

HOST = "127.0.0.1"
START_SECONDS = 120.0
EXIT_SECONDS = 10  # a single idle keep-alive connection makes Triton wait all of it
OTHERS_SECONDS = 1.0  # for other models that are loading to fail as well
KEEP_LOG = "To see its whole log: shoal serve REPOSITORY --log FILE"
_FAILED = r"failed to load '.*?' version \d+: .*"
_VLLM = r"(?m)^\((?:Worker|EngineCore)[^)]*\) ERROR \S+ \S+ \[[^\]]*\] (\w+Error: .*)$"  # of its own processes
RESTRICTED = "model-repository,shared-memory,statistics,trace,logging"

# PR_SET_PDEATHSIG follows the thread that started the child: this thread lives as long as the process.
_LAUNCHER = ThreadPoolExecutor(1, thread_name_prefix="shoal-launcher")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for loopback


class Server:
    """A running Triton server on loopback. Use ``serve`` to start one."""

    def __init__(
        self,
        repository: Path,
        runtime: Runtime,
        ports: tuple[int, int, int] = (0, 0, 0),
        log: Path | None = None,
        cache_mib: float = CACHE_MIB,
    ) -> None:
        self.repository, self._cache_mib = repository, cache_mib
        self._caches = runtime.binary.parents[1] / "caches"  # beside bin/
        # Triton binds its ports only after loading the models; until then another connection could get one of them
        ports, self._held = _hold_ports(*ports)
        with contextlib.ExitStack() as undone:  # on an error
            undone.enter_context(self._held)
            self.http_url, self.grpc_url, self.metrics_url = (f"{HOST}:{port}" for port in ports)
            self.admin_key = secrets.token_hex(16)  # for what is closed to clients, such as statistics
            self._folder = make_folder()
            undone.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self.log = log or self._folder / "triton.log"
            self.beacons = self._folder / "beacons"  # heartbeat files of its components
            check_path_supported(self._folder)
            target = str(read_manifest(repository).get("target", ""))
            self._backends = runtime.find_backends(self._folder / "backends", target)
            (self._folder / "empty").mkdir()
            self.beacons.mkdir()
            self._lease = Lease(self._folder)
            undone.callback(self._lease.end)
            self._watcher = watch(self._folder)
            undone.callback(self._end_watcher)
            self._process = self._launch(runtime, ports)
            undone.callback(self.stop, 0)
            self._lease.begin(self.pid)
            undone.pop_all()

    def _launch(self, runtime: Runtime, ports: tuple[int, int, int]) -> subprocess.Popen[bytes]:
        try:
            log = self.log.open("wb")
            log.close()
            log = self.log.open("ab")  # so that it may be emptied while Triton writes it
        except OSError as error:
            raise InputError(f"The log {self.log} cannot be written: {error.strerror}.", "Name another file.") from None
        with log:
            starting = _LAUNCHER.submit(
                subprocess.Popen[bytes],
                bound([runtime.binary, *self._flags(ports)]),  # a killed test or notebook leaves no server behind
                env={**runtime.environment(), VARIABLE: str(self.beacons)},
                cwd=self._folder / "empty",  # the server's folder is first on the stubs' sys.path
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C reaches us alone; in a session of its own it could take our cores (autogroup)
                pass_fds=(self._lease.file,),
            )
            return starting.result()

    def _flags(self, ports: tuple[int, int, int]) -> list[str]:
        http, grpc, metrics = ports
        return [
            f"--model-repository={self.repository}",
            f"--backend-directory={self._backends}",
            f"--cache-directory={self._caches}",
            f"--backend-config=python,shm-region-prefix-name={find_prefix(self._folder)}",
            "--model-control-mode=none",
            "--disable-auto-complete-config",
            "--exit-on-error=true",
            "--strict-readiness=true",
            "--grpc-infer-allocation-pool-size=0",  # or it pools eight messages at their full size
            f"--exit-timeout-secs={EXIT_SECONDS}",
            "--model-load-thread-count=8",
            *(f"--{name}-address={HOST}" for name in ("http", "grpc", "metrics")),
            *(f"--{name}-port={port}" for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics))),
            "--allow-sagemaker=false",
            "--allow-vertex-ai=false",
            f"--http-restricted-api={RESTRICTED}:admin-key={self.admin_key}",
            f"--grpc-restricted-protocol={RESTRICTED}:admin-key={self.admin_key}",
            *find_launch_flags(self.repository, self._cache_mib),
        ]

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        """Wait until every model is loaded.

        Raises:
            ServerError: Triton ended or a model did not load, with the reason from Triton's log; or ``timeout`` seconds
                passed.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            # the log names a failed model before Triton has unloaded the rest
            if self._process.poll() is not None or re.search(_FAILED, self._read_log()):
                raise ServerError(f"Triton did not start: {self._settled_cause()}", KEEP_LOG)
            if self.is_ready():
                for region in SHARED_MEMORY.glob(f"{find_prefix(self._folder)}*"):
                    region.chmod(0o600)  # Triton lets all users of the machine read them, whatever the umask
                self._lease.note(find_environments(self.pid))
                return
            time.sleep(0.05)
        raise ServerError(f"Triton was not ready after {timeout:g} s.", f"Give it longer. {KEEP_LOG}")

    def is_ready(self) -> bool:
        """Whether Triton reports that it is ready. Triton still does so when a model's process has died."""
        try:
            with DIRECT.open(f"http://{self.http_url}/v2/health/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @property
    def pid(self) -> int:
        """Process id of Triton, which is also the id of the group of its models' processes."""
        return self._process.pid

    def kill_instance(self, name: str) -> None:
        """Kill the process of a model's instance, such as ``bert_0_0``, if it runs."""
        for process in processes():
            if process.group == self.pid and process.arguments()[-2:-1] == [name]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until Triton ends, and return its exit code."""
        return self._process.wait()

    def cause(self) -> str:
        """Return the reason why Triton ended, from its log."""
        return find_cause(self._read_log())

    def _settled_cause(self) -> str:
        """Return the reason from Triton's log, after a second in which other failing models can log their reasons."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(OTHERS_SECONDS)
        return self.cause()

    def _read_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""

    def stop(self, seconds: float | None = None) -> None:
        """Stop Triton, and clean up its processes, shared memory and temporary files.

        Processes that still run after ``seconds`` are killed. The default is 20 s, which is 10 s more than Triton's own
        time-out; 0 kills them at once. Use 0 when a model's process has died, because Triton would wait for that
        process in vain.
        """
        if self._process.poll() is None:  # while it runs: its processes name the folders
            self._lease.note(find_environments(self.pid))
        patience = EXIT_SECONDS + 10 if seconds is None else seconds
        if self._process.poll() is None and patience > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):  # a hanging stub outlives the server
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._held.close()
        self._lease.end()
        self._end_watcher()

    def _end_watcher(self) -> None:
        self._watcher.kill()
        self._watcher.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve(
    repository: Path | str,
    *,
    http_port: int = 0,
    grpc_port: int = 0,
    metrics_port: int = 0,
    timeout: float | None = None,
    log: Path | None = None,
    cache_mib: float = CACHE_MIB,
) -> Server:
    """Start Triton on this machine for ``repository``, and wait until it is ready.

    The server listens on loopback, and is meant for development and tests. A port of 0 stands for any free port.
    ``timeout`` is the longest time for the start in seconds: by default 120, or the time in the manifest of a composed
    repository if that is longer. Triton's log is written to the file ``log``; without ``log``, it is deleted when the
    server stops. ``cache_mib`` is the size in MiB of the cache that models with ``response_cache`` share. Use the
    server as a context manager, or call its ``stop``::

        with shoal.serve("build/repository") as server:
            shoal.Client(server.grpc_url).infer("my_ensemble", TEXT=["A text."])

    Raises:
        InputError: Triton does not support the path, or there is no repository.
        SetupError: a port is taken, or this environment cannot run the server.
        ServerError: a model did not load, or the server was not ready in time.
    """
    path = Path(repository).resolve()
    runtime = check_start(path)
    clean_up()
    server = Server(path, runtime, (http_port, grpc_port, metrics_port), log, cache_mib)
    try:
        server.wait_ready(timeout or max(START_SECONDS, float(read_manifest(path).get("load_seconds", 0))))
    except BaseException:
        server.stop()
        raise
    return server


def find_environments(group: int) -> set[str]:
    """Find the folders into which Triton has unpacked Python environments for the processes of a group.

    A server that is killed leaves these folders behind.
    """
    values = (value for p in processes() if p.group == group for value in p.variables().values())
    return {found[0] for value in values if (found := ENVIRONMENT.search(value))}


_PORTS = "http", "grpc", "metrics"


def find_ports(*wanted: int, host: str = HOST) -> tuple[int, int, int]:
    """Return three distinct ports: those in ``wanted``, with a free port in place of each 0.

    Raises:
        SetupError: a wanted port is taken, or wanted twice; the message names its option.
    """
    ports, held = _hold_ports(*wanted, host=host)
    held.close()
    return ports


def _hold_ports(*wanted: int, host: str = HOST) -> tuple[tuple[int, int, int], contextlib.ExitStack]:
    """Reserve ports until the returned stack is closed.

    The ports are bound, but nothing listens at them, so that Triton may do so.
    """
    with contextlib.ExitStack() as held:
        if twice := [port for place, port in enumerate(wanted) if port and port in wanted[:place]]:
            names = [f"--{name}-port" for name, port in zip(_PORTS, wanted, strict=True) if port == twice[0]]
            fix = "Give each a port of its own; 0 is any free one."
            raise SetupError(f"{' and '.join(names)} are both {twice[0]}.", fix)
        found = {name: _bind(name, host, port, held) for name, port in zip(_PORTS, wanted, strict=True)}
        if taken := [name for name, port in found.items() if port is None]:  # a second service finds all three taken
            numbers = ", ".join(str(port) for name, port in zip(_PORTS, wanted, strict=True) if name in taken)
            what = f"Port{'s' * (len(taken) > 1)} {numbers} cannot be used: {os.strerror(errno.EADDRINUSE)}."
            options = " ".join(f"--{name}-port PORT" for name in taken)
            raise SetupError(what, f"Stop what listens there (ss -ltnp shows it), or choose another: {options}")
        http, grpc, metrics = (port or 0 for port in found.values())
        return (http, grpc, metrics), held.pop_all()


def _bind(name: str, host: str, wanted: int, held: contextlib.ExitStack) -> int | None:
    """Return the port that is bound; None if it is taken."""
    fixes = {
        errno.EADDRNOTAVAIL: f"{host} is no address of this machine: give one with --host.",
        errno.EACCES: f"Choose one from 1024 on: --{name}-port",
    }
    try:
        probe = held.enter_context(socket.socket())
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, wanted))
    except OverflowError:
        raise SetupError(f"--{name}-port {wanted} is no port.", "Give 1 to 65535, or 0 for any free one.") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        fix = fixes.get(error.errno or 0, f"Choose another: --{name}-port")
        raise SetupError(f"Port {wanted} cannot be used: {error.strerror}.", fix) from None
    return int(probe.getsockname()[1])


def find_cause(log: str) -> str:
    """Extract from Triton's log why a start failed: one reason for each model that did not load, all in one line."""
    patterns = (r"Poll failed for model directory .*", _FAILED, r"Invalid argument: .*", r"error: .*")
    for pattern in patterns:
        found = list(dict.fromkeys(str(line).rstrip('"').split("\\n")[0] for line in re.findall(pattern, log)))
        if found:
            # a damaged file also fails the check of its neighbour, and which one is logged first is random: report all
            return "; ".join([*found, *re.findall(_VLLM, log)[:1]]) if pattern == _FAILED else found[0]
    if "boost::interprocess::lock_exception" in log:  # see Upstream.kill_unhealthy
        return "a model's process did not run for a second while it loaded. Is the machine too busy?"
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing."

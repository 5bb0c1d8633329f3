"""Trial of a repository's models: a Triton loads each one and sends it requests, and what fails is a finding.

Only what shows that a model is at fault is a finding: a request that was made up may be refused. All models are loaded
before the first is asked, since code may call any of them, and each one after those that it is known to call.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from shoal.authoring.check.findings import Finding, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.check.tried import LOAD, REQUEST, find_raised, find_reason, report
from shoal.authoring.environment.embedded import NAME
from shoal.authoring.repository.call_graph import find_callees
from shoal.authoring.repository.config import CONFIG
from shoal.authoring.repository.manifest import read_manifest
from shoal.clients.client.failures import CallError, Kind
from shoal.errors import InputError
from shoal.lab.trial.asking import REQUEST_SECONDS, Asker
from shoal.lab.trial.server import TrialServer
from shoal.serving.gateway.core.triton_errors import is_dead
from shoal.serving.server.checks import check_glibc, check_shared_memory, find_needed_memory
from shoal.serving.server.orphans import clean_up
from shoal.serving.server.runtime import SERVER_VARIABLE, Runtime, find_runtime
from shoal.serving.server.snapshot import Snapshot, take_snapshot
from shoal.system.machine import describe_machine
from shoal.system.paths import check_path_supported
from shoal.system.progress import OnProgress

LOAD_SECONDS = 50.0  # at least: a model's parameter load_seconds, or the size of its files, may give it longer
_LOAD_BYTES = 20 * 2**20  # of a model's files per second of its load
_LOG = "Its whole log: shoal serve REPOSITORY --no-check --log FILE"
_CORRECT = f"Correct it. {_LOG}"
_TYPED = (
    "Correct it. If the request is at fault, which was made from config.pbtxt, give the model one of its own: parameter"
    ' canary, such as {"X": [[1.0]]}; or let it refuse such a request with a TritonError.'
)
_NONE = (
    "A tensor that is not there is None: compare its name with config.pbtxt. If another model answers, read its error"
    " first: response.has_error(), response.error().message()."
)


class Untried(NamedTuple):
    """A model that was not loaded, or not asked, and the reason (``why``)."""

    model: str
    folder: Path
    why: str


def find_server(paths: Sequence[Path]) -> Runtime:
    """Return the server that can load the repositories.

    Raises:
        InputError: a path is not a repository, or was composed for another server.
        SetupError: this machine lacks something that the server needs.
    """
    for path in paths:
        check_path_supported(path)
        is_model = (path / CONFIG).is_file()
        if is_model or (any(path.glob(f"*/*/{CONFIG}")) and not any(path.glob(f"*/{CONFIG}"))):
            fix = (
                f"Name its repository: {path.resolve().parent}"
                if is_model
                else "Make one: shoal compose NAME REPOSITORY"
            )
            raise InputError(f"--load takes repositories, and {path} is not one.", fix)
        target = read_manifest(path).get("target", NAME)
        if target != NAME and not os.environ.get(SERVER_VARIABLE):
            what = f"{path} was composed for {target}, and --load starts the embedded Triton."
            raise InputError(what, "Check it without --load, or compose it without --target.")
    check_glibc()
    check_shared_memory(max((find_needed_memory(path) for path in paths), default=0))
    clean_up()
    return find_runtime()


def try_models(
    repositories: Sequence[Repository], runtime: Runtime, static: Sequence[Finding], on_progress: OnProgress
) -> tuple[list[Finding], list[Untried]]:
    """Load and ask the models of repositories that one server reads; return what fails, and what was not tried.

    ``static`` are the findings of the static check: a model with an error is not loaded.

    Raises:
        SetupError: the machine lacks something that the server needs.
        ServerError: the server did not start.
    """
    with ExitStack() as stack:
        snapshots = [stack.enter_context(take_snapshot(each.root)) for each in repositories]
        for snapshot in snapshots:
            _prevent_bytecode(snapshot.folder)
        trial = _Trial(repositories, snapshots, runtime, static)
        stack.callback(trial.stop)
        trial.load_all(on_progress)
        trial.ask_all(on_progress)
    return trial.findings, trial.untried


def _prevent_bytecode(repository: Path) -> None:
    """Keep Python from writing ``__pycache__``, by files of this name.

    For Triton, it would be a change of the model, which is loaded again with each ensemble that has it; and Triton
    24.10 hangs or crashes if a model that fails is loaded while the one before is unloaded.
    """
    for folder in {path.parent for path in repository.rglob("*.py")}:
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        (folder / "__pycache__").touch()


class _Trial:
    def __init__(
        self,
        repositories: Sequence[Repository],
        snapshots: Sequence[Snapshot],
        runtime: Runtime,
        static: Sequence[Finding],
    ) -> None:
        self.findings: list[Finding] = []
        self.untried: list[Untried] = []
        self._models = {model.name: model for each in repositories for model in each.models}
        self._streamed = {name for each in repositories for name in self._models if each.is_decoupled(name)}
        self._calls = {name: _find_calls(model, self._models) for name, model in self._models.items()}
        self._snapshots, self._runtime, self._static = snapshots, runtime, static
        self._order = [*_sort(self._calls)]
        self._loaded: list[str] = []
        self._bad: set[str] = set()  # not loaded, or failed
        self._server = self._start()

    def _start(self) -> TrialServer:
        server = TrialServer([each.folder for each in self._snapshots], self._runtime)
        server.wait_ready()
        return server

    def stop(self) -> None:
        """End the server, and remove what it leaves."""
        self._server.stop(0)

    def _restart(self) -> None:
        self.stop()
        self._server = self._start()
        for name in self._loaded:
            self._server.load(name, LOAD_SECONDS)

    def _fail(self, rule: Rule, name: str, what: str, fix: str, log: str = "") -> None:
        for snapshot in self._snapshots:
            what, log = snapshot.show(what), snapshot.show(log)
        self._bad.add(name)
        self.findings.append(report(rule, self._models[name], f"{name}: {what}", fix, log, self._static))

    def _leave_out(self, name: str, why: str) -> None:
        self.untried.append(Untried(name, self._models[name].folder, why))

    def _is_left_out(self, name: str, verb: str) -> bool:
        """Whether a model that this one calls was not loaded, or failed; then it is not tried either."""
        if bad := sorted(self._calls[name] & self._bad):
            self._bad.add(name)
            self._leave_out(name, f"not {verb}: it calls {bad[0]}, which failed or was not loaded.")
        return bool(bad)

    # --- loads --------------------------------------------------------------------------------------------------------

    def load_all(self, on_progress: OnProgress) -> None:
        """Load the models that this machine can load, one at a time: one that fails may crash the loads beside it."""
        left = describe_machine()["memory_gib"] * 2**30
        for number, name in enumerate(self._order):
            on_progress("loading", number, len(self._order))
            left -= (size := _count_bytes(self._models[name]))
            why = _find_obstacle(self._models[name], self._static, self._server.backends)
            why = why or (f"its files have {size / 2**30:.1f} GiB, too much for this machine" if left < 0 else "")
            if why:
                self._bad.add(name)
                self._leave_out(name, f"not loaded: {why}.")
            elif not self._is_left_out(name, "loaded") and not self._load(name):
                self._fail(LOAD, name, "Triton crashed while it loaded the model.", _CORRECT)
                self._restart()

    def _load(self, name: str) -> bool:
        """Load a model; return False if Triton has ended."""
        model, start = self._models[name], self._server.log_bytes()
        asked = model.config.load_seconds if model.config is not None else 0.0
        seconds = max(LOAD_SECONDS, asked) + _count_bytes(model) // _LOAD_BYTES
        try:
            refusal = self._server.load(name, seconds)
        except TimeoutError:
            self._server.kill_model(name)
            what = f"its process has not loaded it after {seconds:.0f} s: import, initialize or a warm-up does not end."
            fix = "Correct it; or, if it needs longer, say so by its parameter load_seconds."
            self._fail(LOAD, name, what, fix, self._server.read_log(start))
        except (OSError, HTTPException):
            return False
        else:
            if refusal:
                log = f"{refusal}\n{self._server.read_log(start)}"
                reason = (is_dead(refusal) and find_raised(log)) or find_reason(refusal)
                self._fail(LOAD, name, f"Triton does not load it: {reason}", _CORRECT, log)
            else:
                self._loaded.append(name)
        return True

    # --- requests -----------------------------------------------------------------------------------------------------

    def ask_all(self, on_progress: OnProgress) -> None:
        """Ask the models that were loaded, one at a time."""
        last = ""
        for number, name in enumerate(list(self._loaded)):
            on_progress("asking", number, len(self._loaded))
            if self._is_left_out(name, "asked"):
                continue
            if not self._judge(name):
                self._restart()
                if self._judge(name):  # it was the one before: Triton crashed after its answer
                    self._blame(last or name)
                else:
                    self._blame(name)
                    self._restart()
            last = name
        if last and self._server.has_ended():
            self._blame(last)

    def _blame(self, name: str) -> None:
        if name not in self._bad:  # else what it did before the crash is found already
            self._fail(REQUEST, name, "asked for an answer, it crashed Triton, with all models.", _CORRECT)

    def _judge(self, name: str) -> bool:
        """Ask a model, and keep what fails; return False if Triton has ended."""
        model, start = self._models[name], self._server.log_bytes()
        asker = Asker(self._server, model, is_streamed=name in self._streamed)
        try:
            for note in asker.ask() if model.config is not None else ():
                self._leave_out(name, f"not asked{note}")
        except CallError as error:
            if error.kind not in (Kind.FAILED, Kind.REFUSED, Kind.TIMEOUT):
                return False
            log = f"{error.message}\n{self._server.read_log(start)}"
            self._fail(REQUEST, name, *_explain(error, asker.sent, log), log)
            if error.kind is Kind.TIMEOUT:
                self._server.kill_model(name)
        return True


def _explain(error: CallError, sent: str, log: str) -> tuple[str, str]:
    """Return what happened, and what to do."""
    reason = find_raised(log)
    if error.kind is Kind.TIMEOUT:
        what = f"asked with {sent}, it did not end its answer within {REQUEST_SECONDS:.0f} s. {reason}".rstrip()
        return what, "Let execute answer each request; a decoupled model ends each one with the final flag."
    if is_dead(error.message):
        return f"asked with {sent}, its process died.", _CORRECT
    reason = reason or find_reason(error.message)
    return f"asked with {sent}, it failed: {reason}", _NONE if "'NoneType' object" in reason else _TYPED


def _find_calls(model: Model, models: Mapping[str, Model]) -> set[str]:
    """Find the models that a model calls: by its steps and ``calls``, and those named in code that sends requests."""
    found = {*find_callees(model.config)} if model.config is not None else set()
    for _, text in model.sources if model.is_python else ():
        if "InferenceRequest" in text:
            found |= {*re.findall(r"""["']([\w.-]+)["']""", text)}
    return (found & models.keys()) - {model.name}


def _sort(calls: Mapping[str, set[str]]) -> dict[str, None]:
    """Sort models, each after those that it calls, as far as there are no circles."""
    found: dict[str, None] = {}

    def visit(name: str, callers: frozenset[str]) -> None:
        for called in sorted(calls[name] - callers - found.keys()):
            visit(called, callers | {called})
        found[name] = None

    for name in calls:
        visit(name, frozenset({name}))
    return found


def _find_obstacle(model: Model, static: Sequence[Finding], backends: set[str]) -> str:
    """Return why this machine's server cannot load a model, as a clause; empty if it may."""
    errors = (f for f in static if f.severity == Severity.ERROR and f.place.path.is_relative_to(model.folder))
    if found := next(errors, None):
        return f"it has an error ({found.rule.id})"
    if model.message is not None:
        gpus = describe_machine().get("num_gpus", 0)
        groups = [group for group in model.message.instance_group if group.kind == group.KIND_GPU]
        if any(max(group.gpus, default=0) >= gpus for group in groups):
            return f"it needs a GPU that this machine lacks: it has {gpus or 'none'}"
        if model.backend and not model.is_ensemble and model.backend not in backends:
            return f"this server has no backend {model.backend}"
    return ""


def _count_bytes(model: Model) -> int:
    return sum(path.stat().st_size for path in model.folder.rglob("*") if path.is_file())

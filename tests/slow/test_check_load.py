"""``shoal check --load``: a real server finds what only running code shows, and nothing is left behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.authoring.check.findings import Finding
from shoal.authoring.check.repositories import read_repository
from shoal.lab.trial import asking, run
from shoal.serving.server.orphans import SHARED_MEMORY, find_folders
from shoal.system.processes import processes
from tests.support import planted_loads
from tests.support.planted_loads import MISTAKES, VALID, find_line

SHOAL = [sys.executable, "-m", "shoal"]
UNTRIED = {
    "refuses": "not asked: no image.",
    "component_refuses": "not asked: X is zero. Send another.",
    "bf16": "not asked: no values can be made for its inputs.",
    "on_gpu": "not loaded: it needs a GPU that this machine lacks: it has none.",
}


class Tried(NamedTuple):
    root: Path
    findings: list[Finding]
    untried: dict[str, str]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    """All planted models, also those of which the static check knows the mistake, tried with shorter patience."""
    root = planted_loads.write(tmp_path_factory.mktemp("load") / "r")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "LOAD_SECONDS", 20.0)
        patch.setattr(asking, "REQUEST_SECONDS", 10.0)
        server = run.find_server([root])
        findings, untried = run.try_models([read_repository(root)], server, [], lambda *_: None)
    return Tried(root, findings, {each.model: each.why for each in untried})


def test_each_mistake_is_one_finding_at_its_line(tried: Tried) -> None:
    found = {name: [f for f in tried.findings if f.what.startswith(f"{name}: ")] for name in MISTAKES}
    assert {name: len(findings) for name, findings in found.items()} == dict.fromkeys(MISTAKES, 1)
    for name, ((finding,), words) in ((name, (found[name], MISTAKES[name][2])) for name in MISTAKES):
        assert words in finding.what, name
        assert finding.place.line == find_line(name), name
        file = "config.pbtxt" if name == "policy" else "1/model.py"
        assert finding.place.path == tried.root / name / file
        assert finding.fix


def test_odd_but_valid_models_are_no_findings(tried: Tried) -> None:
    assert [f.what for f in tried.findings if f.what.partition(":")[0] in VALID] == []


def test_what_was_not_tried_is_named(tried: Tried) -> None:
    assert tried.untried.keys() == UNTRIED.keys()
    for name, why in UNTRIED.items():
        assert tried.untried[name].startswith(why)


def test_the_repository_is_unchanged(tried: Tried) -> None:
    files = sorted(path.name for path in tried.root.rglob("*") if path.is_file())
    assert files == sorted(["config.pbtxt", "model.py"] * len({*MISTAKES, *VALID}))


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*SHOAL, "check", *map(str, arguments), "--load"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def test_the_command_loads_two_repositories_together(tmp_path: Path) -> None:
    one, other = planted_loads.write(tmp_path / "one", "plain"), planted_loads.write(tmp_path / "other", "calls")
    done = check(one, other)
    assert (done.returncode, done.stdout) == (0, "No mistakes found.\n")
    planted_loads.write(other, "float64", "on_gpu")
    done = check(one, other, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert [(f["rule"], f["severity"], f["file"]) for f in report["findings"] if f["severity"] == "error"] == [
        ("request-failed", "error", str(other / "float64" / "1" / "model.py"))
    ]
    assert [each["model"] for each in report["not_tried"]] == ["on_gpu"]


def test_one_cause_is_one_finding(tmp_path: Path) -> None:
    """A model with an error is not loaded, nor what calls it; a failure at the line of a warning has its fix."""
    root = planted_loads.write(tmp_path / "r", "plain", "calls", "float64")
    config, code = root / "plain" / "config.pbtxt", root / "float64" / "1" / "model.py"
    config.write_text(config.read_text(encoding="utf-8").replace("dims: [ 4 ]", "dims: [ 0 ]", 1), encoding="utf-8")
    text = code.read_text(encoding="utf-8").replace("x.astype(np.float64)", "x.scaled if len(x) > 9 else scale * x")
    code.write_text(text, encoding="utf-8")
    report = json.loads(check(root, "--json").stdout)
    assert sorted((f["rule"], Path(f["file"]).name) for f in report["findings"] if f["severity"] == "error") == [
        ("request-failed", "model.py"), ("tensor-dims", "config.pbtxt")
    ]  # fmt: skip
    (failed,) = (f for f in report["findings"] if f["file"] == str(code))
    assert failed["fix"] == "Import or define it."
    assert [(each["model"], each["why"]) for each in report["not_tried"]] == [
        ("plain", "not loaded: it has an error (tensor-dims)."),
        ("calls", "not loaded: it calls plain, which failed or was not loaded."),
    ]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_ended_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    root = planted_loads.write(tmp_path / "r", "plain", "hangs_at_once")
    command = subprocess.Popen([*SHOAL, "check", root, "--load"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: any("hangs_at_once_0_0" in each.arguments() for each in [*processes()]))
    command.send_signal(number)
    command.wait(30)

    def is_clean() -> bool:
        left = [*find_folders(), *SHARED_MEMORY.iterdir()]
        is_running = any("hangs_at_once" in " ".join(each.arguments()) for each in [*processes()])
        return not is_running and not any(re.match(rf"shoal[-_]{command.pid}[-_]", path.name) for path in left)

    wait_for(is_clean)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)

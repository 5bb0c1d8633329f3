"""Files of ``deploy``: as their script writes them, of metrics that exist, with alerts that fire in their scenarios."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from shoal.serving.gateway.control.health import Health
from tests.support.gates import make_gate
from tests.support.keys import World
from tests.support.once import ROOT

SCRIPT = runpy.run_path(str(ROOT / "deploy" / "boards.py"))
PROMETHEUS = ROOT / "deploy" / "prometheus"
TABLE = SCRIPT["read_metrics"]((ROOT / "docs" / "serving.md").read_text(encoding="utf-8"))


def test_the_files_are_what_the_script_writes() -> None:
    """Type: python deploy/boards.py"""
    files = SCRIPT["write_files"]()
    assert len(files) == 3
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, path


def test_queries_are_of_metrics_in_the_table() -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "shoal.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 18
    queries += [alert.query for alert in SCRIPT["ALERTS"] if alert.name != "ShoalDown"]  # up is Prometheus' own
    for query in queries:
        names = SCRIPT["find_metrics"](query)
        assert names, query
        assert {*names} <= TABLE.keys(), query
    ids, places = ([panel[key] for panel in board["panels"]] for key in ("id", "gridPos"))
    assert len({*ids}) == len({(place["x"], place["y"]) for place in places}) == len(board["panels"])
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_the_table_has_the_metrics_of_the_service(tmp_path: Path) -> None:
    gate = make_gate()
    gate.callers.keys = World(tmp_path).ring()
    families = Health(gate, {}).collect()
    names = {f"{each.name}_total" if each.type == "counter" else each.name for each in families}
    assert names == {name for name in TABLE if name.startswith("shoal_")}


def test_each_alert_has_a_scenario_in_which_it_fires_after_it_has_not() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yaml").read_text(encoding="utf-8"))["tests"]
    looks = [look for test in tests for look in test.get("alert_rule_test", [])]
    fired = [(look["alertname"], len(look["exp_alerts"])) for look in looks]
    assert fired == [(alert.name, number) for alert in SCRIPT["ALERTS"] for number in (0, 1)]


@pytest.mark.usefixtures("may_start_processes")
def test_alerts_fire_in_their_scenarios_alone() -> None:
    if not (promtool := shutil.which("promtool")):
        pytest.skip("promtool is not installed. Type: apt-get install prometheus")
    for words in ("check config scrape.yaml", "test rules alerts_test.yaml"):
        done = subprocess.run([promtool, *words.split()], cwd=PROMETHEUS, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

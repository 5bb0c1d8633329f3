"""The forms of ``shoal check``'s findings for other tools, and its pre-commit hook."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from typer.testing import CliRunner, Result

from shoal.authoring.check.families import RULES, check
from shoal.authoring.check.findings import Place
from shoal.authoring.check.reports import github, sarif
from shoal.cli import app
from tests.support.once import ROOT
from tests.support.planted import Plant

CLEAN = Plant("", "", "", "", {})
ONE_ERROR = Plant("", "", "", "", {"first/config.pbtxt": ('backend: "python"', 'backend: "pyhton"')})
WHOLE_FOLDER = Plant("", "", "", "", {"all/1/.gitkeep": None})


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def test_github(here: Path) -> None:
    result = run(ONE_ERROR.write(here / "r", is_bad=True), "--format", "github")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0].startswith(
        "::error file=r/first/config.pbtxt,line=2,title=misspelt-backend::unable to find backend library"
    )
    assert run(CLEAN.write(here / "clean", is_bad=False), "--format", "github").stdout == ""


def test_github_escapes_what_ends_a_property_or_a_message(here: Path) -> None:
    place = Place(here / "a,b:c%" / "config.pbtxt", 3)
    command = github(RULES["tensor-dims"].at(place, "50 %\nof it: a, b", "Fix it."))
    assert command == ("::error file=a%2Cb%3Ac%25/config.pbtxt,line=3,title=tensor-dims::50 %25%0Aof it: a, b Fix it.")


def test_advice_in_the_words_of_other_tools(here: Path) -> None:
    finding = RULES["leaving-client"].at(Place(here / "config.pbtxt", 3), "It leaves.", "Let it.")
    assert github(finding).startswith("::notice file=config.pbtxt,line=3,title=leaving-client::")
    assert sarif([finding])["runs"][0]["results"][0]["level"] == "note"


def read_sarif(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    log = json.loads(text)
    assert log["version"] == "2.1.0"
    (one,) = log["runs"]
    return one["tool"]["driver"]["rules"], one["results"]


def test_sarif(here: Path) -> None:
    result = run(ONE_ERROR.write(here / "r", is_bad=True), "--format", "sarif")
    assert result.exit_code == 1
    rules, results = read_sarif(result.stdout)
    assert [rule["id"] for rule in rules] == list(RULES)
    (first,) = [entry for entry in results if entry["ruleId"] == "misspelt-backend"]
    assert rules[first["ruleIndex"]]["id"] == "misspelt-backend"
    assert first["level"] == "error"
    (location,) = first["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "r/first/config.pbtxt"},
        "region": {"startLine": 2},
    }
    assert read_sarif(run(CLEAN.write(here / "clean", is_bad=False), "--format", "sarif").stdout)[1] == []


def test_sarif_describes_each_rule() -> None:
    for rule in sarif([])["runs"][0]["tool"]["driver"]["rules"]:
        severity = RULES[rule["id"]].severity
        assert rule["defaultConfiguration"]["level"] == {"advice": "note"}.get(severity, severity)
        assert rule["shortDescription"]["text"].endswith(".")
        uri = urlsplit(rule["helpUri"])
        page = Path(unquote(uri.path)).read_text(encoding="utf-8")
        assert re.search(rf"(?m)^### {uri.fragment}$", page)


def test_sarif_of_folders_and_of_what_is_elsewhere(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (finding,) = check(WHOLE_FOLDER.write(here / "a b", is_bad=True))
    (result,) = sarif([finding])["runs"][0]["results"]
    assert result["locations"] == [{"physicalLocation": {"artifactLocation": {"uri": "a%20b/all"}}}]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (finding,) = check(WHOLE_FOLDER.write(elsewhere / "r", is_bad=True))
    (result,) = sarif([finding])["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == (elsewhere / "r/all").as_uri()


def test_json_has_a_short_form_and_text_is_the_default(here: Path) -> None:
    repository = ONE_ERROR.write(here / "r", is_bad=True)
    assert run(repository, "--format", "json").stdout == run(repository, "--json").stdout
    assert run(repository, "--format", "text").stdout == run(repository).stdout


def test_several_repositories_are_checked_together(here: Path) -> None:
    clean, bad = CLEAN.write(here / "clean", is_bad=False), ONE_ERROR.write(here / "bad", is_bad=True)
    assert run(clean, bad).stdout == run(bad).stdout
    assert run(clean, "nowhere").exit_code == 2


def test_the_hook_of_pre_commit_runs_the_console_script(here: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["id"], hook["language"], hook["pass_filenames"]) == ("shoal-check", "python", False)
    script, *arguments = hook["entry"].split()
    assert script in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    repository = ONE_ERROR.write(here / "r", is_bad=True)
    assert CliRunner().invoke(app, [*arguments, str(repository)]).exit_code == 1

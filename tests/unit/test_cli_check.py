"""``shoal check``: what it prints, how it ends, what it takes; and who else asks it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.authoring.check.families import check
from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.plan import CPU, PLACEMENTS, Plan
from shoal.cli import app
from shoal.errors import ArtifactError, InputError
from tests.support.once import ROOT
from tests.support.planted import Plant, config

CLEAN = Plant("", "", "", "", {})
ONE_ERROR = Plant("", "", "", "", {"first/config.pbtxt": ("dims: [ 4 ]", "dims: [ 0 ]")})
ONE_WARNING = Plant("", "", "", "", {"first/config.pbtxt": ("instance_group [ { kind: KIND_CPU } ]", "")})


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def test_a_clean_repository(here: Path) -> None:
    result = run(CLEAN.write(here / "r", is_bad=False))
    assert (result.exit_code, result.stdout) == (0, "No mistakes found.\n")


def test_an_error_is_printed_with_place_rule_and_fix(here: Path) -> None:
    result = run(ONE_ERROR.write(here / "r", is_bad=True))
    assert result.exit_code == 1
    assert (
        "r/first/config.pbtxt:4: error: model input 'X' dimension must be integer >= 1, or -1 to indicate a"
        " variable-size dimension for first; it is 0. (tensor-dims)\n    Write -1 for any size.\n"
    ) in result.stdout
    assert result.stdout.endswith("2 errors, 0 warnings. shoal check --explain RULE describes one.\n")


def test_warnings_fail_only_when_asked_to(here: Path) -> None:
    repository = ONE_WARNING.write(here / "r", is_bad=True)
    assert run(repository).exit_code == 0
    assert "0 errors, 1 warning." in run(repository).stdout
    assert run(repository, "--strict").exit_code == 1


def test_repositories_that_a_server_reads_together(here: Path) -> None:
    one, other = CLEAN.write(here / "one", is_bad=False), here / "other"
    other.mkdir()
    shutil.move(one / "left", other / "left")
    result = run(one)
    assert result.exit_code == 1
    assert "left. (member-missing)" in result.stdout
    assert run(one, other).stdout == run(other, one).stdout == "No mistakes found.\n"
    (other / "left" / "config.pbtxt").write_text(config("left").replace("[ 4 ]", "[ 5 ]"), encoding="utf-8")
    assert "(step-shape)" in run(one, other).stdout
    shutil.copytree(other, here / "third")
    assert "left. (member-missing)" in run(one, other, here / "third").stdout  # Triton takes neither of the two


def test_json(here: Path) -> None:
    result = run(ONE_WARNING.write(here / "r", is_bad=True), "--json")
    told = json.loads(result.stdout)
    assert (told["errors"], told["warnings"]) == (0, 1)
    (finding,) = told["findings"]
    assert finding == {
        "rule": "kind-left-open",
        "severity": "warning",
        "file": str(here / "r" / "first" / "config.pbtxt"),
        "line": 1,
        "what": "first does not say where it runs.",
        "fix": "Add instance_group [ { kind: KIND_CPU } ], or KIND_GPU with the gpus it may use.",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist. Name a model repository"),
        (["empty"], "holds no model: no folder in it has a config.pbtxt or a version folder."),
        (["file"], "file is not a folder."),
        (["r", "--target", "1.1"], "Unknown target '1.1'. Known: embedded, or a release from 22.11 on, such as 26.06."),
        (["--explain", "tensor-dim"], "Unknown rule 'tensor-dim'. Do you mean tensor-dims"),
        ([], "Name a repository, or --explain RULE."),
    ],
)
def test_exit_code_2_if_it_cannot_be_checked(here: Path, arguments: list[str], message: str) -> None:
    CLEAN.write(here / "r", is_bad=False)
    (here / "empty").mkdir()
    (here / "file").touch()
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_explain() -> None:
    entry = run("--explain", "tensor-dims").stdout
    assert entry.startswith("### tensor-dims\n\n*error, core* — A tensor has no dimensions, or one that is")
    assert entry in run("--explain", "all").stdout


def test_one_models_folder_alone_and_among_others(here: Path) -> None:
    repository = ONE_ERROR.write(here / "r", is_bad=True)
    assert run(repository / "left").exit_code == 0
    assert run(repository / "first").exit_code == 1
    assert "is inferred from model" in run(repository / "all").stdout  # its members are read beside it


def test_a_project_that_has_models_alone(here: Path) -> None:
    """`shoal add-model` leaves such a project, before there is a pipeline."""
    model = here / "project" / "models" / "mine"
    shutil.copytree(ROOT / "postprocess" / "softmax", model)
    text = (model / "config.pbtxt").read_text(encoding="utf-8")
    (model / "config.pbtxt").write_text(text.replace('name: "softmax"', 'name: "mine"'), encoding="utf-8")
    assert run(here / "project").stdout == "No mistakes found.\n"


def test_shoals_own_leaf_folders(here: Path) -> None:
    for path in (ROOT, ROOT / "models", ROOT / "preprocess" / "readability", ROOT / "ensembles" / "ensemble_all"):
        assert run(path).stdout == "No mistakes found.\n", here


@pytest.mark.parametrize(("target", "placement"), [("embedded", CPU), *(("26.06", each) for each in PLACEMENTS)])
def test_shoals_own_repositories(artifacts: Path, tmp_path: Path, placement: str, target: str) -> None:
    plan = Plan(placement, target)
    findings = check(compose("ensemble_all", tmp_path / "r", artifacts=artifacts, plan=plan))
    assert findings == []


def test_compose_puts_nothing_erroneous_in_place(artifacts: Path, tmp_path: Path) -> None:
    leaf = tmp_path / "leaves" / "postprocess" / "mine"
    shutil.copytree(ROOT / "postprocess" / "readability", leaf)
    text = (leaf / "config.pbtxt").read_text(encoding="utf-8")
    (leaf / "config.pbtxt").write_text(text.replace("max_batch_size: 512", "max_batch_size: 8"), encoding="utf-8")
    with pytest.raises(ArtifactError) as refused:
        compose("ensemble_all", tmp_path / "r", artifacts=artifacts, projects=[tmp_path / "leaves"])
    assert str(refused.value).startswith(f"{tmp_path}/r is not written, since ensemble_all/config.pbtxt:")
    assert "which only allows maximum batch size to be 8 [ensemble-batch-size]." in str(refused.value)
    assert not (tmp_path / "r").exists()


@pytest.mark.usefixtures("may_start_processes")
def test_checking_loads_no_models_library() -> None:
    code = (
        "import sys; from shoal import check; check(sys.argv[1], target='embedded');"
        "print(*{'torch', 'transformers', 'treelite', 'sklearn', 'cupy', 'matplotlib', 'pandas'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, ROOT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_repository_of_links_and_odd_entries(tmp_path: Path) -> None:
    repository = CLEAN.write(tmp_path / "r", is_bad=False)
    (repository / "again").symlink_to(repository)  # a circle
    (repository / "notes.txt").write_text("files beside models are nobody's concern", encoding="utf-8")
    assert {finding.rule.id for finding in check(repository)} <= {"not-a-model", "no-version"}
    with pytest.raises(InputError, match="does not exist"):
        check(repository / "nope")


def test_a_model_without_a_name_gets_its_folders(tmp_path: Path) -> None:
    repository = CLEAN.write(tmp_path / "r", is_bad=False)
    path = repository / "first" / "config.pbtxt"
    path.write_text(config("first").replace('name: "first"\n', "", 1), encoding="utf-8")
    assert check(repository) == []

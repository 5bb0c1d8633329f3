"""Models that answer in pieces: what may be right is left alone, and advice fails nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.authoring.check.families import check
from shoal.authoring.check.python import streams
from shoal.authoring.check.repositories import read_repository
from shoal.cli import app
from tests.support.planted import config, write
from tests.support.planted_streams import COMPONENT, INNER, OUTER
from tests.support.sources import execute
from tests.support.streams import DECOUPLED, FILES

FINAL = "pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
SEND = f"sender.send(flags={FINAL})\n"
ERROR = 'pb_utils.InferenceResponse(error=pb_utils.TritonError("no"))'


def write_all(folder: Path, **edits: tuple[str, str]) -> Path:
    """Write the repository, with the configurations of some models edited."""
    for path, text in FILES.items():
        name = path.partition("/")[0]
        if path.endswith(".pbtxt") and name in edits:
            assert edits[name][0] in text
            text = text.replace(*edits[name])
        write(folder / path, text)
    return folder


def look(folder: Path, text: str, settings: str = "") -> list[str]:
    """Return the rules of streams that a model.py breaks."""
    write(folder / "m" / "config.pbtxt", config("m") + settings)
    write(folder / "m" / "1" / "model.py", text)
    repository = read_repository(folder)
    return [finding.rule.id for model in repository.models for finding in streams.find(model, repository)]


def body(text: str) -> str:
    start = "for request in requests:\n    sender = request.get_response_sender()\n"
    return execute(start + "".join(f"    {line}\n" for line in text.strip().split("\n")))


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        (SEND + "sender.is_cancelled()", True),
        (SEND + "while not sender.is_cancelled():\n    pass", True),
        (SEND + "x = sender.is_cancelled() and x", True),
        (SEND + "for x in [1]:\n    pass\nx = 1 if sender.is_cancelled() else 2", True),
        ("if x:\n    " + SEND + "    return sender.is_cancelled()", True),
        ("sender.is_cancelled()\n" + SEND, False),
        ("sender.send(x)\nsender.is_cancelled()", False),
        ("sender.send(x, flags=0)\nsender.is_cancelled()", False),
        ("if x:\n    " + SEND + "else:\n    sender.is_cancelled()", False),
        ("if x:\n    " + SEND + "sender.is_cancelled()", False),
        (SEND + "if x:\n    sender.is_cancelled()", False),
        (SEND + "x = x and sender.is_cancelled()", False),
        (SEND + "x = lambda: sender.is_cancelled()", False),
        (SEND + "sender = request.get_response_sender()\nsender.is_cancelled()", False),
        (SEND + "for sender in senders:\n    sender.is_cancelled()\nsender.is_cancelled()", False),
        (SEND + "if x:\n    continue\nsender.is_cancelled()", False),
        (SEND + "other.is_cancelled()", False),
        ("while not sender.is_cancelled():\n    " + SEND + "    break", False),
    ],
)
def test_senders_that_have_ended(text: str, is_found: bool, tmp_path: Path) -> None:
    assert look(tmp_path, body(text), DECOUPLED) == ["cancelled-after-final"] * is_found


@pytest.mark.parametrize(
    ("base", "settings", "is_found"),
    [
        ("StreamingComponent", DECOUPLED, False),
        ("StreamingComponent", "", True),
        ("Component", "", False),
        ("Component", DECOUPLED, True),
        ("Mine", "", False),
        ("Mine", DECOUPLED, False),
    ],
)
def test_components_and_their_policy(base: str, settings: str, is_found: bool, tmp_path: Path) -> None:
    text = COMPONENT.replace("(StreamingComponent)", f"({base})")
    assert look(tmp_path, text, settings) == ["decoupled-mismatch"] * is_found


def test_a_component_that_answers_either_way(tmp_path: Path) -> None:
    text = COMPONENT.replace("(StreamingComponent):", "(StreamingComponent):\n    answers_either_way = True")
    assert look(tmp_path, text, "") == []


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("for x in asked.exec(decoupled=True):\n    x.has_error()", []),
        ("answers = asked.exec(decoupled=True)\nfor x in answers:\n    x.has_error()", []),
        ("x = await asked.async_exec()\nx.has_error()", []),
        ("stop.exec(decoupled=True)", []),
        ("x = await asked.async_exec(decoupled=True)", ["async-exec-decoupled"]),
    ],
)
def test_calls_to_a_decoupled_model(text: str, rules: list[str], tmp_path: Path) -> None:
    text = body(text).replace("def execute", "async def execute") if "await" in text else body(text)
    assert look(tmp_path, text) == rules


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        (f"sender.send({ERROR}, flags={FINAL})", True),
        (f"last = {ERROR}\nsender.send(last, {FINAL})", True),
        (f"sender.send({ERROR})\n" + SEND, False),
        (f"sender.send(pb_utils.InferenceResponse([x], error=None), flags={FINAL})", False),
        (f"last = pb_utils.InferenceResponse([x])\nif x:\n    last = {ERROR}\nsender.send(last, flags={FINAL})", False),
        (f"sender.send(last, flags={FINAL})", False),
    ],
)
def test_errors_that_end_the_answers(text: str, is_found: bool, tmp_path: Path) -> None:
    assert look(tmp_path / "many", body(text), DECOUPLED) == ["error-with-final"] * is_found
    assert look(tmp_path / "single", body(text)) == []  # there it is the one answer


def test_advice_fails_nothing(tmp_path: Path) -> None:
    repository = write_all(tmp_path)
    for target, rules in (("24.10", ["leaving-client"]), ("26.04", ["leaving-client"]), ("26.05", [])):
        assert [finding.rule.id for finding in check(repository, target=target)] == rules
    assert check(repository) == []  # the server is not known
    arguments = ["check", str(repository), "--target", "embedded", "--strict"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "config.pbtxt:9: advice: If a client of sums leaves, counts answers to the end" in result.stdout
    assert "0 errors, 0 warnings, 1 piece of advice. shoal check" in result.stdout
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert (told["errors"], told["warnings"], told["advice"], len(told["findings"])) == (0, 0, 1, 1)


def test_advice_comes_last(tmp_path: Path) -> None:
    repository = write_all(tmp_path, adds=("count: 1", "count: 2"), asks=('"counts"', '"count"'))
    (tmp_path / "asks" / "1" / "model.py").write_text(
        FILES["asks/1/model.py"].replace("for answer in asked.exec", "for answer in asked.async_exec"), encoding="utf-8"
    )
    severities = [str(finding.severity) for finding in check(repository, target="26.01")]
    assert severities == ["error", "error", "error", "warning", "advice"]


def test_calls_have_a_near_miss_and_a_line(tmp_path: Path) -> None:
    (finding,) = check(write_all(tmp_path, asks=('"counts"', '"count adds"')))
    assert (finding.place.line, finding.fix) == (7, "Did you mean counts?")
    assert finding.what == "Model asks calls count, and there is no such model."


def test_state_before_a_decoupled_step_or_without_one_may_be_divided(tmp_path: Path) -> None:
    assert check(write_all(tmp_path / "a", asks=("count: 1", "count: 2"), counts=("count: 1", "count: 4"))) == []
    whole = write_all(tmp_path / "b", adds=("count: 1", "count: 2"), counts=(DECOUPLED, ""))
    (whole / "counts" / "1" / "model.py").write_text(FILES["adds/1/model.py"], encoding="utf-8")
    assert not [finding for finding in check(whole) if finding.rule.id.startswith("stream-")]


def test_an_engine_that_numbers_no_streams_gives_none_to_map(tmp_path: Path) -> None:
    """An example is NVIDIA's tensorrt_llm: the step then answers whole requests only."""
    repository = write_all(tmp_path)
    for name in ("sums", "counts"):
        path = repository / name / "config.pbtxt"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if "stream_id" not in line), encoding="utf-8")
    assert not [finding for finding in check(repository) if finding.rule.id.startswith("stream-")]


def test_a_queue_limit_before_an_engine_is_right(tmp_path: Path) -> None:
    queue = "dynamic_batching { default_queue_policy { max_queue_size: 64 } }\ninstance_group"
    assert check(write_all(tmp_path, counts=("instance_group", queue))) == []


@pytest.mark.parametrize("name", ["sums", "outer"])
def test_ensembles_in_a_circle_are_read_to_an_end(name: str, tmp_path: Path) -> None:
    repository = write_all(tmp_path)
    write(repository / "outer" / "config.pbtxt", OUTER)
    write(repository / "sums" / "config.pbtxt", INNER.replace('model_name: "adds"', f'model_name: "{name}"'))
    assert "ensemble-in-itself" in [finding.rule.id for finding in check(repository)]

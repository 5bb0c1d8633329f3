"""``shoal check --load`` without a server: what is read from a log, what is asked, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from typer.testing import CliRunner

from shoal.authoring.check.findings import Place
from shoal.authoring.check.repositories import read_model
from shoal.authoring.check.tried import LOAD, REQUEST, find_place, find_raised, find_reason, report
from shoal.authoring.environment import embedded
from shoal.authoring.repository.config import read_config
from shoal.cli import app
from shoal.kit.component.spec import ModelSpec, TensorSpec
from shoal.lab.trial.requests import find_misfit, make_requests
from tests.support import planted_loads

ADDED = """load failed for model 'a': version 1 is at UNAVAILABLE state: Internal: KeyError: 'k'

At:
  /r/a/1/shoal/kit/component/base.py(63): __init__
  /r/a/1/tools.py(6): read
  /r/a/1/model.py(8): initialize
;
"""
PRINTED = """model a failed on a request
Traceback (most recent call last):
  File "/r/a/1/model.py", line 12, in run
    return self.read(batch)
           ^^^^^^^^^^^^^^^^
  File "/r/a/1/tools.py", line 3, in read
    return np.add(1, "")
  File "/usr/lib/numpy/core.py", line 40, in add
    raise TypeError
numpy.core.UFuncError: did not
I1130 15:21:42.317993 29590 model_lifecycle.cc:839] "successfully loaded 'plain'"
"""
SPEC = ModelSpec("a", (), (TensorSpec("Y", "TYPE_FP32", (4, -1)), TensorSpec("Z", "TYPE_STRING", (1,))), 8)


@pytest.mark.parametrize(
    ("log", "place"),
    [
        (ADDED, Place(Path("/r/a/1/tools.py"), 6)),
        (PRINTED, Place(Path("/r/a/1/tools.py"), 3)),
        (f"{ADDED}{PRINTED}", Place(Path("/r/a/1/tools.py"), 6)),
        (
            ADDED.replace("tools.py", "shoal/x.py").replace("model.py", "shoal/y.py"),
            Place(Path("/r/a/1/shoal/kit/component/base.py"), 63),
        ),
        (ADDED.replace("/r/a/", "/r/ab/"), None),
        ("Stub process 'a_0_0' is not healthy.", None),
    ],
)
def test_the_innermost_line_of_the_models_own_code(log: str, place: Place | None) -> None:
    assert find_place(log, Path("/r/a")) == place


def test_the_line_of_a_syntax_error(tmp_path: Path) -> None:
    path = planted_loads.write(tmp_path, "plain") / "plain" / "1" / "model.py"
    assert find_place("SyntaxError: invalid syntax (model.py, line 3)", tmp_path / "plain") == Place(path, 3)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (ADDED, "KeyError: 'k'."),
        (
            "in ensemble 'e', Failed to process the request(s) for model 'a_0_0', message: KeyError: 1\n2\n\nAt:\n",
            "KeyError: 1 2.",
        ),
        ("Output Y has dtype bool. (INTERNAL)", "Output Y has dtype bool."),
        ("", "it said nothing."),
    ],
)
def test_a_reason_is_one_line_without_tritons_prefixes(said: str, reason: str) -> None:
    assert find_reason(said) == reason


def test_the_last_exception_that_was_printed() -> None:
    assert find_raised(PRINTED) == "numpy.core.UFuncError: did not."
    assert find_raised(ADDED) == ""
    begin, end = "Failed to initialize Python stub: KeyError: 'k'", "At:\n  /r/a/1/model.py(8): <module>"
    assert find_raised(f"I1130 19:21:00.9 17 pb_stub.cc:366]  {begin}\n\n{end}\n") == "KeyError: 'k'."
    assert find_raised(f'I1130 19:21:00.9 17 pb_stub.cc:366] "{begin}\\n\\n{end}"\n') == "KeyError: 'k'."


def test_a_finding_without_a_line_is_at_what_was_run(tmp_path: Path) -> None:
    model = read_model(planted_loads.write(tmp_path, "plain") / "plain")
    code = tmp_path / "plain" / "1" / "model.py"
    assert report(REQUEST, model, "It hangs.", "", "", []).place == Place(code)
    assert report(LOAD, model, "Triton does not load it.", "", "", []).place == Place(model.path)
    other = LOAD.at(Place(code, 9), "It is so.", "Write that.")
    log = f"KeyError: 1\n\nAt:\n  {code}(9): execute\n"
    assert report(REQUEST, model, "It failed.", "Correct it.", log, [other]).fix == "Write that."


def answer(**outputs: tuple[str, list[int]]) -> pb.ModelInferResponse:
    made = pb.ModelInferResponse()
    for name, (datatype, shape) in outputs.items():
        made.outputs.add(name=name, datatype=datatype, shape=shape)
    return made


@pytest.mark.parametrize(
    ("y", "misfit"),
    [
        (("FP32", [2, 4, 9]), ""),
        (("FP64", [2, 4, 9]), "output Y is FP64 [2, 4, 9], and config.pbtxt declares FP32 [rows, 4, -1]"),
        (("FP32", [2, 4]), "output Y is FP32 [2, 4], and config.pbtxt declares FP32 [rows, 4, -1]"),
        (("FP32", [2, 3, 9]), "output Y is FP32 [2, 3, 9], and config.pbtxt declares FP32 [rows, 4, -1]"),
        (("FP32", [1, 4, 9]), "output Y has 1 rows for a request of 2"),
    ],
)
def test_answers_are_compared_with_the_declaration(y: tuple[str, list[int]], misfit: str) -> None:
    whole = answer(Y=y, Z=("BYTES", [2, 1]))
    assert find_misfit(SPEC, [whole], 2, is_streamed=False, is_exact=True) == misfit


def test_outputs_may_be_missing_from_pieces_and_where_a_component_leaves_them_out() -> None:
    part = answer(Z=("BYTES", [1, 1]))
    assert find_misfit(SPEC, [part], 1, is_streamed=False, is_exact=True) == "the answer has no output Y"
    assert find_misfit(SPEC, [part], 2, is_streamed=True, is_exact=True) == ""
    assert find_misfit(SPEC, [answer()], 1, is_streamed=True, is_exact=True) == "the answer has no output Y"
    assert find_misfit(SPEC, [answer()], 1, is_streamed=False, is_exact=False) == ""
    assert find_misfit(SPEC, [], 1, is_streamed=True, is_exact=True) == ""


def test_requests_are_the_models_own_or_made_up(tmp_path: Path) -> None:
    folder = planted_loads.write(tmp_path, "sized") / "sized"
    made, is_own = make_requests(read_config(folder))
    assert [request["X"].shape for request in made] == [(1, 8, 8), (1, 1, 1), (1, 256, 256), (1, 64, 64)]
    assert [float(request["X"].max()) for request in made] == [0, 1, 1, 1]
    assert not is_own
    config = folder / "config.pbtxt"
    canary = 'parameters { key: "canary" value { string_value: "{\\"X\\": [[[5]]]}" } }\n'
    config.write_text(config.read_text(encoding="utf-8") + canary, encoding="utf-8")
    (own,), is_own = make_requests(read_config(folder))
    assert is_own
    assert np.array_equal(own["X"], np.full((1, 1, 1), 5, np.float32))


def test_no_request_is_made_up_for_what_numpy_lacks(tmp_path: Path) -> None:
    assert make_requests(read_config(planted_loads.write(tmp_path, "bf16") / "bf16")) == ([], False)


def refuse(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["check", *map(str, arguments)])
    assert done.exit_code == 2
    assert done.stdout == ""
    return done.stderr


def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = planted_loads.write(tmp_path / "r", "plain")
    wanted = "error: --load starts the embedded Triton, which is not 26.06. Leave out --target, or --load.\n"
    assert refuse(folder, "--load", "--target", "26.06") == wanted
    assert f"Name its repository: {folder}\n" in refuse(folder / "plain", "--load")
    (folder / "manifest.json").write_text('{"shoal": "1", "target": "26.06", "launch": {}}', encoding="utf-8")
    assert "was composed for 26.06, and --load starts the embedded Triton. " in refuse(folder, "--load")
    (folder / "manifest.json").unlink()
    monkeypatch.setattr(embedded, "find_installed", lambda: None)
    monkeypatch.setattr("shoal.serving.server.runtime.find_installed", lambda: None)
    assert refuse(folder, "--load").endswith("is not installed. Type: pip install 'shoal[serve]'\n")

"""The real server: what it answers, what it refuses, how it starts and stops."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import InputError, ServerError, SetupError, ShoalError
from shoal.repository.compose import compose
from shoal.repository.placement import Plan
from shoal.serving import runtime
from shoal.serving.client import Client
from shoal.serving.local import Pipeline
from shoal.serving.runtime import container_command, find_runtime
from shoal.serving.server import Server, check_numpy, check_repository, find_cause, find_port, serve
from tests.conftest import ROOT

pytestmark = pytest.mark.server
TEXTS = ["The cat sat.", "It is nonetheless imperative that epistemology be considered.", "", "漢字 🐟 \0 שלום"]


def test_the_weight_blends_row_by_row(client: Client) -> None:
    weights = [0.0, 1.0, 0.25, 0.5]
    answer = client.infer("ensemble_all", excerpt=TEXTS, BERT_WEIGHT=weights)
    w = np.array(weights, np.float32)[:, None]
    expected = w * answer["BERT_SCORE"] + (1 - w) * answer["FOREST_SCORE"]
    assert np.array_equal(answer["SCORE"], expected)
    assert answer["SCORE"].shape == (4, 1)
    assert answer["SCORE"].dtype == np.float32


def test_without_a_weight_it_is_the_plain_average(client: Client) -> None:
    plain = client.infer("ensemble_all", excerpt=TEXTS)
    assert np.array_equal(plain["SCORE"], client.infer("ensemble_all", excerpt=TEXTS, BERT_WEIGHT=[0.5] * 4)["SCORE"])


def test_an_answer_may_be_asked_for_alone(server: Server) -> None:
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(server.grpc_url) as raw:
        text = triton.InferInput("excerpt", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([[b"A cat."]], np.object_))
        for name in ("SCORE", "BERT_SCORE"):
            answer = raw.infer("ensemble_all", [text], outputs=[triton.InferRequestedOutput(name)])
            assert [output.name for output in answer.get_response().outputs] == [name]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"excerpt": ["a", "b"], "BERT_WEIGHT": [0.5, 1.5]}, "BERT_WEIGHT[1] is 1.5; it must lie between 0 and 1."),
        ({"excerpt": ["a"], "BERT_WEIGHT": [float("nan")]}, "BERT_WEIGHT[0] is nan; it must lie between 0 and 1."),
        ({"excerpt": [b"a\xff"]}, "excerpt[0] is not valid UTF-8: byte 0xff at position 1."),
        ({"excerpt": ["a" * 65537]}, "excerpt[0] has 65537 bytes; at most 65536 are allowed."),
    ],
)
def test_bad_values_get_the_same_words_on_every_way_in(
    client: Client, pipeline: Pipeline, inputs: dict[str, list[object]], message: str
) -> None:
    with pytest.raises(InputError) as here:
        pipeline(**inputs)
    with pytest.raises(InputError) as served:
        client.infer("ensemble_all", **inputs)
    assert str(here.value).startswith(message)
    assert str(here.value) in str(served.value)
    assert "/" not in str(served.value).replace("'ensemble_all'", "")


def test_a_bad_neighbour_fails_alone(server: Server, pipeline: Pipeline) -> None:
    from concurrent.futures import ThreadPoolExecutor

    good = [f"The cat number {k} sat." for k in range(40)]
    with Client(server.grpc_url) as client, ThreadPoolExecutor(16) as callers:

        def ask(text: object) -> Any:
            try:
                return float(client.infer("ensemble_all", excerpt=[text])["SCORE"][0, 0])
            except InputError as error:
                return str(error)

        answers = list(callers.map(ask, [t for text in good for t in (text, b"\xff")]))
    assert all("not valid UTF-8" in str(answer) for answer in answers[1::2])
    np.testing.assert_allclose(answers[::2], pipeline(excerpt=good)["SCORE"][:, 0], atol=1e-5)


def test_too_many_rows_are_refused(client: Client, pipeline: Pipeline) -> None:
    with pytest.raises(InputError, match="512"):
        client.infer("ensemble_all", excerpt=["a"] * 513)
    with pytest.raises(InputError, match="The request has 513 rows; ensemble_all takes at most 512"):
        pipeline(excerpt=["a"] * 513)


def test_names_that_are_not_there(client: Client) -> None:
    with pytest.raises(InputError, match=r"There is no input text\. Inputs: excerpt, BERT_WEIGHT"):
        client.infer("ensemble_all", text=["a"])
    with pytest.raises(InputError, match="expected"):
        client.infer("ensemble_all", BERT_WEIGHT=[0.5])
    with pytest.raises(ShoalError, match="nope"):
        client.infer("nope", excerpt=["a"])
    assert client.is_ready("ensemble_all")
    assert not client.is_ready("nope")


def test_no_server_is_said_plainly() -> None:
    url = f"127.0.0.1:{find_port(0)}"
    for protocol in ("grpc", "http"):
        with Client(url, protocol=protocol) as client, pytest.raises(ServerError, match=f"No Triton answers at {url}"):
            client.infer("ensemble_all", excerpt=["a"])
    with pytest.raises(InputError, match="no protocol 'smoke'"):
        Client(url, protocol="smoke")


# --- ways to a repository ----------------------------------------------------------------------------------------


def test_bf16_is_close(artifacts: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    repository = compose("ensemble_all", tmp_path / "bf16", artifacts=artifacts, plan=Plan(dtype="bf16"))
    texts = TEXTS[:2] * 4
    got, expected = Pipeline.load(repository / "ensemble_all")(excerpt=texts), pipeline(excerpt=texts)
    assert 0 < np.abs(got["BERT_SCORE"] - expected["BERT_SCORE"]).max() <= 0.02


# --- starting and stopping ---------------------------------------------------------------------------------------


def regions() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("shoal_*")}


def test_a_stopped_server_leaves_nothing(repository: Path) -> None:
    before = regions()
    with serve(repository) as running:
        folder, url = running.log.parent, running.http_url
        children = subprocess.run(
            ["pgrep", "-f", str(folder)], capture_output=True, text=True, check=True
        ).stdout.split()
        assert len(children) >= 5  # the server and four stubs
        assert len(regions()) > len(before)
    assert regions() == before
    assert not folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.split(":")[1]))) != 0


def test_the_server_ends_with_its_parent(repository: Path, tmp_path: Path) -> None:
    code = (
        f"import shoal, time\ns = shoal.serve({str(repository)!r})\nprint(s._process.pid, flush=True)\ntime.sleep(99)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


def test_a_model_that_does_not_load_is_named_with_its_own_error(repository: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(repository, broken)
    (broken / "preprocess" / "1" / "vocab.txt").write_text("[PAD]\n", encoding="utf-8")
    with pytest.raises(ServerError, match=r"failed to load 'preprocess' .* vocab\.txt is not the one preprocess\.json"):
        serve(broken)


def test_a_forest_of_another_bundle_is_refused_at_load(repository: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(repository, broken)
    path = broken / "preprocess" / "1" / "preprocess.json"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    with pytest.raises(ServerError, match=r"failed to load 'cuml' .* checkpoint\.tl was made with another preprocess"):
        serve(broken)


def test_an_ensemble_that_does_not_fit_is_named(repository: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(repository, broken)
    config = broken / "cuml" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace("207", "206"), encoding="utf-8")
    with pytest.raises(ServerError, match="206"):
        serve(broken)


def test_faults_are_found_before_the_start(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="Triton cannot bear the path"):
        serve(tmp_path / "with blank")
    with pytest.raises(InputError, match="is no model repository"):
        serve(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SetupError, match="is in use"):
            serve(repository, http_port=taken.getsockname()[1])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.pbtxt").touch()
    (tmp_path / ".git").mkdir()
    with pytest.raises(InputError, match=r"holds folders that are no models: \.git"):
        check_repository(tmp_path)
    with pytest.raises(SetupError, match=r"corrupts tensors under NumPy 2\.1\.0\. Type: pip install 'numpy<2'"):
        check_numpy("2.1.0")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "white space"))
    (tmp_path / "white space").mkdir()
    with pytest.raises(InputError, match="cannot bear"):
        serve(repository)
    assert not list((tmp_path / "white space").iterdir())


def test_a_server_that_is_not_ready_in_time_is_stopped(repository: Path) -> None:
    before = regions()
    with pytest.raises(ServerError, match=r"Triton was not ready after 0\.1 s"):
        serve(repository, timeout=0.1)
    assert regions() == before


def test_a_server_that_does_not_end_is_killed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = regions()
    running = serve(repository)
    monkeypatch.setattr("shoal.serving.server.EXIT_SECONDS", -9.9)
    os.kill(running._process.pid, signal.SIGSTOP)
    running.stop()
    assert running.wait() == -signal.SIGKILL
    assert regions() == before


def test_causes_in_logs() -> None:
    assert find_cause("") == "it said nothing."
    assert find_cause("a\nlast words\n") == "last words"
    assert find_cause("E1 x.cc] \"Poll failed for model directory 'e': reason\"") == (
        "Poll failed for model directory 'e': reason"
    )


# --- the runtime -------------------------------------------------------------------------------------------------


def test_the_runtime_is_found_by_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packaged = find_runtime()
    monkeypatch.setenv("SHOAL_TRITONSERVER", str(packaged.binary))
    assert find_runtime() == packaged
    monkeypatch.setenv("SHOAL_TRITONSERVER", str(tmp_path / "nowhere"))
    with pytest.raises(SetupError, match=r"SHOAL_TRITONSERVER names .*nowhere, which is no file"):
        find_runtime()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    monkeypatch.setenv("SHOAL_TRITONSERVER", str(tmp_path / "bin" / "tritonserver"))
    with pytest.raises(SetupError, match="has no Python backend stub for Python"):
        find_runtime()


def test_missing_libraries_are_named_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing, fix in ((["libpython3.11.so.1.0"], "apt install libpython3.11"), (["libb64.so.0d"], "Reinstall it")):
        with monkeypatch.context() as patch:
            patch.setattr(runtime.Runtime, "missing_libraries", lambda _, names=missing: names)
            with pytest.raises(SetupError, match=f"Triton needs {missing[0]}.*{fix}"):
                find_runtime()


def test_other_machines_are_pointed_to_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(
        SetupError, match=r"The embedded Triton runs on Linux x86-64, not on Linux aarch64\. Use NVIDIA's"
    ):
        find_runtime()
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SetupError, match=r"pip install 'shoal\[serve\]'"):
        find_runtime()


def test_the_container_command() -> None:
    command = container_command(Path("/srv/repository"), "26.06")
    assert "nvcr.io/nvidia/tritonserver:26.06-py3 tritonserver --model-repository=/models" in command
    assert "-v /srv/repository:/models:ro" in command


def test_leaf_folders_copied_by_hand_serve_too(artifacts: Path, tmp_path: Path, pipeline: Pipeline) -> None:
    """The README's way without `shoal compose`: cp -r under the model's name, each artifact to its place."""
    leaves = {
        "preprocess": "preprocess/readability",
        "postprocess": "postprocess/readability",
        "bert-large": "models/bert-large",
        "cuml": "models/cuml",
        "ensemble_all": "ensembles/ensemble_all",
    }
    for name, leaf in leaves.items():
        subprocess.run(["cp", "-r", ROOT / leaf, tmp_path / name], check=True)
    for name, files in {
        "preprocess": ["preprocess.json", "vocab.txt"],
        "bert-large": ["model.pt"],
        "cuml": ["checkpoint.tl"],
    }.items():
        subprocess.run(["cp", *(artifacts / file for file in files), tmp_path / name / "1"], check=True)
    with serve(tmp_path) as running, Client(running.grpc_url) as client:
        got = client.infer("ensemble_all", excerpt=TEXTS)
    assert np.array_equal(got["SCORE"], pipeline(excerpt=TEXTS)["SCORE"])

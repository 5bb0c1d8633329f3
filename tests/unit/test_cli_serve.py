"""``shoal serve`` before a server starts: what it refuses, and how."""

from __future__ import annotations

import json
import os
import shlex
import socket
from pathlib import Path
from signal import SIGKILL

import pytest
from typer.testing import CliRunner, Result

from shoal.cli import app
from shoal.cli.serving import _print_pipelines
from shoal.errors import ArtifactError, InputError
from shoal.serving.gateway.options import Addresses, Options
from tests.support.apis import write_apis
from tests.support.counting import write_counting
from tests.support.imports import script
from tests.support.once import ROOT
from tests.support.options import Net
from tests.support.planted import Plant, write

AT = Addresses("127.0.0.1:8000", "127.0.0.1:8001", "127.0.0.1:8002")
FREE = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
MISTAKE = Plant("", "", "", "", {"first/config.pbtxt": ("dims: [ 4 ]", "dims: [ 0 ]")})


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "200"})


def test_nothing_starts_with_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    MISTAKE.write(tmp_path / "r", is_bad=True)
    result = serve("r")
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith("r has 2 mistakes and was not started. Correct them, or start it")
    assert "first/config.pbtxt:" in result.stdout
    assert "(tensor-dims)" in result.stdout
    assert "2 errors, 0 warnings." in result.stdout


def test_the_commands_that_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = write_counting(tmp_path / "r")
    _print_pipelines(repository, Options(), AT)
    said = capsys.readouterr().out.splitlines()
    assert [line.strip().split("(")[0] for line in said[::2]] == ["count", "count_all", "count_bls", "engine"]
    assert said[3].strip() == "shoal infer --stream --model count_all COUNT=1 DELAY=0.5 FAIL_AT=1 WRONG_AT=1"
    (repository / "manifest.json").write_text('{"ensembles": ["ten_more"]}', encoding="utf-8")
    _print_pipelines(repository, Options(), Addresses("127.0.0.1:8", "127.0.0.1:9", "127.0.0.1:10"))
    said = capsys.readouterr().out.splitlines()
    assert said[-1].strip() == "shoal infer --model ten_more --url 127.0.0.1:9 X=1"


def test_the_paths_of_openai_s_api_that_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.json"
    _print_pipelines(write_apis(tmp_path / "r"), Options(keys=keys), AT)
    said = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line) for line in said if line.strip().startswith("curl ")]
    assert [(command[1], command[5], json.loads(command[-1])["model"]) for command in commands] == [
        (f"http://127.0.0.1:8000{path}", "Authorization: Bearer KEY", name)
        for path, name in (
            ("/v1/embeddings", "embedder"), ("/v1/classify", "labeller"), ("/v1/rerank", "ranker"),
            ("/v1/classify", "reader"),
        )
    ]  # fmt: skip
    assert "    also: POST /v1/score /v2/rerank /rerank" in said


def test_the_commands_for_a_model_that_needs_max_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (ROOT / "models" / "tensorrt_llm_bls" / "config.pbtxt").read_text(encoding="utf-8")
    write(tmp_path / "tensorrt_llm_bls" / "config.pbtxt", config.replace("preprocessing tensorrt_llm", ""))
    _print_pipelines(tmp_path, Options(), AT)
    _, generate, curl = capsys.readouterr().out.splitlines()
    assert generate.strip() == 'shoal generate --model tensorrt_llm_bls "Hello!" --max-tokens 20'
    assert json.loads(shlex.split(curl)[-1])["max_tokens"] == 20


def test_folders_that_are_not_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    MISTAKE.write(tmp_path / "r", is_bad=False)
    (tmp_path / "empty").mkdir()
    for path, message in (
        ("nowhere", "There is no nowhere. Name a file, a folder, or a repository"),
        ("r/first", "r/first is the folder of one model. Name the repository that holds it: "),
        ("empty", "empty holds neither a model repository nor a model's config.json. Make a repository: shoal compose"),
    ):
        assert message in str(serve(path).exception)


def test_nothing_is_left_of_a_model_that_cannot_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.onnx").write_bytes(b"no model")
    error = serve("net.onnx", *FREE).exception
    assert isinstance(error, ArtifactError)
    assert "net.onnx" in error.what
    assert error.fix
    assert not (tmp_path / "build/net").exists()


def test_advice_that_is_an_option_of_another_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script(Net(), tmp_path / "net.pt")
    fix = str(serve("net.pt", *FREE).exception)
    assert "--input" in fix
    assert "It is an option of: shoal add-model net.pt net --project build/net; then type: shoal compose net" in fix
    assert fix.endswith("; shoal serve build/net/repository")


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.onnx").touch()
    (tmp_path / "build").touch()
    error = serve("net.onnx", *FREE).exception
    assert str(error) == "build/net cannot be made: Not a directory. Type the command in a folder where you may write."
    assert "'../out' is not a valid model name" in str(serve("net.onnx", "--name", "../out").exception)


def test_a_port_that_is_taken_is_told_before_a_model_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.onnx").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = serve("net.onnx", *FREE, "--grpc-port", str(port)).exception
    assert str(error).startswith(f"Port {port} cannot be used: Address already in use. Stop what listens there")
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize(
    ("typed", "ports"),
    [
        ("--http-port 8002", "8002 8001 8003"),
        ("--http-port 8001 --metrics-port 8003", "8001 8004 8003"),
        ("--grpc-port 8000", "8003 8000 8002"),
        ("--http-port 9000", "9000 8001 8002"),
    ],
)
def test_a_port_that_was_not_given_moves_out_of_the_way(
    typed: str, ports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.ports._is_free", lambda host, port: True)
    lines = serve("r", *typed.split(), "--print-config").stdout.splitlines()
    assert " ".join(line.partition(" = ")[2] for line in lines if "-port =" in line) == ports


def test_a_file_with_two_components_that_was_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build/comp").mkdir(parents=True)
    one = "class {}(Component):\n    def run(self, batch):\n        return batch\n\n\n"
    code = f"from shoal import Component\n\n\n{one.format('Halves')}{one.format('Shout')}"
    (tmp_path / "comp.py").write_text(code, encoding="utf-8")
    says = "comp.py has 2 components. Its components: comp.py:Halves, comp.py:Shout"
    assert str(serve("comp.py", *FREE).exception) == says
    assert str(serve("comp.py:Shout", *FREE).exception).startswith("build/comp exists, and shoal serve did not make it")


def test_a_maker_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.onnx").touch()
    monkeypatch.setattr("shoal.authoring.project.recipes.find_recipe", lambda *_, **__: os.kill(os.getpid(), SIGKILL))
    assert "was killed. Is there too little memory" in str(serve("net.onnx", *FREE).exception)


def test_a_task_is_for_models(tmp_path: Path) -> None:
    MISTAKE.write(tmp_path / "r", is_bad=False)
    for option in ("--task", "--name"):
        assert f"{option} predict has no effect" in str(serve(str(tmp_path / "r"), option, "predict").exception)


def test_a_printed_config_gives_the_same_options(tmp_path: Path) -> None:
    given = ["--http-port", "0", "--open", "--no-resend", "--expose", "a", "--expose", "b", "--client-share", "0.25"]
    printed = serve("r", "--print-config", *given).stdout
    assert {"http-port = 0", "open = true", "resend = false", 'expose = ["a", "b"]', "client-share = 0.25"} <= {
        *printed.splitlines()
    }
    file = tmp_path / "serve.toml"
    file.write_text(printed, encoding="utf-8")
    assert serve("r", "--print-config", "--config", str(file)).stdout == printed
    changed = serve("r", "--print-config", "--config", str(file), "--http-port", "9", "--resend").stdout
    assert changed == printed.replace("http-port = 0", "http-port = 9").replace("resend = false", "resend = true")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("htpp-port = 1", "has an option 'htpp-port', which shoal serve does not have. Did you mean http-port?"),
        ("config = 'x'", "has an option 'config'"),
        ("http-port = true", "http-port = True is of the wrong kind. Give one value."),
        ("open = 'yes'", "open = 'yes' is of the wrong kind. Give true or false."),
        ("expose = 'a'", "expose = 'a' is of the wrong kind. Give a list of texts."),
        ("[serve]\nhttp-port = 1", "has a table [serve]. Options stand without tables: leave out the line [serve]."),
        ("http-port", "cannot be read: "),
        ("host = '0.0.0.0'", "without a key"),
        ("client-share = 2", "--client-share 2 is out of range"),
        ("cache-mib = 0", "--cache-mib 0 is out of range"),
    ],
)
def test_a_config_that_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(content, encoding="utf-8")
    result = serve("r", "--print-config", "--config", str(file))
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


def test_variables_and_files_that_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(*given: str) -> list[str]:
        return [line for line in serve("gone", *given).stderr.splitlines() if line.startswith("note: ")]

    monkeypatch.chdir(tmp_path)
    assert notes() == []
    monkeypatch.setenv("SHOAL_API_KEY", "secret")
    keyless = "note: SHOAL_API_KEY is the key of clients; this service asks for none: --keys FILE"
    assert notes() == [f"{keyless} (make one: shoal keys new NAME --file FILE)"]
    assert notes("--keys", "keys.json") == notes("--print") == []
    monkeypatch.delenv("SHOAL_API_KEY")
    (tmp_path / "shoal.toml").write_text("http-port = 0", encoding="utf-8")
    assert notes() == ["note: shoal.toml is not read: --config shoal.toml"]
    assert notes("--config", "shoal.toml") == []
    (tmp_path / "shoal.toml").unlink()
    monkeypatch.setenv("SHOAL_HTTP_PORT", "9300")
    assert notes() == ["note: SHOAL_HTTP_PORT has no effect: give --http-port"]
    assert notes("--http-port", "9300") == []
    monkeypatch.setenv("SHOAL_KEYS", "keys.json")
    assert notes() == ["note: SHOAL_HTTP_PORT, SHOAL_KEYS have no effect: give --http-port, --keys"]


def test_one_thing_is_printed() -> None:
    result = serve("r", "--print-config", "--print")
    assert isinstance(result.exception, InputError)
    assert "--print has no effect with --print-config" in str(result.exception)


def test_a_value_of_a_config_that_is_no_number(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("http-port = 'many'", encoding="utf-8")
    result = serve("r", "--print-config", "--config", str(file))
    assert result.exit_code == 2
    assert "Invalid value for '--http-port'" in result.output

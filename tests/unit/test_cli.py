"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal import __version__, cli
from shoal.authoring.project.recipes import find_recipe
from shoal.cli.doctor import examine
from shoal.cli.habits import EXAMPLES, HABITS, OPTIONS
from shoal.cli.usage import Root, Waiting
from shoal.errors import InputError, ShoalError
from shoal.readability import train as training
from shoal.system.machine import Gpu
from tests.support.commands import Shoal
from tests.support.counting import write_counting


def test_help_names_every_command(shoal: Shoal) -> None:
    text = shoal("--help")
    for command in ("train", "compose", "serve", "infer", "quickstart", "doctor", "graph"):
        assert command in text


@pytest.mark.parametrize("listed", Root.own, ids=lambda listed: listed.name)
def test_the_list_of_commands_says_how_their_help_begins(listed: Waiting) -> None:
    assert " ".join(str(listed.make().help).split("\n\n")[0].split()) == listed.help


@pytest.mark.parametrize("word", list(HABITS))
def test_commands_of_other_tools_lead_to_ours(word: str) -> None:
    run = CliRunner().invoke(cli.app, [word, "x"], env={"COLUMNS": "300"})
    assert run.exit_code == 2
    assert f"No such command '{word}'. Type: {HABITS[word]}" in run.output
    context: Any = None
    for part in HABITS[word].split("shoal ")[1:]:
        name = part.split()[0].strip(",;")
        if re.match(r"[a-z]", name):
            command = Root().get_command(context, name)
            options = {option for parameter in command.params for option in parameter.opts}
            assert {*re.findall(r"--[a-z-]+", part)} <= options | {"--help"}


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("new preprocess mine", "shoal new component"),
        ("keys create alice", "shoal keys new NAME"),
        ("keys rm alice", "shoal keys revoke NAME"),
        ("serve r --print compose", "--print, which prints a docker run, or --print dockerfile"),
        (
            "serve r --print=systemd",
            "--print, which prints a docker run, or --print dockerfile. A unit of systemd is in docs/serving.md",
        ),
        (
            "serve r --k8s",
            "--print, which prints a docker run, or --print dockerfile. Probes of Kubernetes are in docs/serving.md",
        ),
        ("serve --print nginx", "Settings of nginx and Caddy are in docs/keys.md"),
        ("serve --print systemd", "A unit of systemd is in docs/serving.md"),
        ("serve --nginx r", "or --print dockerfile. Settings of nginx and Caddy are in docs/keys.md"),
        ("serve r --ssl-certfile c.pem --ssl-keyfile k.pem", "--tls-cert FILE --tls-key FILE"),
        ("status --url=localhost:8002", "shoal status HOST:PORT"),
        ("serve build --max-batch-size 8", "max_batch_size: ROWS in the config.pbtxt of the model"),
        ("serve build --batch-delay 100", "shoal compose ENSEMBLE REPOSITORY --queue-delay MODEL=MICROSECONDS"),
        ("infer a --explain", "--full"),
        ("infer a --grpc-port 18001", "--url HOST:PORT"),
        ("serve --model my-llama", "shoal serve MODEL"),
        ("add-model a.txt --repository r", "--project FOLDER"),
        ("serve r --tp 2", 'engine_args={"tensor_parallel_size": 2}\'; then shoal compose llm_bls REPOSITORY'),
        ("serve r --max-model-len=2048", "--like llm-hf --set context=4096; then shoal compose llm_bls REPOSITORY"),
        ("serve r --dtype fp16", "shoal compose ENSEMBLE REPOSITORY --dtype bf16"),
        ("serve r --quantization int8", "--quantize int8, and serve that"),
        ("serve r --prot 8003", "--http-port PORT"),
        ("bench r --duration 3", "--seconds SECONDS"),
        ("bench r --callers 4", "--concurrency 1,4"),
    ],
)
def test_words_of_other_tools_within_a_command(typed: str, instead: str) -> None:
    run = CliRunner().invoke(cli.app, typed.split(), env={"COLUMNS": "400"})
    assert run.exit_code == 2
    assert re.search(rf"[.?] Type: .*{re.escape(instead)}", run.output)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            "serve r -d",
            "-d. Leave it out: it runs in the foreground. Type & after the command. A unit of systemd is in",
        ),
        ("serve r --daemon", "--daemon. Leave it out: it runs in the foreground"),
        ("serve r --reload", "--reload. Leave it out: end it with Ctrl-C and type the command again"),
        ("serve r --backend x", "--backend. Leave it out: the model's file says it."),
        ("serve r --trust-remote-code", "--trust-remote-code. Leave it out: code in a model's folder is not run"),
        ("infer --input a.csv --sep ;", "--sep. Leave it out: commas, semicolons and tabs are found"),
        ("bench r --delimiter ;", "--delimiter. Leave it out: commas, semicolons and tabs are found"),
        ("serve r --prot 1", "--prot. Did you mean --port? Type: --http-port PORT"),
        ("serve r --htp-port 1", "--htp-port (Possible options: --http-port)"),
        ("serve r --grpc 1", "--grpc (Possible options: --grpc-port)"),
        ("serve r --foo", "--foo  "),
        ("bench r --dtype x", "--dtype  "),
    ],
)
def test_options_that_there_are_not(typed: str, says: str) -> None:
    run = CliRunner().invoke(cli.app, typed.split(), env={"COLUMNS": "300"})
    assert (run.exit_code, f"No such option: {says}" in run.output) == (2, True), run.output


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            ["serve", "a", "b", "c"],
            "b c. Serve one thing at a time. .* shoal compose ENSEMBLE OTHER_ENSEMBLE REPOSITORY; or",
        ),
        (
            ["chat", "smol", "What is it?"],
            r"'What is it\?'. A message is piped: echo 'What is it\?' | shoal chat --model smol",
        ),
        (["chat", "gpu-1:8001", "Hi"], "Hi. A message is piped: echo Hi | shoal chat gpu-1:8001"),
        (["generate", "Once", "upon"], "upon. Quote the text: shoal generate 'Once upon'"),
        (["keys", "new", "a", "b"], "b. For example: shoal keys new team-a"),
        (["status", "a:1", "b"], "b. For example: shoal status --help"),
    ],
)
def test_arguments_that_are_too_many(typed: list[str], says: str) -> None:
    run = CliRunner().invoke(cli.app, typed, env={"COLUMNS": "300"})
    assert run.exit_code == 2
    assert re.search(rf"Too many arguments: {says.replace('|', '[|]')}", run.output), run.output


@pytest.mark.parametrize(
    ("task", "says"),
    [
        *((each, "Did you mean generate?") for each in ("chat", "text-generation", "generat")),
        *((each, "Did you mean embeddings?") for each in ("embed", "feature-extraction")),
        ("text-classification", "Did you mean classify?"),
        ("reranking", "Did you mean rerank?"),
        ("regression", "Did you mean predict?"),
        *((each, f"shoal has no pipeline for {each}. For its answers as tensors, trace") for each in (
            "token-classification", "fill-mask", "summarization", "translation", "image-classification",
            "question-answering",
        )),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", [("serve", "m"), ("add-model", "m", "n")])
def test_names_of_tasks_in_other_tools(command: tuple[str, ...], task: str, says: str) -> None:
    run = CliRunner().invoke(cli.app, [*command, "--task", task], env={"COLUMNS": "500"})
    assert run.exit_code == 2
    assert f"Invalid value for '--task': '{task}' is not one of 'embeddings', " in run.output
    assert f"'generate'. {says}" in run.output


@pytest.mark.parametrize(
    ("page", "section"),
    [
        ("serving.md", "systemd"),
        ("language-models.md", "Other engines"),
        ("serving.md", "Containers"),
        ("keys.md", "Behind nginx or Caddy"),
    ],
)
def test_sections_of_the_documentation_that_are_named(page: str, section: str) -> None:
    assert any(f"docs/{page}, under {section}" in fix for fix in OPTIONS["serve"].values())
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    assert f"\n## {section}\n" in text


def test_advice_names_the_thing_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def advice(*words: str) -> str:
        run = CliRunner().invoke(cli.app, ["serve", *words], env={"COLUMNS": "400"})
        return run.output.partition("Type: ")[2].partition("  ")[0]

    monkeypatch.chdir(tmp_path)
    Path("iris.onnx").touch()
    compose = "shoal compose iris build/iris/repository --project build/iris"
    first = "shoal serve iris.onnx, and stop it; then "
    assert advice("iris.onnx", "--instances", "2") == (
        f"{first}{compose} --instances iris=2; then again: shoal serve iris.onnx"
    )
    record = {"commands": find_recipe("iris.onnx").commands}
    repository = write_counting(Path("build/iris/repository"))
    Path("build/iris/made-from.json").write_text(json.dumps(record), encoding="utf-8")
    assert advice("--workers=3", "iris.onnx") == f"{compose} --instances iris=3; then again: shoal serve iris.onnx"
    assert advice(str(repository), "--queue-delay", "1") == (
        f"{compose} --queue-delay iris=MICROSECONDS; then again: shoal serve {repository}"
    )
    Path("build/iris/made-from.json").unlink()
    (repository / "manifest.json").write_text('{"ensembles": ["ten_more"]}', encoding="utf-8")
    assert advice(str(repository), "--instances", "2") == (
        f"shoal compose ten_more {repository} --instances MODEL=2; then again: shoal serve {repository}"
    )
    steps = "--step iris --step softmax --project build/iris, and what it prints next"
    assert advice("iris.onnx", "--postprocess", "softmax") == f"shoal new pipeline NAME {steps}"
    assert advice("gone.onnx", "--instances", "2").endswith(
        "ENSEMBLE REPOSITORY --instances MODEL=COUNT, and serve that"
    )
    assert advice("owner/net", "--task=generate", "--instances=2").startswith(
        "shoal serve owner/net, and stop it; then "
    )
    assert advice("iris.onnx", "--llm") == "shoal serve FOLDER_WITH_WEIGHTS"
    assert advice("iris.onnx", "--labels", "a,b").startswith("shoal new component topic --like label --set labels=")


def test_a_gpu_that_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, says in (([], "This machine has no GPU: leave it out"), ([Gpu("H200", "", 0)], "Type: shoal compose")):
        monkeypatch.setattr("shoal.system.machine.find_gpus", lambda found=found: found)
        for option in ("--gpu net.pt", "net.pt --device cuda"):
            run = CliRunner().invoke(cli.app, ["serve", *option.split()], env={"COLUMNS": "300"})
            assert run.exit_code == 2
            assert says in run.output


def _with_arguments(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands that need arguments, with their names."""
    for name in getattr(command, "commands", ()):
        yield from _with_arguments(command.get_command(None, name), *path, name)
    if any(each.required for each in command.params):
        yield " ".join(path), command


def test_missing_arguments_show_an_example() -> None:
    needy = dict(_with_arguments(Root()))
    assert needy.keys() == EXAMPLES.keys()
    for name, command in needy.items():
        run = CliRunner().invoke(cli.app, name.split(), env={"COLUMNS": "300"})
        assert run.exit_code == 2
        assert f"For example: shoal {name} {EXAMPLES[name]}" in run.output
        command.make_context(name, EXAMPLES[name].split())  # which is refused if it cannot be parsed


def test_compose_without_a_repository() -> None:
    run = CliRunner().invoke(cli.app, ["compose", "short"], env={"COLUMNS": "300"})
    assert "Missing argument 'repository'. For example: shoal compose" in run.output


@pytest.mark.usefixtures("trained_for_a_moment")
def test_training_options_that_are_none(shoal: Shoal, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no file for column 'passage'"):
        shoal("train", "--text-column", "passage", "--out", tmp_path / "artifacts")


def test_an_interruption_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupted)
    result = CliRunner().invoke(cli.app, ["train", "--out", str(tmp_path / "out")])
    assert result.exit_code == 130
    assert "Interrupted. Nothing was saved." in result.stderr
    (tmp_path / ".out.training").mkdir()
    result = CliRunner().invoke(cli.app, ["train", "--out", str(tmp_path / "out")])
    assert f"Saved in {tmp_path / '.out.training'}: run the same command again to resume." in result.stderr


def test_graph(shoal: Shoal, repository: Path) -> None:
    text = shoal("graph", repository / "ensemble_all")
    assert text.startswith("flowchart TB\n")
    assert 's0 -->|"tree_feats<br/>FP32 [207]"| s2' in text


def test_quickstart_refuses_a_path_before_it_trains(shoal: Shoal, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="Triton does not support the path"):
        shoal("quickstart", "--out", tmp_path / "a b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--preset", "huge"),
        ("train", "--dtype", "fp8"),
        ("bench", ".", "--protocol", "ftp"),
        ("graph", ".", "--format", "gif"),
        ("compose", "x", "y", "--placement", "tpu"),
        ("infer", "a", "--format", "xml"),
        ("env", "build", "--engine", "poetry"),
        ("new", "component", "x", "--category", "middle"),
        ("add-model", "x", "y", "--task", "tail"),
    ],
)
def test_choices_are_checked_and_listed(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[-2]}'" in result.output
    assert f"'{arguments[-1]}' is not one of '" in result.output


def test_help_shows_no_types_of_python() -> None:
    for command in ((), ("infer",), ("env", "build"), ("new", "component")):
        for option in ("-h", "--help"):
            text = CliRunner().invoke(cli.app, [*command, option]).stdout
            assert "Usage: " in text
            assert not re.search(r"<(bool|str|path|list)", text)


@pytest.mark.usefixtures("may_start_processes")
def test_version() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"shoal {__version__}\n"
    done = subprocess.run([sys.executable, "-m", "shoal", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"shoal {__version__}\n"


def test_doctor(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = json.loads(shoal("doctor", "--json"))
    assert {f["check"] for f in findings} >= {"Python", "NumPy", "Triton", "stub", "shared memory", "port 8000"}
    assert "fault" not in {f["level"] for f in findings}
    assert "NumPy" in shoal("doctor")
    monkeypatch.setattr("shoal.cli.doctor.np.__version__", "2.1.0")
    monkeypatch.setattr("shoal.cli.doctor.find_ports", _taken)
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    monkeypatch.setenv("SHOAL_TRITONSERVER", "/nowhere")
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    for words in ("Type: pip install 'numpy<2'", "Port 8000 is taken.", "Name a tritonserver", "256 MiB"):
        assert words in result.stdout


def test_doctor_stops_at_a_repository_that_is_not_there() -> None:
    found = [each for each in examine(Path("nowhere")) if each.check.startswith("nowhere")]
    assert [(each.check, each.level) for each in found] == [("nowhere: repository", "fault")]
    assert found[0].fix == "Make one: shoal compose ENSEMBLE REPOSITORY"


def test_doctor_names_numpy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.doctor.np.__version__", "2.1.0")
    monkeypatch.setattr("shoal.serving.server.runtime.np.__version__", "2.1.0")
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert result.stdout.count("corrupts tensors under NumPy 2.1.0") == 1


def _taken(port: int, *_: int) -> tuple[int, int, int]:
    raise ShoalError(f"Port {port} is taken.")


def test_shared_memory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert "/dev/shm cannot be written" in result.stdout
    assert result.exit_code == 1


# --- as a program ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("may_start_processes")
def test_errors_are_two_lines_and_exit_1() -> None:
    program = [sys.executable, "-c", "from shoal.cli import main; main()"]
    run = subprocess.run([*program, "serve", "/nowhere"], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.splitlines()[-2:] == [
        "error: There is no /nowhere.",
        "  Name a file, a folder, or a repository; for a name on the Hugging Face hub, also say the task:"
        " --task embeddings, --task classify, --task rerank, --task predict, --task generate",
    ]


@pytest.mark.usefixtures("may_start_processes")
def test_an_interrupt_while_the_commands_are_imported() -> None:
    code = """
import os, signal, sys
from shoal.__main__ import main

class Finder:
    def find_spec(name, *_):
        if name == "shoal.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")

"""The service in NVIDIA's container: the options as given, the files that they name, and the Dockerfile."""

from __future__ import annotations

import json
import re
import shlex
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.cli import app
from shoal.errors import SetupError
from shoal.serving.gateway import container as service_container
from shoal.serving.gateway.container import find_source
from tests.support.containers import engine, native, write
from tests.support.planted import MODEL, config


def serve(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["serve", *map(str, arguments)], env={"COLUMNS": "300"})


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(service_container, "find_source", lambda: "/src/shoal")
    return write(tmp_path / "repository", "m", config("m"), f"import yaml\n{MODEL}")


def test_the_service_with_its_options(repository: Path) -> None:
    home = repository.parent
    for name in ("keys.json", "c.pem"):
        (home / name).touch()
    (home / "logs").mkdir()
    given = f"--keys {home}/keys.json --http-port 9000 --no-resend --alias a=m --alias b=m --audit {home}/logs/a.jsonl"
    (home / "serve.toml").write_text("grace = 7.5\nopen = false\n", encoding="utf-8")
    said = serve(repository, "--print", *given.split(), "--config", home / "serve.toml", "--target", "26.06")
    *options, image, _, _, last = shlex.split(said.stdout.replace("\\\n", " "))
    assert image == "nvcr.io/nvidia/tritonserver:26.06-py3"
    assert last == (
        'pip install "/mnt/src/shoal" "PyYAML" && exec shoal serve /models'
        f" --http-port 9000 --grace 7.5 --keys /mnt{home}/keys.json --alias a=m --alias b=m --no-resend"
        f" --audit /mnt{home}/logs/a.jsonl"
    )
    text = " ".join(options)
    for part in (
        "--init --network host --stop-timeout=23",
        f"--mount type=bind,src={home},dst=/mnt{home},readonly",
        f"--mount type=bind,src={home}/logs,dst=/mnt{home}/logs ",
        "--mount type=bind,src=/src/shoal,dst=/mnt/src/shoal,readonly",
        "-e SHOAL_TRITONSERVER=/opt/tritonserver/bin/tritonserver",
        f"-v {repository}:/models:ro",
    ):
        assert part in text
    assert " -p " not in text, "the container is in this machine's network"
    assert said.stderr == ""


@pytest.mark.parametrize("typed", ["{} --print", "--print {}", "--print docker {}", "{} --print=docker"])
def test_the_value_of_print_may_be_left_out(typed: str, repository: Path) -> None:
    assert serve(*typed.format(repository).split()).stdout.startswith("docker run --rm ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "--target 23.08",
            r"shoal needs Python 3\.11 or newer; .*23\.08-py3 has 3\.10\. Use --target 24\.12 or newer; or",
        ),
        ("--keys gone.json", r"--keys gone\.json is not a file"),
        ("--audit gone/a.jsonl", r"--audit gone/a\.jsonl is in a folder that does not exist"),
    ],
)
def test_what_cannot_work_is_not_printed(given: str, message: str, repository: Path) -> None:
    assert re.match(message, str(serve(repository, "--print", *given.split()).exception))


def test_models_without_a_service(tmp_path: Path) -> None:
    made = write(tmp_path / "v", "vllm_model", native("vllm", ""))
    said = serve(made, "--print", "--no-check")
    assert str(said.exception).startswith("vllm_model declares no inputs or no outputs, which shoal's service reads")
    tensors = "".join(
        f'{kind} [ {{ name: "{kind}" data_type: TYPE_FP32 dims: [ 1 ] }} ]\n' for kind in ("input", "output")
    )
    made = write(tmp_path / "r", "tensorrt_llm", engine(tmp_path / "engine", 2) + tensors)
    said = serve(made, "--print", "--no-check", "--target", "25.12")
    assert str(said.exception).startswith("The engine needs 2 processes of Triton, and shoal's service starts one.")
    assert "mpirun" in serve(made, "--print", "--bare", "--no-check", "--target", "25.12").stdout


def test_a_dockerfile(repository: Path) -> None:
    (repository.parent / "keys.json").touch()
    keys = ["--keys", str(repository.parent / "keys.json")]
    text = serve(repository, "--print", "dockerfile", "--host", "0.0.0.0", "--metrics-port", "9002", *keys).stdout
    lines = text.splitlines()
    instructions = [line.split()[0] for line in lines if re.match("[A-Z]", line)]
    assert instructions == "FROM ENV COPY RUN COPY USER EXPOSE HEALTHCHECK CMD".split()
    assert "USER 10001" in lines
    assert "pip install --no-cache-dir --require-hashes -r /opt/shoal/requirements.txt" in text
    assert 'CMD ["curl", "-fsk", "http://127.0.0.1:9002/health/ready"]' in text
    (pinned,) = [line for line in lines if "printf" in line]
    assert "'aiohttp>=" in pinned
    assert "PyYAML" in pinned
    assert "--python-version 3.12 --no-emit-package numpy requirements.in -o requirements.txt" in text
    assert f"-p 9002:9002 --mount type=bind,src={repository.parent},dst=/mnt{repository.parent},readonly IMAGE" in text
    command = json.loads(lines[-1].removeprefix("CMD "))
    assert command[:5] == ["shoal", "serve", "/models", "--metrics-port", "9002"]


@pytest.mark.parametrize("given", ["", "--host 0.0.0.0 --open --http-port 0", "--bare"])
def test_an_image_that_clients_could_not_reach(given: str, repository: Path) -> None:
    said = str(serve(repository, "--print", "dockerfile", *given.split()).exception)
    assert ("--bare has no Dockerfile" if given == "--bare" else "In an image, the service cannot be reached") in said


@pytest.mark.parametrize(
    ("record", "source"),
    [
        ({"url": "file:///tmp/", "dir_info": {}}, "/tmp/"),
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "ab"}},
            "shoal @ git+https://host/x.git@ab",
        ),
        ({"url": "https://host/x.whl", "archive_info": {}}, "shoal @ https://host/x.whl"),
        ({}, "shoal=="),
        ({"url": "file:///no/such%20folder"}, ""),
    ],
)
def test_shoal_is_installed_from_where_it_was(
    record: dict[str, object], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Distribution.read_text
    monkeypatch.setattr(
        "importlib.metadata.PathDistribution.read_text",
        lambda self, name: json.dumps(record) if name == "direct_url.json" else read(self, name),
    )
    if source:
        assert find_source().startswith(source)
        return
    with pytest.raises(SetupError, match=r"/no/such folder, from which shoal was installed, is gone\."):
        find_source()

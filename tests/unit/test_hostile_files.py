"""Files that others wrote: whatever is in a file's place, a command says so, in seconds and with little memory."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.authoring.check.families import check
from shoal.authoring.repository.manifest import check_manifest, read_manifest
from shoal.cli import app
from shoal.errors import ArtifactError, ShoalError
from shoal.kit.component.files import read_json, read_text
from shoal.kit.forests.checkpoints import read_forest
from shoal.kit.generation.weights import find_weights
from shoal.kit.text.tokenizer_files import read_tokenizer
from shoal.kit.text.tokens import read_vocabulary
from shoal.system.files import open_regular
from tests.support import planted_engines, planted_forest, planted_onnx, planted_torchscript, planted_warmups
from tests.support.checkpoints import CONFIG, TOKENIZER
from tests.support.hostile_files import NO_FILES, NO_JSON, limits, put
from tests.support.planted import Plant

Make = Callable[[Path], object]
BOTH = {**NO_FILES, **NO_JSON}


def each(kinds: dict[str, Make]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in kinds.items()])


def run(*arguments: object) -> str:
    """Run a command; it ends with an exit code or an error of shoal's, and prints no control characters."""
    with limits():
        result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, ShoalError | SystemExit):
        raise result.exception
    assert "Traceback" not in result.output
    return f"{result.output}{result.exception or ''}"


# --- repositories ----------------------------------------------------------------------------------------------------

PLACES: dict[str, tuple[dict[str, Any], str]] = {  # edits of a good repository, and the file
    "configuration": ({}, "first/config.pbtxt"),
    "warm-up texts": (planted_warmups.GOOD_TEXT, planted_warmups.TEXT_FILE),
    "engine arguments": (
        {planted_engines.CONFIG: planted_engines.TEXTS, planted_engines.ARGS: planted_engines.dump()},
        planted_engines.ARGS,
    ),
    "forest": (planted_forest.GOOD, planted_forest.FILE),
    "TorchScript": (planted_torchscript.good(), planted_torchscript.FILE),
    "ONNX": (planted_onnx.GOOD, planted_onnx.FILE),
    "code": ({}, "first/1/model.py"),
}
# What a backend may read, and shoal check does not.
UNREAD = {("ONNX", "3 GB"), ("code", "3 GB"), ("warm-up texts", "3 GB")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", NO_FILES)
def test_no_file_of_a_repository(place: str, kind: str, tmp_path: Path) -> None:
    good, file = PLACES[place]
    root = Plant("", "", "", "", {}, good).write(tmp_path / "r", is_bad=False)
    put(root / file, NO_FILES[kind])
    with limits():
        found = {finding.severity for finding in check(root)}
    assert ("error" in found) != ((place, kind) in UNREAD)
    for command in ("graph", "describe", "doctor") if place in ("configuration", "code") else ():
        run(command, root)


@each({**NO_FILES, **NO_JSON})
def test_no_manifest(make: Make, tmp_path: Path) -> None:
    root = Plant("", "", "", "", {}).write(tmp_path / "r", is_bad=False)
    put(root / "manifest.json", make)
    for command in ("check", "graph", "describe", "doctor"):
        run(command, root)
    with limits(), pytest.raises(ArtifactError, match=r"manifest\.json"):
        check_manifest(root)


def test_a_manifest_of_wrong_types(tmp_path: Path) -> None:
    for name, value in {
        "files": [], "launch": 3, "weights": "w", "ensembles": "ab", "gpus": {}, "environments": {"a": 1},
        "load_seconds": "x", "contents": [1],
    }.items():  # fmt: skip
        (tmp_path / "manifest.json").write_text(json.dumps({name: value}), encoding="utf-8")
        with pytest.raises(ArtifactError, match=rf"is damaged: .*`\$\.{name}"):
            read_manifest(tmp_path)


# --- weights ---------------------------------------------------------------------------------------------------------

WEIGHTS = ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json",
           "model.safetensors.index.json")  # fmt: skip


def write_weights(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, value in {"config.json": CONFIG, "tokenizer.json": TOKENIZER}.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return folder


@pytest.mark.parametrize("file", WEIGHTS)
@each({name: make for name, make in BOTH.items() if name not in ("a link to nothing", "a folder")})
def test_no_file_of_weights(file: str, make: Make, tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "w")
    put(folder / file, make)
    error = None
    with limits():
        try:
            find_weights(folder)
        except ArtifactError as found:
            error = found
    assert error is not None or file in ("generation_config.json", "tokenizer_config.json")


@pytest.mark.parametrize("file", ["model.safetensors", "chat_template.jinja", "extra.json", "README.md"])
@pytest.mark.parametrize("kind", ["a pipe", "endless zeros", "a terminal"])
def test_a_device_among_weights(file: str, kind: str, tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "w")
    put(folder / file, NO_FILES[kind])
    with (
        limits(),
        pytest.raises(ArtifactError, match=rf"{file} cannot be read: it is a (pipe|device), not a regular file"),
    ):
        find_weights(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_size", 10**12), ("vocab_size", 10**12), ("num_hidden_layers", 10**6), ("n_positions", 10**12),
     ("num_experts", 10**6), ("max_position_embeddings", 10**400), ("num_attention_heads", 10**9), ("head_dim", 2**40)],
)  # fmt: skip
def test_sizes_beyond_every_model(name: str, value: int, tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "w")
    for config in ({**CONFIG, name: value}, {**CONFIG, "text_config": {**CONFIG, name: value}}):
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with pytest.raises(
            ArtifactError, match=f"has {name} (1,[0-9,]*|a number of more than 30 digits), and at most [0-9,]+ is"
        ):
            find_weights(folder)


def test_sizes_that_a_family_has_by_default(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "w")
    for more in ({"num_experts": 16_384}, {"n_routed_experts": 2**16}, {"max_position_embeddings": 10 * 2**20}):
        (folder / "config.json").write_text(json.dumps({**CONFIG, **more}), encoding="utf-8")
        find_weights(folder)


# --- artifacts -------------------------------------------------------------------------------------------------------


@each(NO_FILES)
@pytest.mark.parametrize("read", [read_json, read_text])
def test_no_artifact(read: Callable[[Path, str], object], make: Make, tmp_path: Path) -> None:
    put(tmp_path / "a.json", make)
    with limits(), pytest.raises(ArtifactError, match=r"a\.json is not a table"):
        read(tmp_path / "a.json", "table")


@each(NO_FILES)
@pytest.mark.parametrize("read", [read_vocabulary, read_forest, read_tokenizer])
def test_no_artifact_of_a_kind(read: Callable[[Path], object], make: Make, tmp_path: Path) -> None:
    put(tmp_path / "a", make)
    with limits(), pytest.raises(ArtifactError, match="a is not a"):
        read(tmp_path / "a")


@each({name: make for name, make in NO_JSON.items() if name != "wrong types"})
def test_no_json(make: Make, tmp_path: Path) -> None:
    put(tmp_path / "a.json", make)
    with limits(), pytest.raises(ArtifactError, match=r"a\.json is not a table: it"):
        read_json(tmp_path / "a.json", "table")


@pytest.mark.parametrize("suffix", [".pt", ".onnx", ".json", ".ubj", ".txt", ".tl", ".skops"])
@each({name: make for name, make in NO_FILES.items() if name not in ("a folder", "a link to nothing")})
def test_no_model_to_add(suffix: str, make: Make, tmp_path: Path) -> None:
    put(tmp_path / f"m{suffix}", make)
    assert f"m{suffix}" in run("add-model", tmp_path / f"m{suffix}", "mine", "--project", tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_what_is_no_file_is_closed(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/null")):
        before = count_open(path)
        with pytest.raises(OSError, match=r"directory|not a regular file"):
            open_regular(path)
        assert count_open(path) == before


def count_open(path: Path) -> int:
    """Count this process's descriptors of ``path``; other threads may open and close other files meanwhile."""
    return sum(str(link.resolve()) == str(path) for link in Path("/proc/self/fd").iterdir())


# --- texts that take long ------------------------------------------------------------------------------------------

LONG = {
    "open braces": "${" * 200_000,
    "backslashes": 'name: "' + "\\" * 200_001 + 'x"',
    "backslashes at the end": "\\" * 200_000,
    "quotes": '"' * 200_001,
    "imports": "import " * 60_000,
    "a type": "type " + "a" * 400_000,
    "spaces": "name:" + " " * 400_000 + "1",
    "lines": "\n" * 400_000,
}


@pytest.mark.parametrize("name", LONG)
def test_time_grows_with_the_size_of_a_text(name: str, tmp_path: Path) -> None:
    root = Plant("", "", "", "", {}).write(tmp_path / "r", is_bad=False)
    for file in ("first/config.pbtxt", "left/1/model.py"):
        with (root / file).open("a", encoding="utf-8") as given:
            given.write(LONG[name])
    assert len(run("check", root, "--target", "embedded")) < 20_000
    (tmp_path / "t.pbtxt").write_text(f'name: "${{a}}"\n{LONG[name]}', encoding="utf-8")
    run("fill", tmp_path / "t.pbtxt", "a:b")
    shown = run("env", "fit", tmp_path / "t.pbtxt")
    assert "not a gzip file" in shown


@pytest.mark.parametrize("command", ["inspect", "fit", "unpack"])
@pytest.mark.parametrize(("kind", "words"), [("a pipe", "a pipe"), ("endless zeros", "a device")])
def test_no_archive(command: str, kind: str, words: str, tmp_path: Path) -> None:
    put(tmp_path / "env.tar.gz", NO_FILES[kind])
    more = [tmp_path / "out"] if command == "unpack" else []
    said = run("env", command, tmp_path / "env.tar.gz", *more)
    assert f"env.tar.gz cannot be read: it is {words}, not a regular file" in said


def test_a_socket_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        with pytest.raises(OSError, match="it is a socket, not a regular file"):
            open_regular(tmp_path / "s")


def test_links_to_what_others_own(tmp_path: Path) -> None:
    root = Plant("", "", "", "", {}).write(tmp_path / "r", is_bad=False)
    (root / "first" / "1" / "processes").symlink_to("/proc")
    (root / "processes").symlink_to("/proc/self")
    assert "outside of" in run("check", root, "--target", "embedded")


@pytest.mark.parametrize(
    ("time", "fault"),
    [("9999-12-31T23:59:59-23:59", "has the time"), ("0001-01-01T00:00:00+23:59", "has the time"),
     ("9999-12-31T23:59:59Z", "9999-12-31"), ("9" * 5000, "has the time")],
)  # fmt: skip
def test_expiries_at_the_end_of_time(time: str, fault: str, tmp_path: Path) -> None:
    secret = {"sha256": "0" * 64, "created": "0001-01-01T00:00:00Z", "expires": time}
    key = {"name": "a", "id": "0123456789ab", "models": ["*"], "may": ["infer"], "secrets": [secret]}
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [key]}), encoding="utf-8")
    path.chmod(0o600)
    assert fault in run("keys", "list", "--file", path)
    run("keys", "rotate", "a", "--file", path)
    run("keys", "list", "--file", path)


@pytest.mark.parametrize("file", ["manifest.json", "keys.json"])
def test_an_integer_of_many_digits(file: str, tmp_path: Path) -> None:
    root = Plant("", "", "", "", {}).write(tmp_path / "r", is_bad=False)
    (root / file).write_text(f'{{"keys": {"9" * 5000}}}', encoding="utf-8")
    (root / file).chmod(0o600)
    said = run("graph", root) if file == "manifest.json" else run("keys", "list", "--file", root / file)
    assert "it has an integer of more than 4,300 digits" in said

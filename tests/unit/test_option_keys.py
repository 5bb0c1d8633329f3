"""Options of ``shoal keys``, and keys that commands send: each value is obeyed.

A line for each option, as in ``test_option_repositories.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.clients.client.client import Client
from shoal.clients.keys import make_key, read_id
from shoal.errors import InputError
from shoal.serving.gateway.callers.key_file import KeyFile
from tests.support.options import PRINTED, Both, Shoal, Table, check_both, rows

TABLE: Table = {
    "keys new --models": Both("keys new one --file k.json --json", "--models a", "--models b", PRINTED),
    "keys new --may": Both("keys new one --file k.json --json", "--may infer", "--may infer,metrics", PRINTED),
    "keys new --expires": Both("keys new one --file k.json --json", "--expires 1d", "--expires 9d", PRINTED),
    "keys new --requests-per-minute": Both(
        "keys new one --file k.json --json", "", "--requests-per-minute 60", PRINTED
    ),
    "keys new --tokens-per-minute": Both(
        "keys new one --file k.json --json", "--tokens-per-minute 60", "--tokens-per-minute 90", PRINTED
    ),
    "keys new --at-once": Both("keys new one --file k.json --json", "--at-once 1", "--at-once 2", PRINTED),
    "keys new --file": Both("keys new one", "--file a.json", "--file b.json"),
    "keys new --json": Both("keys new one --file k.json", "", "--json", PRINTED),
    "keys list --file": Both("keys list", "--file keys.json", "--file none.json", PRINTED),
    "keys list --json": Both("keys list --file keys.json", "", "--json", PRINTED),
    "keys revoke --file": Both("keys revoke team", "--file keys.json", "--file none.json", PRINTED),
    "keys revoke --json": Both("keys revoke team --file keys.json", "", "--json", PRINTED),
    "keys rotate --overlap": Both("keys rotate team --file keys.json --json", "--overlap 0s", "--overlap 1h", PRINTED),
    "keys rotate --file": Both("keys rotate team", "--file keys.json", "--file none.json", PRINTED),
    "keys rotate --json": Both("keys rotate team --file keys.json", "", "--json", PRINTED),
}
REFUSED = {
    "infer --local --api-key-file k text": "--api-key-file has no effect with --local",
    "infer --curl --api-key-file k X=1": "--api-key-file has no effect on the command that --curl prints.",
    "generate --local --api-key-file k text": "--api-key-file has no effect with --local",
    "infer --local --ca-cert k text": "--ca-cert has no effect with --local",
    "generate --local --client-cert k text": "--client-cert has no effect with --local",
    "bench r --ca-cert k": "--ca-cert has no effect with repositories, whose servers want no key.",
    "bench r --api-key-file k": "--api-key-file has no effect with repositories, whose servers want no key.",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_key_file_without_effect_is_refused(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("k").write_text(make_key("0" * 12))
    assert REFUSED[line] in str(CliRunner().invoke(app, line.split()).exception)


@pytest.mark.parametrize("command", ["infer hello --url 127.0.0.1:1", "generate hello --url 127.0.0.1:1",
    "chat 127.0.0.1:1",
    "copies here", "status", "tokens 1,2 --url 127.0.0.1:1", "bench --url 127.0.0.1:1"])  # fmt: skip
def test_commands_read_a_key_from_a_file_or_the_environment(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()

    def refuse(*_: Any, api_key: str = "", **__: Any) -> Any:
        seen.append(api_key)
        raise InputError("seen")

    monkeypatch.setattr(Client, "__init__", refuse)
    for name in ("copies.read_metrics", "operators.read_states"):
        monkeypatch.setattr(f"shoal.clients.client.{name}", lambda _, api_key, *__: refuse(api_key=api_key))
    key, other = make_key("0" * 12), make_key("1" * 12)
    (tmp_path / "key").write_text(f"{key}\n")
    for options, environment in ((["--api-key-file", str(tmp_path / "key")], {"SHOAL_API_KEY": other}), ([], {})):
        CliRunner().invoke(app, [*command.split(), *options], env=environment)
    CliRunner().invoke(app, command.split(), env={"SHOAL_API_KEY": other})
    assert seen == [key, "", other]
    done = CliRunner().invoke(app, [*command.split(), "--api-key-file", str(tmp_path / "none")])
    assert "none cannot be read: No such file or directory" in str(done.exception)


@pytest.mark.parametrize("command", ["infer hello --url grpcs://127.0.0.1:1", "generate hello --url grpcs://127.0.0.1:1",
    "chat grpcs://127.0.0.1:1",
    "copies here --url https://127.0.0.1:1", "status https://127.0.0.1:1", "tokens 1,2 --url grpcs://127.0.0.1:1",
    "bench --url grpcs://127.0.0.1:1"])  # fmt: skip
@pytest.mark.parametrize("option", ["--ca-cert", "--client-cert"])
def test_commands_read_certificates(command: str, option: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*command.split(), option, str(tmp_path / "none")])
    assert str(done.exception).startswith(f"{tmp_path}/none cannot be used for TLS: No such file or directory.")
    plain = command.replace("grpcs://", "").replace("https://", "").split()
    done = CliRunner().invoke(app, [*plain, option, str(tmp_path / "none")])
    assert str(done.exception).startswith(f"{option[2:].replace('-', '_')} has no effect without TLS. Give the address")


@pytest.fixture(scope="module")
def shoal(tmp_path_factory: pytest.TempPathFactory) -> Shoal:
    return Shoal(tmp_path_factory.mktemp("world"), tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("entry", rows(TABLE))
def test_two_values_give_two_results(entry: Both, shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    world = shoal.world / "keys.json"
    world.unlink(missing_ok=True)
    KeyFile(world).new("team")
    shoal.seen.clear()
    runs: list[dict[str, str]] = []

    def once(line: str) -> dict[str, str]:
        world.unlink(missing_ok=True)
        KeyFile(world).new("team")
        runs.append(shoal.run(line))
        return {**runs[-1], "world": world.read_text() if "--overlap" in line else ""}

    check_both(once, entry._replace(see="*") if "--overlap" in entry.one else entry)


def test_the_commands_show_a_key_once(tmp_path: Path) -> None:
    def run_(line: str) -> Any:
        return CliRunner().invoke(app, [*line.split(), "--file", str(tmp_path / "k")])

    made = run_("keys new team").stdout.split()[0]
    rotated = json.loads(run_("keys rotate team --json").stdout)
    assert read_id(made) == read_id(rotated["key"]) == rotated["id"]
    listed = run_("keys list --json").output
    assert [(row["name"], row["valid"]) for row in json.loads(listed)] == [("team", 2)]
    for text in (listed, run_("keys list").output, (tmp_path / "k").read_text()):
        assert made.split("_")[2] not in text
    assert "none" in run_("keys list").output
    run_("keys new slow --requests-per-minute 60 --at-once 2")
    assert json.loads(run_("keys list --json").output)[1]["limits"] == {"requests_per_minute": 60, "at_once": 2}
    assert "2 at once" in run_("keys list").output
    run_("keys revoke slow")
    assert run_("keys revoke team").output == "revoked: team\n"
    assert run_("keys list").output == "There are no keys.\n"

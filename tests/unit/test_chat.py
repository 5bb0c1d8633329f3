"""Conversations of ``shoal chat``: what is kept of them, and how they end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shoal.cli import app, chat
from shoal.clients.llm.dialects import find_dialect
from shoal.errors import InputError
from shoal.kit.component.spec import TensorSpec
from shoal.kit.generation.pieces import Piece


class Echo:
    """A model that answers with the number of messages and the last of them; it fails, or is stopped, if told so."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, str]]] = []

    def stream(self, messages: list[dict[str, str]], **settings: Any) -> Iterator[Piece]:
        """Yield two pieces."""
        self.seen.append(messages)
        said = messages[-1]["content"]
        if said == "fail":
            raise InputError("No.")
        yield Piece(f"{len(messages)} ", "", 1, 1)
        if said == "stop":
            raise KeyboardInterrupt
        yield Piece(f"{said} {settings}", "stop", 1, 2)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Echo:
    echo = Echo()
    monkeypatch.setattr(chat, "open_llm", lambda *_: nullcontext(echo))
    return echo


def say(*lines: str, options: tuple[str, ...] = ()) -> Result:
    return CliRunner().invoke(app, ["chat", *options], input="".join(f"{line}\n" for line in lines))


def test_the_conversation_goes_on(model: Echo) -> None:
    done = say("a", "", "b", "/system Be brief.", "c", "/clear", "d", "/exit", "e", options=("--seed", "1"))
    settings = "{'seed': 1}"
    assert done.stdout.splitlines() == [f"{n} {x} {settings}" for n, x in ((1, "a"), (3, "b"), (6, "c"), (2, "d"))]
    assert model.seen[1][1] == {"role": "assistant", "content": f"1 a {settings}"}
    assert model.seen[2][0] == {"role": "system", "content": "Be brief."}


def test_a_script_ends_at_the_first_failure(model: Echo) -> None:
    assert str(say("fail", "a").exception) == "No."
    assert str(say("/help").exception).startswith("Unknown command /help. Known: /system TEXT, /clear")
    assert say("stop", "a").exit_code == 130
    assert str(say(" ").exception).startswith("There is no message.")
    assert len(model.seen) == 2


def test_a_terminal_goes_on_after_failures_and_stopped_answers(
    model: Echo, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["fail", "stop", "a", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    app(["chat"], standalone_mode=False)
    seen = capfd.readouterr()
    assert seen.out.splitlines() == ["1 ", "3 a {}"]
    assert "error: No." in seen.err
    assert model.seen[-1][1] == {"role": "assistant", "content": "1 "}


def test_a_model_that_takes_no_prompt() -> None:
    with pytest.raises(InputError, match=r"is not a language model: its inputs are TEXT\. Ask it with shoal infer"):
        find_dialect([TensorSpec("TEXT", "TYPE_STRING", (1,))])


def test_generate_and_its_former_option() -> None:
    done = CliRunner().invoke(app, ["generate", "--chat", "a"])
    assert (done.exit_code, "Type: shoal chat" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("text", "piped", "begins"),
    [
        ("hello", "hello", "Of a model: shoal chat --model hello. Messages are typed"),
        ("What is this?", "'What is this?'", "Messages are typed"),
    ],
)
def test_a_message_in_place_of_the_address(text: str, piped: str, begins: str) -> None:
    with pytest.raises(InputError, match=r"is not HOST:PORT, the address of a server\.") as error:
        app(["chat", text], standalone_mode=False)
    assert error.value.fix.startswith(begins)
    assert error.value.fix.endswith(f"or piped: echo {piped} | shoal chat")


def test_the_place_of_the_address_is_named() -> None:
    for command in ("chat", "status"):
        done = CliRunner().invoke(app, [command, "--url", "127.0.0.1:8001"])
        assert (done.exit_code, f"Type: shoal {command} HOST:PORT" in done.output) == (2, True), done.output


def test_no_server_answers() -> None:
    for asked in ([], ["127.0.0.1:9"]):
        done = CliRunner().invoke(app, ["chat", *asked], input="Hello!")
        assert str(done.exception).endswith("or give the address of one: shoal chat HOST:PORT")


def test_settings_that_a_model_lacks_are_named() -> None:
    llamav2 = find_dialect([TensorSpec("prompt", "TYPE_STRING", (1,))])
    settings = {"chat_template_kwargs": {"tools": [], "tool_choice": "auto"}}
    with pytest.raises(InputError, match=r"has no setting chat_template_kwargs \(tools, tool_choice\)\. Leave it out"):
        llamav2.to_inputs("A", settings, is_streaming=False)
    chat = [{"role": "user", "content": "A"}]
    assert llamav2.to_inputs(chat, {}, is_streaming=False) == {"prompt": ["A"]}
    with pytest.raises(InputError, match=r"takes one message: it has no input history\. Send it alone"):
        llamav2.to_inputs([{"role": "system", "content": "B"}, *chat], {}, is_streaming=False)

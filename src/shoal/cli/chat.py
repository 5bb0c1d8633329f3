"""``shoal chat``: a conversation with a language model."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.console import ERR, plain
from shoal.cli.llm import LlmAsked, check_place, find_settings, open_llm, print_answer
from shoal.cli.records import takes_record
from shoal.errors import InputError, ServerError, ShoalError

if TYPE_CHECKING:
    from shoal.clients.llm.client import Llm
    from shoal.kit.generation.pieces import Piece

_COMMANDS = "/system TEXT, /clear (forget the conversation), /exit"


@dataclass(frozen=True)
class ChatAsked(LlmAsked):
    """Options of one ``shoal chat``, as they were given."""

    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="The server, as HOST:PORT. Default: 127.0.0.1, at the usual port.")
    ] = ""
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system message.")] = ""


@takes_record(ChatAsked)
def chat(context: typer.Context, asked: ChatAsked) -> None:
    """Chat with a language model, in its chat template. Each line is a message, or /system TEXT, /clear, /exit.

    Ctrl-C stops an answer. At the prompt, Ctrl-C or an empty line ends the conversation. Without a terminal, messages
    are the lines of standard input.
    """
    check_place(context, asked, "url")
    if asked.url and (" " in asked.url or ":" not in asked.url):
        fix = f"Messages are typed at its prompt, or piped: echo {shlex.quote(asked.url)} | shoal chat"
        fix = fix if " " in asked.url else f"Of a model: shoal chat --model {shlex.quote(asked.url)}. {fix}"
        raise InputError(f"{asked.url!r} is not HOST:PORT, the address of a server.", fix)
    settings = find_settings(asked)
    is_terminal, has_message = sys.stdin is not None and sys.stdin.isatty(), False
    with _naming_address(), open_llm(asked, asked.url) as llm:
        conversation = _Conversation(llm, settings, asked.system, as_json=asked.as_json)
        for line in _read_terminal() if is_terminal else _read_lines():
            has_message = True
            if line == "/exit":
                break
            try:
                with _naming_address():
                    conversation.take(line, can_stop=is_terminal)
            except ShoalError as error:
                if not is_terminal:
                    raise
                ERR.print(f"[red]error:[/] {plain(str(error))}", soft_wrap=True)
    if not (has_message or is_terminal):
        raise InputError("There is no message.", 'Give one: echo "Hello!" | shoal chat')


@contextlib.contextmanager
def _naming_address() -> Iterator[None]:
    """Replace the option ``--url`` in the advice of a client's error: here, the address is an argument."""
    try:
        yield
    except ServerError as error:
        raise type(error)(error.what, error.fix.replace("--url HOST:PORT", "shoal chat HOST:PORT")) from None


class _Conversation:
    """The messages so far. A message that fails is not kept; an answer that is stopped is kept as far as it came."""

    def __init__(self, llm: Llm, settings: dict[str, Any], system: str, *, as_json: bool) -> None:
        self._llm, self._settings, self._system, self._as_json = llm, settings, system, as_json
        self._messages: list[dict[str, str]] = []

    def take(self, line: str, *, can_stop: bool) -> None:
        """Obey a command, or answer a message; if it ``can_stop``, Ctrl-C ends the answer alone.

        Raises:
            ShoalError: the command is unknown, or the message has no answer.
        """
        command, _, rest = line.partition(" ")
        if command == "/system":
            self._system = rest.strip()
        elif command == "/clear":
            self._messages.clear()
        elif command.startswith("/"):
            raise InputError(f"Unknown command {command}.", f"Known: {_COMMANDS}.")
        else:
            self._answer(line, can_stop=can_stop)

    def _answer(self, text: str, *, can_stop: bool) -> None:
        from shoal.kit.generation.pieces import join_pieces

        messages = [*self._messages, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        pieces: list[Piece] = []
        try:
            with closing(self._llm.stream([*system, *messages], **self._settings)) as answers:
                for piece in answers:
                    pieces.append(piece)
                    if not self._as_json:
                        typer.echo(piece.text, nl=False)
        except KeyboardInterrupt:
            if not can_stop:
                raise typer.Exit(130) from None
        finally:
            if pieces and not self._as_json:
                typer.echo()
        if pieces:
            answer = join_pieces(pieces)
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]
            if self._as_json:
                print_answer(answer, as_json=True)


def _read_terminal() -> Iterator[str]:
    """Yield the lines that are typed, up to an empty one, Ctrl-C or Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then has a history
    ERR.print(f"Commands: {_COMMANDS}. Ctrl-C stops an answer.", markup=False, soft_wrap=True)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while line := input("> ").strip():
            yield line


def _read_lines() -> Iterator[str]:
    for line in sys.stdin or ():
        if text := line.strip():
            yield text

"""``shoal generate`` and ``shoal tokens``: ask language models, in texts or in token ids."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from shoal.cli.console import OUT, ApiKey, CaCert, ClientCert, Json, Protocol, Url, print_json, refuse_ignored
from shoal.cli.records import takes_record
from shoal.errors import InputError, suggest
from shoal.kit.generation.sampling import SETTINGS, VARIABLES, read_variables

if TYPE_CHECKING:
    from shoal.clients.client.tls import Access
    from shoal.clients.llm.client import Llm
    from shoal.kit.generation.pieces import Piece

_ROWS = {row.name: row for row in SETTINGS}
_OPTIONS = ("max_tokens", "temperature", "top_p", "seed", "stop_words")
_OTHERS = ", ".join([*(name for name in _ROWS if name not in _OPTIONS), f"{VARIABLES} (of chats)"])


@dataclass(frozen=True)
class LlmAsked:
    """Options of a command that asks a language model, as they were given."""

    max_tokens: Annotated[int | None, typer.Option(help=_ROWS["max_tokens"].says)] = None
    temperature: Annotated[float | None, typer.Option(help=_ROWS["temperature"].says)] = None
    top_p: Annotated[float | None, typer.Option(help=_ROWS["top_p"].says)] = None
    seed: Annotated[int | None, typer.Option(help=_ROWS["seed"].says)] = None
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the text before this; may be repeated.")
    ] = None
    others: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help=f"Another setting; may be repeated. Names: {_OTHERS}."),
    ] = None
    api_key: ApiKey = ""
    ca_cert: CaCert = ""
    client_cert: ClientCert = ""
    protocol: Annotated[Protocol, typer.Option(help="How to ask the server.")] = "grpc"
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time-out of the whole answer; if it is streamed, of each piece.")
    ] = 120.0
    model: Annotated[str, typer.Option(metavar="NAME", help="The model. Default: the only pipeline.")] = ""
    is_local: Annotated[bool, typer.Option("--local", help="Run the repository in this process, without a server.")] = (
        False
    )
    repository: Annotated[Path, typer.Option(help="For --local.")] = Path("build/repository")
    as_json: Json = False


@dataclass(frozen=True)
class GenerateAsked(LlmAsked):
    """Options of one ``shoal generate``, as they were given."""

    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; read from standard input if left out.")
    ] = None
    is_stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False
    url: Url = ""


@takes_record(GenerateAsked)
def generate(context: typer.Context, asked: GenerateAsked) -> None:
    """Continue a text. For chats: shoal chat."""
    from shoal.kit.generation.pieces import join_pieces

    check_place(context, asked, "--url")
    prompt, settings = _read_prompt(asked.prompt), find_settings(asked)
    if VARIABLES in settings:
        raise InputError(f"{VARIABLES} has no effect on a text.", "It is for chats: shoal chat")
    with open_llm(asked, asked.url) as llm:
        if not asked.is_stream:
            print_answer(llm.generate(prompt, **settings), as_json=asked.as_json)
            return
        pieces = []
        try:
            with closing(llm.stream(prompt, **settings)) as answers:
                for piece in answers:
                    pieces.append(piece)
                    if not asked.as_json:
                        typer.echo(piece.text, nl=False)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        finally:
            if pieces and not asked.as_json:
                typer.echo()
        if asked.as_json:
            print_answer(join_pieces(pieces), as_json=True)


def check_place(context: typer.Context, asked: LlmAsked, url: str) -> None:
    """Refuse options of a server without one, and of a repository with one; ``url`` is the name of the address."""
    if asked.is_local:
        server = f"{url} --api-key-file --ca-cert --client-cert --protocol --timeout"
        refuse_ignored(context, server, "with --local, which asks no server")
    else:
        refuse_ignored(context, "--repository", "without --local")


@contextmanager
def open_llm(asked: LlmAsked, url: str) -> Iterator[Llm]:
    """Open the language model, on a server or in this process."""
    from shoal.clients.client.client import Client
    from shoal.clients.llm.client import Llm
    from shoal.clients.local import load

    if asked.is_local:
        with load(asked.repository / asked.model if asked.model else asked.repository) as pipeline:
            yield Llm(pipeline)
        return
    access: Access = {"api_key": asked.api_key, "ca_cert": asked.ca_cert, "client_cert": asked.client_cert}
    with Client(url, protocol=asked.protocol, timeout=asked.timeout, **access) as client:
        yield Llm(client, asked.model)


def find_settings(asked: LlmAsked) -> dict[str, Any]:
    """Return the settings given by options and by ``--set``."""
    given = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "seed": asked.seed,
        "stop_words": asked.stop,
    }
    given = {name: value for name, value in given.items() if value is not None}
    settings = _read_settings(asked.others)
    if twice := sorted(settings.keys() & given.keys()):
        raise InputError(f"{twice[0]} is given twice, as an option and by --set.", "Give it once.")
    if settings.get("top_logprobs") and not asked.as_json:
        raise InputError("--set top_logprobs changes nothing in the text.", "Add --json, which shows what it gives.")
    return settings | given


def tokens(
    query: Annotated[str, typer.Argument(help="A text, which --tokenizer turns into token ids; or token ids: 1,2,3")],
    output_length: Annotated[int, typer.Option(help="Most new tokens.")] = 30,
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="For texts: the folder with the model's tokenizer.json, or vocab.json and merges.txt; or its name on "
            "the Hugging Face hub.",
        ),
    ] = "",
    url: Url = "",
    api_key: ApiKey = "",
    ca_cert: CaCert = "",
    client_cert: ClientCert = "",
    protocol: Annotated[Protocol, typer.Option(help="How to ask the server.")] = "grpc",
    model: Annotated[str, typer.Option(metavar="NAME", help="The engine.")] = "llm-hf",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time-out of each answer.")] = 120.0,
    as_json: Json = False,
) -> None:
    """Send token ids directly to an engine, the model of a pipeline that generates tokens.

    The tensors of the request get the dtypes that the server declares.
    """
    from shoal.clients.client.client import Client
    from shoal.clients.llm.tokens import ask, open_tokenizer, read_ids

    own = open_tokenizer(tokenizer) if tokenizer else None
    ids = read_ids(query, own)
    access: Access = {"api_key": api_key, "ca_cert": ca_cert, "client_cert": client_cert}
    with Client(url, protocol=protocol, timeout=timeout, **access) as client:
        beams = ask(client, model, ids, output_length)
    texts = [str(own.decode([*ids, *beam])) if own else "" for beam in beams]
    if as_json:
        more: dict[str, Any] = {"beams": beams} if len(beams) > 1 else {}
        print_json({"input_ids": ids, "output_ids": beams[0], **({"text": texts[0]} if own else {}), **more})
        return
    for beam, text in zip(beams, texts, strict=True):
        typer.echo(text if own else ",".join(map(str, beam)))


def _read_prompt(prompt: str | None) -> str:
    is_there = prompt is not None or not (sys.stdin is None or sys.stdin.isatty())
    text = "" if not is_there else sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        what = "The prompt is empty." if is_there else "There is no prompt."
        raise InputError(what, 'Give one: shoal generate "Once upon a time"')
    return text


def _read_settings(given: list[str] | None) -> dict[str, Any]:
    """Read the values of ``--set``: numbers, true or false, JSON objects, and lists of texts of the same name."""
    settings: dict[str, Any] = {}
    for text in given or ():
        name, _, value = text.partition("=")
        row = _ROWS.get(name)
        try:
            if row is None and name != VARIABLES:
                raise InputError(f"Unknown setting {name!r}.", suggest(name, [*_ROWS, VARIABLES]))
            if row is not None and row.is_list:
                settings.setdefault(name, []).append(value)
            elif name in settings:
                raise InputError(f"--set {name}=... is given twice.", "Give it once.")
            elif row is None:
                settings[name] = read_variables(value)
            elif row.dtype == "STRING":
                settings[name] = value
            elif row.dtype == "BOOL":
                if value not in ("true", "false"):
                    raise InputError(f"--set {text!r} is neither true nor false.", f"For example: --set {name}=true")
                settings[name] = value == "true"
            else:
                settings[name] = float(value) if row.dtype.startswith("FP") else int(value)
        except ValueError:
            raise InputError(f"--set {text!r} has no number.", "For example: --set top_k=20") from None
    return settings


def print_answer(answer: Piece, *, as_json: bool) -> None:
    """Print a whole answer: its text, or all that is known of it."""
    if as_json:
        print_json(answer._asdict())
    else:
        OUT.print(Text(answer.text), soft_wrap=True)

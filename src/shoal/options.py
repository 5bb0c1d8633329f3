"""Options of several commands, and the parser of options that give pairs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from shoal.errors import InputError

Data = Annotated[
    Path | None,
    typer.Option(
        help="Labelled texts: the CLEAR corpus, CommonLit's train.csv, any .csv, .jsonl, .parquet or .xlsx; "
        "`clear` downloads the corpus. Default: the corpus in SHOAL_DATA_DIR, or shoal's own "
        "passages (with --preset full: the downloaded corpus)."
    ),
]
TextColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="The column of the texts, where it goes by another name.")
]
TargetColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="The column of the targets, where it goes by another name.")
]
Encoder = Annotated[
    str, typer.Option(metavar="ENCODER", help="A BERT-family encoder: a folder, or a Hugging Face name.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Placement = Annotated[
    Literal["cpu", "hybrid", "gpu"],
    typer.Option(help="Where the models run; hybrid: text and scores with the client, the models on the GPU."),
]
Protocol: TypeAlias = Literal["grpc", "http"]
Url = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="The server. Default: 127.0.0.1, at the protocol's usual port.")
]
Target = Annotated[
    str, typer.Option(metavar="RELEASE", help="embedded, or a release of NVIDIA's container such as 26.06.")
]
Gpu = Annotated[
    str, typer.Option(metavar="NUMBERS", help="Pin the models to these: 0,1 (or none, for hybrid on the host).")
]
Concurrency = Annotated[int, typer.Option(help="Requests in flight that memory is sized for.")]


def parse_pairs(option: str, given: Iterable[str] | None, *, form: str = "NAME=VALUE", example: str) -> dict[str, str]:
    """Parse pairs such as ``NAME=VALUE`` that are given for ``option``, each name once.

    Raises:
        InputError: a pair has no name or no ``=``, or a name is given twice.
    """
    pairs: dict[str, str] = {}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not (name and sign):
            raise InputError(f"{option} {text!r} is not {form}.", f"For example: {option} {example}")
        if name in pairs:
            raise InputError(f"{option} {name}=... is given twice.", "Give it once.")
        pairs[name] = value
    return pairs

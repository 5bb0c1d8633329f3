"""Command-line options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

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
Target = Annotated[
    str, typer.Option(metavar="RELEASE", help="embedded, or a release of NVIDIA's container such as 26.06.")
]
Gpu = Annotated[
    str, typer.Option(metavar="NUMBERS", help="Pin the models to these: 0,1 (or none, for hybrid on the host).")
]
Concurrency = Annotated[int, typer.Option(help="Requests in flight that memory is sized for.")]

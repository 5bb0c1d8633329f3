"""The command line: it parses, calls the library, and prints."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

import shoal
from shoal.cli.console import ERR, plain
from shoal.cli.usage import Root, Waiting
from shoal.errors import ShoalError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk, of a quota, and of a limit of the process

app = typer.Typer(
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"shoal {shoal.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Build, check, serve and query pipelines of models for NVIDIA Triton Inference Server."""
    del version


# Commands by their names: the function or the app that each is made of, and how its help begins. The list of commands
# shows that, and imports none.
_PANELS = {
    "Serve and ask: start a server, and send requests to it.": {
        "serve": (
            "shoal.cli.serving:serve",
            "Serve a repository, or one made of your model, until Ctrl-C. Triton is supervised and restarted.",
        ),
        "infer": (
            "shoal.cli.infer:infer",
            "Send values from arguments, standard input or a file to a model; run the same command again to resume.",
        ),
        "generate": ("shoal.cli.llm:generate", "Continue a text. For chats: shoal chat."),
        "chat": (
            "shoal.cli.chat:chat",
            "Chat with a language model, in its chat template. Each line is a message, or /system TEXT, /clear, /exit.",
        ),
        "tokens": (
            "shoal.cli.llm:tokens",
            "Send token ids directly to an engine, the model of a pipeline that generates tokens.",
        ),
        "status": (
            "shoal.cli.status:status",
            "Show the models of a running `shoal serve`: ready, or why not, and their requests in flight.",
        ),
        "copies": (
            "shoal.cli.status:copies",
            "Show what a running server's components copied between host and device, by tensor.",
        ),
        "shards": ("shoal.cli.shards:app", "Look at a folder of `shoal infer`: status, verify, merge."),
    },
    "Author: make, check and draw repositories, without a server.": {
        "compose": (
            "shoal.cli.repository:compose",
            "Write a model repository: model folders, artifacts, placement, execution environments.",
        ),
        "plan": (
            "shoal.cli.repository:plan",
            "Show on which devices the models run, how much memory this takes, and Triton's launch flags for it.",
        ),
        "fill": (
            "shoal.cli.repository:fill",
            "Fill a template as TensorRT-LLM's fill_template.py does, but refuse mistakes.",
        ),
        "check": ("shoal.cli.check:check", "Find the mistakes in model repositories before Triton does."),
        "graph": (
            "shoal.cli.graph:graph",
            "Draw an ensemble: its steps and their devices, and its tensors with dtype and shape.",
        ),
        "describe": (
            "shoal.cli.graph:describe",
            "Print an ensemble as tables: its steps, what each reads and writes, and the path of each tensor.",
        ),
    },
    "Models: take in those that you have, and write new ones.": {
        "add-model": (
            "shoal.cli.project:add_model",
            "Add an existing model to your project as a model folder: PyTorch, ONNX, forests, encoders, decoders.",
        ),
        "new": ("shoal.cli.project:app", "Write a working, tested skeleton into your own project."),
    },
    "Measure: find out what is fast and exact on this machine.": {
        "bench": (
            "shoal.cli.bench:bench",
            "Measure models on a real server, several in turns: latency, throughput, the time of each step; or tokens.",
        ),
        "tune": (
            "shoal.cli.tune:tune",
            "Measure FP32, BF16 and INT8 on this machine, and choose; `shoal compose --tuned` takes the choice.",
        ),
    },
    "Keys and environments: what a service needs around it.": {
        "doctor": (
            "shoal.cli.doctor:doctor",
            "Check whether this machine can run Triton and serve a repository; exit code 1 if it cannot.",
        ),
        "keys": ("shoal.cli.keys:app", "Make, list, revoke and rotate keys of a service's clients."),
        "env": ("shoal.cli.environment:app", "Execution environments of Python models: build, inspect, fit, unpack."),
    },
}
Root.own = [Waiting(name, *each, panel) for panel, found in _PANELS.items() for name, each in found.items()]


def main() -> None:
    """Run the command line; print a ``ShoalError`` as its message and its fix, with exit code 1."""
    # Before torch is imported: OpenMP's threads that wait actively slow down everything else on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Before grpc is imported: it writes a line for each connection that was closed, and each failed handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        app(standalone_mode=True)
    except ShoalError as error:
        ERR.print(f"[red]error:[/] {plain(error.what)}", soft_wrap=True)
        if error.fix:
            ERR.print(f"  {plain(error.fix)}", soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        if error.errno not in _FULL and "usable temporary directory" not in str(error.strerror):
            raise
        place = error.filename or "The folder for temporary files"
        ERR.print(f"[red]error:[/] {plain(str(place))} cannot be written: {error.strerror}.", soft_wrap=True)
        ERR.print("  Make room there, or name another folder for temporary files in TMPDIR.")
        sys.exit(1)

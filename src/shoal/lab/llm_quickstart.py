"""First steps with a language model: make a tiny one, compose a repository, serve it, chat. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

from shoal.authoring.composition.compose import compose
from shoal.clients.client.client import Client
from shoal.clients.llm.client import Llm
from shoal.errors import SetupError, needs
from shoal.kit.generation.pieces import Piece
from shoal.serving.server.launch import serve
from shoal.serving.server.runtime import find_runtime
from shoal.system.paths import check_path_supported
from shoal.system.progress import OnProgress

MODEL = "llm_bls"  # a stop word, or a client that leaves, stops its engine at once
QUESTIONS = ("What do fish do?", "Was ist das Meer?")
_STEPS = 150  # of training: the model then answers these questions


def run(
    out: Path, *, questions: Sequence[str] = QUESTIONS, on_progress: OnProgress = lambda stage, done, total: None
) -> Generator[tuple[str, Piece]]:
    """Write the folders ``weights`` and ``repository`` into ``out``, serve the repository, and ask the questions.

    Yields each piece of an answer, with its question.

    Raises:
        SetupError: this machine lacks something.
        ServerError: Triton did not start.
    """
    check_path_supported(out.resolve())  # report what would stop the server before the model is made
    find_runtime()
    with needs("llm"):
        from shoal.lab.tiny_llm import make_tiny

        on_progress("make a tiny model", 0, 1)
        try:
            weights = make_tiny(out / "weights", steps=_STEPS)
        except OSError as error:
            raise SetupError(f"{out} cannot be written: {error.strerror}.", "Name another folder: --out DIR") from None
    on_progress("make a tiny model", 1, 1)
    on_progress("compose the repository", 0, 1)
    repository = compose(MODEL, out / "repository", weights=weights, is_together=True)
    on_progress("compose the repository", 1, 1)
    on_progress("start Triton", 0, 1)
    with serve(repository) as server, Client(server.grpc_url) as client:
        on_progress("start Triton", 1, 1)
        llm = Llm(client, MODEL)
        for question in questions:
            for piece in llm.stream([{"role": "user", "content": question}]):
                yield question, piece

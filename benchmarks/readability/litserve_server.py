"""The recipe behind LitServe: python litserve_server.py SETTINGS, a JSON object.

``artifacts``, ``dtype``, ``threads`` and ``port``, and LitServe's own ``max_batch_size``, ``batch_timeout`` (seconds)
and ``fast_queue``. One worker: the encoder's threads are all cores already.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litserve
from recipe import served_recipe


class Readability(litserve.LitAPI):
    """One text a request, scored in batches."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(max_batch_size=settings["max_batch_size"], batch_timeout=settings["batch_timeout"])
        self.settings = settings

    def setup(self, device: str) -> None:  # noqa: ARG002
        """Load the models, once in the worker."""
        self.score = served_recipe(self.settings)

    def decode_request(self, request: dict[str, str]) -> str:
        """The text of a request."""
        return request["text"]

    def batch(self, inputs: list[str]) -> list[str]:
        """Texts stay a list: LitServe would stack arrays."""
        return inputs

    def predict(self, texts: list[str]) -> list[float]:
        """Scores of a batch."""
        return self.score(texts).tolist()

    def unbatch(self, output: list[float]) -> list[float]:
        """One score a request."""
        return output

    def encode_response(self, score: float) -> dict[str, float]:
        """The answer of a request."""
        return {"score": score}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    server = litserve.LitServer(Readability(given), accelerator="cpu", timeout=False, fast_queue=given["fast_queue"])
    server.run(host="127.0.0.1", port=given["port"], generate_client_file=False, log_level="warning")

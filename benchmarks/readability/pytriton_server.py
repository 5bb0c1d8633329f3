"""The recipe behind PyTriton: python pytriton_server.py SETTINGS, a JSON object.

``artifacts``, ``dtype``, ``threads`` and ``ports`` (HTTP, gRPC, metrics), and of PyTriton's own ``max_batch_size`` and
``max_queue_delay_microseconds``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig
from recipe import served_recipe


def main(settings: dict[str, Any]) -> None:
    """Serve until the process is ended."""
    score = served_recipe(settings)

    @batch
    def infer(text: Any) -> dict[str, Any]:
        texts = [row.decode() for row in text[:, 0]]
        return {"score": score(texts).astype(np.float32).reshape(-1, 1)}

    http, grpc, metrics = settings["ports"]
    host = "127.0.0.1"
    ports = TritonConfig(
        http_address=host, http_port=http, grpc_address=host, grpc_port=grpc, metrics_address=host,
        metrics_port=metrics,
    )  # fmt: skip
    batcher = DynamicBatcher(max_queue_delay_microseconds=settings["max_queue_delay_microseconds"])
    with Triton(config=ports) as triton:
        triton.bind(
            model_name="readability",
            infer_func=infer,
            inputs=[Tensor(name="text", dtype=bytes, shape=(1,))],
            outputs=[Tensor(name="score", dtype=np.float32, shape=(1,))],
            config=ModelConfig(max_batch_size=settings["max_batch_size"], batcher=batcher),
        )
        triton.serve()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""Engines for the encoder, side by side in one run: what the slot is served with, and what was tried beside it.

    python benchmarks/engines.py [--layers 4] [--rows 16] [--width 224] [--dtype fp32]

An encoder of bert-large's widths with random weights and fewer layers: time and FLOPs both go with their number.
Engines take turns. TorchScript is traced as the pipeline's artifact is; *fused* is what shoal's backend makes of it at
load. ONNX Runtime (FP32 alone) and OpenVINO run the same encoder as ONNX; torch.compile (static shapes, frozen) needs a
C++ compiler; AOTInductor is what it gives as a file, for every shape. What is not installed is left out, and so is,
with the reason, what fails. Each row of the result: sequences and TFLOP a second, the median of the rounds' ratios to
plain TorchScript, the greatest difference to it. The matrix rate is torch's own of the same run. The result goes to
benchmarks/results/engines-DTYPE-DATE.json.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the server

import numpy as np
import torch
import typer

from shoal.encoders.export import export_encoder
from shoal.encoders.fusing import fuse
from shoal.machine import computes_bf16, describe_machine, library_versions
from shoal.readability.encoder import Encoder

LIBRARIES = ("torch", "transformers", "numpy", "onnxruntime", "openvino")
Run = Callable[[], torch.Tensor]
REFERENCE = "TorchScript"


def main(layers: int = 4, rows: int = 16, width: int = 224, dtype: str = "fp32", rounds: int = 7) -> None:
    """Measure and record."""
    if dtype == "bf16" and not computes_bf16():
        print("This processor emulates BF16: there is nothing to measure.")
        return
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    warnings.simplefilter("ignore")
    encoder = make_encoder(layers)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30_000, (rows, width), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, width - 4 :] = 0
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        engines, differences, failed = try_engines(make_engines(encoder, Path(folder), ids, mask, dtype))
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, run in engines.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    hidden = 1024
    flop = rows * width * layers * (24 * hidden**2 + 4 * width * hidden)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": library_versions(*LIBRARIES),
        "encoder": f"{layers} layers of {hidden}, random weights, {dtype}; {rows} rows of {width} tokens",
        "matrix_tflop_per_s": {str(shape): round(matrix_rate(shape, dtype), 3) for shape in SHAPES},
        "engines": {
            name: {
                "rows_per_s": round(rows / statistics.median(times), 2),
                "tflop_per_s": round(flop / statistics.median(times) / 1e12, 3),
                "ratio": round(statistics.median(a / b for a, b in zip(seconds[REFERENCE], times, strict=True)), 3),
                "max_diff": differences[name],
                "seconds": [round(t, 4) for t in times],
            }
            for name, times in seconds.items()
        },
        "failed": failed,
    }
    path = Path(__file__).parent / "results" / f"engines-{dtype}-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def try_engines(
    makers: Iterator[tuple[str, Callable[[], Run]]],
) -> tuple[dict[str, Run], dict[str, float], dict[str, str]]:
    """The engines that answer, the greatest difference of each to the first, and why the others do not."""
    engines: dict[str, Run] = {}
    differences: dict[str, float] = {}
    failed: dict[str, str] = {}
    expected: torch.Tensor | None = None
    for name, make in makers:
        try:
            run = make()
            found = run()  # some compile only now
        except Exception as error:
            if expected is None:
                raise  # without the first there is nothing to compare with
            failed[name] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            continue
        expected = found if expected is None else expected
        engines[name], differences[name] = run, float((found - expected).abs().max())
    return engines, differences, failed


def make_encoder(layers: int) -> Encoder:
    """bert-large's widths."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=1024, num_attention_heads=16, intermediate_size=4096,
        attn_implementation="sdpa",
    )  # fmt: skip
    return Encoder(BertModel(config, add_pooling_layer=False), torch.nn.Linear(1024, 1)).eval()


def make_engines(
    encoder: Encoder, folder: Path, ids: torch.Tensor, mask: torch.Tensor, dtype: str
) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Each engine, and what makes it ready to run the batch; to be called before the next is asked for."""
    export_encoder(encoder, folder / "model.pt", ties={})

    def load() -> Any:
        module = torch.jit.load(str(folder / "model.pt")).eval()
        if dtype == "bf16":
            module.trunk.to(torch.bfloat16)
        return module

    def by_torch(module: Callable[..., torch.Tensor]) -> Run:
        def run() -> torch.Tensor:
            with torch.inference_mode():
                return module(ids, mask)

        return run

    yield REFERENCE, lambda: by_torch(load())
    yield "TorchScript, frozen", lambda: by_torch(torch.jit.freeze(load()))
    optimize = torch.jit.optimize_for_inference
    yield "TorchScript, optimize_for_inference", lambda: by_torch(optimize(torch.jit.freeze(load())))
    yield "TorchScript, fused", lambda: by_torch(fuse(load(), dtype))
    yield from by_onnx(encoder, folder, ids.numpy(), mask.numpy(), dtype)
    if dtype == "bf16":
        encoder.trunk.to(torch.bfloat16)
    import torch._inductor.config as inductor

    inductor.freezing = True
    yield "torch.compile, static, frozen", lambda: by_torch(torch.compile(encoder, dynamic=False))
    yield "AOTInductor, dynamic, frozen", lambda: by_torch(ahead_of_time(encoder, folder))


def by_onnx(encoder: Encoder, folder: Path, ids: Any, mask: Any, dtype: str) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Those that read ONNX and are installed."""
    path = folder / "model.onnx"

    def export() -> None:
        if not path.exists():
            export_encoder(encoder, path, ties={})

    def by_onnxruntime() -> Run:
        import onnxruntime

        export()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        given = {"INPUT__0": ids, "INPUT__1": mask}
        return lambda: torch.from_numpy(session.run(None, given)[0])

    def by_openvino() -> Run:
        import openvino

        export()
        precision = {"fp32": "f32", "bf16": "bf16"}[dtype]
        hints: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1}
        hints["INFERENCE_PRECISION_HINT"] = precision
        compiled = openvino.Core().compile_model(str(path), "CPU", hints)
        return lambda: torch.from_numpy(np.array(compiled([ids, mask])[0]))

    if dtype == "fp32" and find_spec("onnxruntime"):
        yield "ONNX Runtime", by_onnxruntime
    if find_spec("openvino"):
        yield "OpenVINO", by_openvino


def ahead_of_time(encoder: Encoder, folder: Path) -> Callable[..., torch.Tensor]:
    """The encoder as a package of compiled code, for every batch size and width."""
    from torch.export import Dim, export

    axes = {0: Dim("rows", min=1, max=512), 1: Dim("width", min=2, max=512)}
    ids = torch.ones(4, 24, dtype=torch.int64)
    mask = ids.clone()
    mask[1, 7:] = 0  # with ones alone the attention would take a shortcut, and the export keep it
    with torch.no_grad():
        program = export(encoder, (ids, mask), dynamic_shapes={"ids": axes, "mask": axes}, strict=False)
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(folder / "model.pt2"), inductor_configs={"freezing": True}
    )
    return torch._inductor.aoti_load_package(path)


SHAPES = ((4096, 4096, 4096), (3584, 1024, 4096))


def matrix_rate(shape: tuple[int, int, int], dtype: str) -> float:
    """TFLOP a second of a matrix product, the best of five."""
    rows, inner, columns = shape
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    left, right = torch.randn(rows, inner).to(kind), torch.randn(inner, columns).to(kind)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - start)
    return 2 * rows * inner * columns / min(seconds[1:]) / 1e12


if __name__ == "__main__":
    typer.run(main)

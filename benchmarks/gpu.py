"""What a GPU does with the readability pipeline at full size, beside the same pipeline's other placements.

    python benchmarks/gpu.py [--batch 512] [--dtype bf16] [--layers 24 --hidden 1024]

The encoder has bert-large-uncased's geometry and random weights: its scores mean nothing, its time does. Texts are the
CLEAR corpus's where SHOAL_DATA_DIR names its folder, else shoal's own. All pipelines run in this process, without a
server, and take turns. Tokens a sample stand beside samples a second: without them a throughput says nothing. The
result, with hardware and versions, goes to benchmarks/results/gpu-DATE.json.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from records import dumps, write_record

from shoal import Pipeline, compose, load
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.plan import Plan
from shoal.clients.local import load_component
from shoal.kit.component.files import sha256
from shoal.kit.component.ledger import CONTROL, DOWN
from shoal.kit.component.tensors import Device
from shoal.kit.encoders.export import export_encoder
from shoal.kit.text.device import upload
from shoal.kit.text.tokens import WordPiece, read_vocabulary
from shoal.readability.corpus import Corpus, find_corpus
from shoal.readability.encoder import Candidates, Encoder
from shoal.readability.fit import EncoderSettings, Training
from shoal.readability.train import Preset, train
from shoal.system.machine import describe_machine, library_versions

ENSEMBLE = "ensemble_all"
LIBRARIES = ("numpy", "torch", "cupy-cuda13x", "pylibcudf-cu13", "nvforest-cu13", "treelite", "tokenizers")
STEPS = ("preprocess", "bert-large", "cuml", "postprocess")


def main(
    batch: int = 512, dtype: str = "bf16", layers: int = 24, hidden: int = 1024, repeats: int = 10, cpu_batch: int = 16
) -> None:
    """Measure and record."""
    if not torch.cuda.is_available():
        typer.echo("There is no GPU. benchmarks/latency.py measures the pipeline without one.", err=True)
        raise typer.Exit(1)
    corpus = find_corpus()
    order = np.random.default_rng(0).permutation(len(corpus))
    texts = [corpus.texts[order[i % len(corpus)]] for i in range(batch)]
    record = Record(f"BERT, {layers} layers of {hidden}, random weights, {dtype}", corpus.name)
    with tempfile.TemporaryDirectory(prefix="shoal-") as name:
        folder = Path(name)
        artifacts = folder / "artifacts"
        make_artifacts(corpus, artifacts, layers=layers, hidden=hidden)
        plans = {
            "gpu": Plan(placement="gpu", dtype=dtype),
            "hybrid": Plan(placement="hybrid", dtype=dtype),
            "cpu": Plan(),
        }
        repositories = {
            name: compose(ENSEMBLE, folder / name, artifacts=artifacts, plan=plan) for name, plan in plans.items()
        }
        sizes = {"gpu": batch, "hybrid": batch, "cpu": cpu_batch}
        record.keep("wordpiece_gb_per_s", wordpiece_rate(artifacts, texts))
        record.keep("steps", steps(repositories["gpu"], texts, repeats))
        record.keep("training", training_steps(texts[:16], artifacts, layers=layers, hidden=hidden))
        record.keep("placements", compare(repositories, texts, sizes, repeats))  # the host's turns take longest


class Record:
    """The result so far, written again after each section: an interruption loses one section, not all."""

    def __init__(self, encoder: str, corpus: str) -> None:
        gpu = {"gpu": torch.cuda.get_device_name(), "num_gpus": torch.cuda.device_count()}
        self.result: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": {**describe_machine(), **gpu},
            "versions": library_versions(*LIBRARIES),
            "corpus": corpus,
            "encoder": encoder,
        }

    def keep(self, section: str, values: Any) -> None:
        """Add a section, print it, and write everything."""
        self.result[section] = values
        print(dumps({section: values}), flush=True)
        write_record("gpu", self.result)


def make_artifacts(corpus: Corpus, out: Path, *, layers: int, hidden: int) -> None:
    """Real word lists and forest, and an encoder of the wanted size."""
    from transformers import BertConfig, BertModel

    train(corpus, out, preset=Preset(num_rows=1000, encoder=EncoderSettings(max_steps=1)))
    config = BertConfig(
        vocab_size=len(read_vocabulary(out / "vocab.txt")),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    trunk = BertModel(config, add_pooling_layer=False)
    encoder = Encoder(trunk, torch.nn.Linear(hidden, 1)).eval()
    export_encoder(encoder, out / "model.pt", ties={"vocab.txt": sha256(out / "vocab.txt")})


def compare(
    repositories: Mapping[str, Path], texts: list[str], sizes: Mapping[str, int], repeats: int
) -> dict[str, dict[str, Any]]:
    """Batch 1 and large batches in every placement, in turns; what each batch copied."""
    pipelines = {name: load(path / ENSEMBLE) for name, path in repositories.items()}
    seconds: dict[str, dict[str, list[float]]] = {name: {"one": [], "batch": []} for name in pipelines}
    for _ in range(2):  # kernels are compiled, pools grow
        for name, pipeline in pipelines.items():
            pipeline(excerpt=texts[: sizes[name]])
            pipeline(excerpt=texts[:1])
    before = {name: pipeline.copies() for name, pipeline in pipelines.items()}
    for turn in range(repeats):
        for name, pipeline in pipelines.items():
            for k in range(10):
                seconds[name]["one"].append(timed(pipeline, texts[(10 * turn + k) % len(texts)]))
            seconds[name]["batch"].append(timed(pipeline, *texts[: sizes[name]]))
    return {
        name: {
            "batch": sizes[name],
            "samples_per_s": round(sizes[name] / float(np.median(seconds[name]["batch"])), 1),
            "batch_seconds": spread(seconds[name]["batch"]),
            "batch_1_seconds": spread(seconds[name]["one"]),
            "copies": told(pipeline.copies() - before[name]),
        }
        for name, pipeline in pipelines.items()
    }


def timed(pipeline: Pipeline, *texts: str) -> float:
    """Seconds of one request, from strings to scores on the host."""
    start = time.perf_counter()
    pipeline(excerpt=list(texts))
    return time.perf_counter() - start


def told(copies: Any) -> dict[str, Any]:
    """The ledger by edge, and what came down that was neither scores nor control."""
    down = [c for c in copies if c.edge.direction == DOWN and c.edge.name != CONTROL and c.model != "postprocess"]
    return {
        "edges": {
            f"{c.model} {c.edge.name} {c.edge.direction}": [c.traffic.copies, c.traffic.num_bytes] for c in copies
        },
        "tensor_bytes_down_before_the_scores": sum(c.traffic.num_bytes for c in down),
    }


def steps(repository: Path, texts: list[str], repeats: int) -> dict[str, Any]:
    """Each step alone, the device idle before and after; shares of their sum."""
    components = {name: load_component(read_config(repository / name)) for name in STEPS}

    def run(name: str, **inputs: Any) -> dict[str, Any]:
        (answer,) = components[name].process([inputs])
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    excerpts = np.array([[text.encode()] for text in texts], np.object_)
    read = run("preprocess", INPUT0=excerpts)
    bert = run("bert-large", INPUT__0=read["BERT_IDS"], INPUT__1=read["BERT_AM"])["OUTPUT__0"]
    forest = run("cuml", input__0=read["TREE_FEATS"])["output__0"]
    calls: dict[str, Callable[[], Any]] = {
        "preprocess": lambda: run("preprocess", INPUT0=excerpts),
        "bert-large": lambda: run("bert-large", INPUT__0=read["BERT_IDS"], INPUT__1=read["BERT_AM"]),
        "cuml": lambda: run("cuml", input__0=read["TREE_FEATS"]),
        "postprocess": lambda: run("postprocess", BERT_LARGE_SCORE=bert, CUML_SCORE=forest),
    }
    seconds: dict[str, list[float]] = {name: [] for name in STEPS}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            with clock(seconds[name]):
                call()
            if turn < 2:
                seconds[name].clear()
    total = sum(float(np.median(times)) for times in seconds.values())
    tokens = components["preprocess"].context.device.fetch(read["BERT_AM"].sum(), CONTROL)
    return {
        "real_tokens_a_sample": round(float(tokens) / len(texts), 1),
        "width": int(read["BERT_IDS"].shape[1]),
        "seconds": {name: spread(times) for name, times in seconds.items()},
        "share_of_all_but_the_encoder": round(1 - float(np.median(seconds["bert-large"])) / total, 4),
    }


def wordpiece_rate(artifacts: Path, texts: list[str]) -> float:
    """Normalised text to token ids, 64 MiB of it: GB a second, with the guard row and the widening to INT64."""
    from shoal.kit.text.gpu_text import GpuText

    device = Device("gpu", 0)
    device.prepare()
    engine = GpuText(read_vocabulary(artifacts / "vocab.txt"), device)
    many = texts * (64 * 2**20 // sum(map(len, texts)))
    clean = engine.normalise(upload(many, device, "texts"))
    seconds: list[float] = []
    for _ in range(7):
        with clock(seconds):
            engine.pieces(clean)
    return round(int(clean.values.shape[0]) / float(np.median(seconds[2:])) / 1e9, 3)


def training_steps(texts: list[str], artifacts: Path, *, layers: int, hidden: int) -> dict[str, dict[str, float]]:
    """Seconds and peak memory of one optimizer step on 16 texts, by how memory is saved."""
    from transformers import BertConfig, BertModel

    vocabulary = read_vocabulary(artifacts / "vocab.txt")
    batch = Corpus("one batch", tuple(texts), np.linspace(-1, 1, len(texts)))
    found = {}
    for name, saving in {"plain": {}, "gradient checkpointing": {"gradient_checkpointing": True}}.items():
        config = BertConfig(
            vocab_size=len(vocabulary), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
            intermediate_size=4 * hidden, attn_implementation="sdpa",
        )  # fmt: skip
        trunk = BertModel(config, add_pooling_layer=False)
        run = Training(Candidates(trunk, seed=0), WordPiece(vocabulary), EncoderSettings(**saving), seed=0)
        torch.cuda.reset_peak_memory_stats()
        seconds: list[float] = []
        for steps in range(1, 6):
            with clock(seconds):
                run.run(batch, None, num_steps=5, stop_at=steps)
        gib = torch.cuda.max_memory_allocated() / 2**30
        found[name] = {"p50_s": round(float(np.median(seconds[1:])), 4), "peak_gib": round(gib, 2)}
        del run, trunk
        torch.cuda.empty_cache()
    return found


@contextmanager
def clock(seconds: list[float]) -> Iterator[None]:
    """Time what is inside, from an idle device to an idle device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    yield
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)


def spread(seconds: list[float]) -> dict[str, float]:
    """Percentiles, in seconds."""
    return {f"p{p}": round(float(np.percentile(seconds, p)), 6) for p in (10, 50, 90)}


if __name__ == "__main__":
    typer.run(main)

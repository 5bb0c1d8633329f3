"""Every command that reads files, good files for it, and a process with limits that runs it on a bad one."""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import signal
import sys
import tarfile
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import lightgbm
import numpy as np
import pyarrow
import skops.io
import torch
import transformers  # imported once, before the processes are forked
import treelite
import xgboost
from onnx import TensorProto, helper
from openpyxl import Workbook
from pyarrow import parquet
from sklearn.ensemble import RandomForestRegressor

from shoal.cli import main
from tests.support.hostile_files import NO_FILES
from tests.support.planted import write

MARK, FAULT = "\0report", 99  # before the report; the exit code that stands for a traceback
SECONDS, WAIT, MEMORY = 20, 100, 2**30  # of one command: processor time, time, and memory beyond the libraries'
CONFIG = """backend: "python"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_STRING dims: [ 1 ] label_filename: "labels.txt" } ]
instance_group [ { kind: KIND_CPU } ]
"""
CODE = """from shoal import Component


class Echo(Component):
    def run(self, batch):
        return {"Y": batch["X"]}


TritonPythonModel = Echo.for_triton()
"""
TEMPLATE = (
    'name: "m"\nbackend: "python"\nmax_batch_size: ${size}\nparameters { key: "a" value { string_value: "${b}" } }\n'
)
NATIVE = """backend: "%s"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
ROWS = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
SCORES = ROWS[:, 0] + ROWS[:, 1]
SECRET = {"sha256": "0" * 64, "created": "2026-01-01T00:00:00Z", "expires": "2099-01-01T00:00:00Z"}
KEYS = {"keys": [{"name": "a", "id": "0123456789ab", "models": ["*"], "may": ["infer"], "secrets": [SECRET]}]}
ENCODER: dict[str, Any] = {
    "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32, "vocab_size": 8,
}  # fmt: skip
MODULES = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in ("Transformer", "Pooling")]
TUNED = {"dtype": "fp32", "reason": "a", "machine": {"cpu": "b"}, "models": {}}
WORDS = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\n"
COMPOSE = ("compose", "echo", "composed", "--project", "home")
CHECK, ADD = ("check", "repository", "--target", "embedded"), ("--project", "project")
INFER = ("infer", "--local", "--repository", "repository", "--model", "echo")
EMBED = ("add-model", "encoder", "mine", "--task", "embeddings", "--pooling", "mean", "--tokenizer", "tokens", *ADD)


def dumped(value: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(value).encode()


def saved(write_to: Callable[[Any], object]) -> Callable[[], bytes]:
    def make() -> bytes:
        file = io.BytesIO()
        write_to(file)
        return file.getvalue()

    return make


def save_workbook(file: Any) -> None:
    book = Workbook()
    for row in (["X"], ["a"], ["b"]):
        book.active.append(row)
    book.save(file)


def save_environment(file: Any) -> None:
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name in (
            "bin/activate",
            "bin/python3",
            "bin/python3.11",
            "lib/python3.11/site-packages/a.py",
            "pyvenv.cfg",
        ):
            entry = tarfile.TarInfo(name)
            entry.size = 400
            archive.addfile(entry, io.BytesIO(b"# a" * 200))


def make_graph() -> bytes:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "XY"]
    graph = helper.make_graph([helper.make_node("Relu", ["X"], ["Y"])], "g", value[:1], value[1:])
    return bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def make_booster() -> bytes:
    data = xgboost.DMatrix(ROWS, SCORES)
    return bytes(xgboost.train({"nthread": 1, "max_depth": 2}, data, 2).save_raw("json"))


def make_text() -> bytes:
    parameters = {"objective": "regression", "verbosity": -1, "num_threads": 1}
    return lightgbm.train(parameters, lightgbm.Dataset(ROWS, SCORES), 2).model_to_string().encode()


def make_treelite() -> bytes:
    model = treelite.sklearn.import_model(RandomForestRegressor(2, random_state=0).fit(ROWS, SCORES))
    return bytes(model.serialize_bytes())


def make_script(file: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.trace(torch.nn.Linear(4, 1).eval(), torch.zeros(1, 4))
        torch.jit.save(module, file)


def make_tokenizer() -> bytes:
    vocabulary = {word: number for number, word in enumerate(WORDS.split())}
    model: dict[str, Any] = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 9,
    }
    model["vocab"] = vocabulary
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model}).encode()


# The file, its good content, and the command.
READERS: dict[str, tuple[str, Callable[[], bytes], tuple[str, ...]]] = {
    "configuration": ("repository/echo/config.pbtxt", CONFIG.encode, CHECK),
    "code": ("repository/echo/1/model.py", CODE.encode, CHECK),
    "labels": ("repository/echo/labels.txt", b"a\nb\n".strip, CHECK),
    "manifest": ("repository/manifest.json", dumped({"shoal": "1", "files": {}, "launch": {"flags": []}}), CHECK),
    "graph": ("repository/echo/config.pbtxt", CONFIG.encode, ("graph", "repository")),
    "describe": ("repository/manifest.json", dumped({"shoal": "1", "files": {}}), ("describe", "repository")),
    "doctor": ("repository/manifest.json", dumped({"shoal": "1", "files": {}}), ("doctor", "repository")),
    "ONNX": ("repository/net/1/model.onnx", make_graph, CHECK),
    "TorchScript": ("repository/script/1/model.pt", saved(make_script), CHECK),
    "forest": ("repository/forest/1/xgboost.json", make_booster, CHECK),
    "template": ("t.pbtxt", TEMPLATE.encode, ("fill", "t.pbtxt", "size:4,b:c")),
    "add .json": ("m.json", make_booster, ("add-model", "m.json", "mine", *ADD)),
    "add .ubj": ("m.ubj", make_booster, ("add-model", "m.ubj", "mine", *ADD)),
    "add .txt": ("m.txt", make_text, ("add-model", "m.txt", "mine", *ADD)),
    "add .tl": ("m.tl", make_treelite, ("add-model", "m.tl", "mine", *ADD)),
    "add .skops": (
        "m.skops",
        lambda: bytes(skops.io.dumps(RandomForestRegressor(2, random_state=0).fit(ROWS, SCORES))),
        ("add-model", "m.skops", "mine", *ADD),
    ),
    "add .onnx": ("m.onnx", make_graph, ("add-model", "m.onnx", "mine", *ADD)),
    "add .pt": ("m.pt", saved(make_script), ("add-model", "m.pt", "mine", "--input", "FP32:4", *ADD)),
    "encoder's configuration": ("encoder/config.json", dumped(ENCODER), EMBED),
    "encoder's words": ("encoder/vocab.txt", WORDS.encode, EMBED),
    "encoder's modules": ("encoder/modules.json", dumped(MODULES), EMBED),
    "decoder": ("encoder/config.json", dumped(ENCODER), ("add-model", "encoder", "mine", "--task", "generate", *ADD)),
    "CSV": ("in.csv", b"X\na\nb\n".strip, (*INFER, "--input", "in.csv", "--output", "out.csv")),
    "JSON lines": ("in.jsonl", b'{"X": "a"}\n{"X": "b"}\n'.strip, (*INFER, "--input", "in.jsonl")),
    "texts": ("in.txt", b"a\nb\n".strip, (*INFER, "--input", "in.txt", "--output", "out.jsonl")),
    "Parquet": (
        "in.parquet",
        saved(lambda file: parquet.write_table(pyarrow.table({"X": ["a", "b"]}), file)),
        (*INFER, "--input", "in.parquet", "--output", "out.parquet"),
    ),
    "XLSX": ("in.xlsx", saved(save_workbook), (*INFER, "--input", "in.xlsx")),
    "array": ("in.npy", saved(lambda file: np.save(file, np.array([[b"a"]]))), (*INFER, "X=@in.npy")),
    "request": ("in.json", dumped({"X": ["a", "b"]}), (*INFER, "@in.json")),
    "journal": ("out.csv.partial", b"{}\n".strip, (*INFER, "--input", "good.csv", "--output", "out.csv")),
    "plan": ("out/_plan.json", b"".strip, (*INFER, "--input", "good.csv", "--output", "out")),
    "status": ("out/_plan.json", b"".strip, ("shards", "status", "out")),
    "record": ("out/_shards/00000.json", b"".strip, ("shards", "status", "out")),
    "verification": ("out/_SUCCESS.json", b"".strip, ("shards", "verify", "out")),
    "part": ("out/part-00000.csv", b"".strip, ("shards", "merge", "out", "--output", "joined.csv")),
    "inspected": ("env.tar.gz", saved(save_environment), ("env", "inspect", "env.tar.gz")),
    "fitted": ("env.tar.gz", saved(save_environment), ("env", "fit", "env.tar.gz")),
    "unpacked": ("env.tar.gz", saved(save_environment), ("env", "unpack", "env.tar.gz", "unpacked")),
    "keys": ("keys.json", dumped(KEYS), ("keys", "list", "--file", "keys.json")),
    "rotated": ("keys.json", dumped(KEYS), ("keys", "rotate", "a", "--file", "keys.json")),
    "options": (
        "options.toml",
        b"http-port = 8000\n".strip,
        ("serve", "repository", "--config", "options.toml", "--print-config"),
    ),
    "tokenizer": ("encoder/tokenizer.json", make_tokenizer, ("tokens", "a b", "--tokenizer", "encoder", "--json")),
    "tuned": ("tuned.json", dumped(TUNED), (*COMPOSE, "--tuned", "tuned.json")),
    "weights": ("encoder/config.json", dumped(ENCODER), ("compose", "llm", "composed", "--weights", "encoder")),
    "key": ("key.txt", b"secret".strip, ("infer", "a", "--api-key-file", "key.txt", "--url", "127.0.0.1:9")),
    "certificate": ("ca.pem", b"PEM".strip, ("infer", "a", "--ca-cert", "ca.pem", "--url", "grpcs://127.0.0.1:9")),
}  # fmt: skip


def _flipped(good: bytes) -> bytes:
    chance, changed = Random(len(good)), bytearray(good or b"\0")
    for _ in range(6):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "as it is": lambda good: good,
    "empty": lambda good: b"",
    "noise": lambda good: Random(1).randbytes(5000),
    "cut": lambda good: good[: len(good) // 2],
    "flipped": _flipped,
    "flipped again": lambda good: _flipped(good + b" ")[:-1],
    "much more": lambda good: good + b"a" * 2**20,
    "lines": lambda good: good + b"\n" * 2**19,
    "nested": lambda good: b'{"a":' + b"[" * 200_000,
    "a large number": lambda good: b'{"keys": ' + b"9" * 5000 + b"}",
    "open braces": lambda good: good + b"${" * 100_000,
    "backslashes": lambda good: b'name: "' + b"\\" * 100_001 + b'x"',
    "quotes": lambda good: b'"' * 100_001,
    "not UTF-8": lambda good: good + b"\xff\xfe",
    "zeros": lambda good: bytes(100_000),
    "a bomb": lambda good: gzip.compress(bytes(2**28)),
    "half a character": lambda good: b'{"a": "\\ud800"}',
}
FILES = {name: NO_FILES[name] for name in ("a pipe", "endless zeros", "3 GB", "a folder", "a link to nothing")}
CASES = [(reader, kind) for kind in (*FILES, *CONTENTS) for reader in READERS]


@cache
def find_good(reader: str) -> bytes:
    return READERS[reader][1]()


def lay_out(folder: Path) -> None:
    """Write what the commands read besides the bad file; all of it is good."""
    files: Mapping[str, bytes] = {
        **{file: find_good(reader) for reader, (file, _, command) in READERS.items() if command == CHECK},
        **{
            f"home/models/echo/{name}": text.encode() for name, text in (("config.pbtxt", CONFIG), ("1/model.py", CODE))
        },
        "home/models/echo/labels.txt": b"a\nb\n",
        "repository/net/config.pbtxt": (NATIVE % "onnxruntime").encode(),
        "repository/script/config.pbtxt": (NATIVE % "pytorch").encode(),
        "repository/forest/config.pbtxt": (NATIVE % "fil").encode(),
        "encoder/config.json": json.dumps(ENCODER).encode(),
        "encoder/vocab.txt": WORDS.encode(),
        "good.csv": b"X\na\nb\n",
    }
    for name, content in files.items():
        write(folder / name, content)
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**ENCODER)).save_pretrained(folder / "encoder")


def spoil(folder: Path, reader: str, kind: str) -> None:
    """Put a bad file in the place of a good one."""
    path = folder / READERS[reader][0]
    good = path.read_bytes() if path.is_file() else find_good(reader)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind in FILES:
        FILES[kind](path)
    else:
        path.write_bytes(CONTENTS[kind](good))
        path.chmod(0o600)


def run_command(folder: Path, command: tuple[str, ...], most_written: int | None, answer: Connection) -> None:
    """Run a command in ``folder``, within limits; write its output, and its exit code and processor time, to a pipe.

    ``most_written`` is the greatest size of a file: writing more fails, as on a full disk.
    """
    os.chdir(folder)
    os.environ.update(HOME=str(folder), TMPDIR=str(folder), HF_HUB_OFFLINE="1", COLUMNS="200")
    tempfile.tempdir = None
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, file in enumerate((nothing, answer.fileno(), answer.fileno())):
        os.dup2(file, stream)
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    before = sum(os.times()[:4])
    used = int(before) + SECONDS + 1
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (used, used))
    if most_written is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_written,) * 2)  # Python ignores the signal
    signal.alarm(WAIT)
    code, sys.argv = 0, ["shoal", *command]
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        code = FAULT
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    found = {"code": code, "seconds": sum(os.times()[:4]) - before}
    os.write(answer.fileno(), f"{MARK}{json.dumps(found)}".encode())
    os._exit(0)

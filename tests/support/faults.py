"""Faults of artifacts: each a name, what makes it of a good file, and words of the error that it gets."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import treelite
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

from shoal.kit.component.files import sha256
from shoal.kit.component.provenance import dump_ties

MODELS = {
    "preprocess.json": "preprocess",
    "vocab.txt": "preprocess",
    "model.pt": "bert-large",
    "checkpoint.tl": "cuml",
    "postprocess.json": "postprocess",
}
KINDS = {
    "preprocess.json": "preprocessing bundle",
    "vocab.txt": "vocabulary",
    "model.pt": "TorchScript file",
    "checkpoint.tl": "Treelite checkpoint",
    "postprocess.json": "postprocessing setting",
}
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
Fault = Callable[[Path], object]


def holds(content: bytes | str) -> Fault:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(share: float) -> Fault:
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def edit(**changes: Any) -> Fault:
    """Other values in a JSON file; None takes one out."""

    def change(path: Path) -> None:
        fields = json.loads(path.read_text(encoding="utf-8")) | changes
        path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}), encoding="utf-8")

    return change


def among(name: str, value: object) -> Fault:
    """Another last entry in one of the bundle's lists."""

    def change(path: Path) -> None:
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields[name][-1] = value if value != "first" else fields[name][0]
        path.write_text(json.dumps(fields), encoding="utf-8")

    return change


def lines(change: Callable[[list[str]], list[str]]) -> Fault:
    return lambda path: path.write_text("\n".join(change(path.read_text(encoding="utf-8").split("\n"))))


def forest(kind: type, num_features: int) -> Fault:
    """A forest of the wrong kind or size, tied to the right bundle."""

    def make(path: Path) -> None:
        rows = np.random.default_rng(0).normal(size=(40, num_features)).astype(np.float32)
        model = treelite.sklearn.import_model(kind(3, random_state=0).fit(rows, rows[:, 0] > 0))
        places = (path.parent, path.parents[2] / "preprocess" / "1")  # of an artifact folder, of a repository
        (bundle,) = (at / "preprocess.json" for at in places if (at / "preprocess.json").is_file())
        model.get_header_accessor().set_field("attributes", dump_ties({"preprocess.json": sha256(bundle)}))
        model.serialize(str(path))

    return make


def zipped(**entries: str) -> Fault:
    def make(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in entries.items():
                archive.writestr(name.replace("__", "/"), text)

    return make


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dead_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("gone")


def flip_weight(path: Path) -> None:
    """One bit of a word's embedding."""
    content = bytearray(path.read_bytes())
    content[20_000_000] ^= 64
    path.write_bytes(content)


EVERYWHERE: list[tuple[str, Fault, str]] = [
    ("empty", holds(b""), "{path} is not a {kind}: it is empty"),
    ("a PNG", holds(PNG), "{path} is not a {kind}: it is a PNG image"),
    ("a page", holds("<html>404</html>"), "{path} is not a {kind}: it is a web page or XML"),
    ("a pickle", lambda path: torch.save({"a": 1}, path, _use_new_zipfile_serialization=False), "Python pickle"),
    ("a pointer", holds("version https://git-lfs.github.com/spec/v1\n"), "it is a pointer of Git LFS, not the file"),
    ("a folder", folder, "it is a folder"),
    ("a dead link", dead_link, "it is a link to gone, which is not there"),
]
BUNDLE: list[tuple[str, Fault, str]] = [
    ("half", cut(0.5), "preprocess.json is not a preprocessing bundle: Expecting"),
    (
        "another object",
        holds('{"name": "app"}'),
        "it lacks format, frequent, is_lowercase, max_length, mean, rare, std",
    ),
    ("a list", holds("[1]"), "it is the JSON value [1], expected an object"),
    ("nested too deep", holds('{"a":' + "[" * 100_000), "it is nested too deep"),
    ("one name twice", holds('{"std": 1, "std": 2}'), "it holds 'std' twice"),
    ("not UTF-8", holds(b'{"a": "\xff"}'), "it is not UTF-8: byte 0xff at 7"),
    ("NaN", among("mean", float("nan")), "mean holds nan, expected finite numbers"),
    ("1e999", lambda p: p.write_text(p.read_text().replace('"mean": [', '"mean": [1e999,')), "mean has 208 entries"),
    ("another format", edit(format=2), "it has format 2; this shoal reads 1"),
    ("more", edit(surprise=1), "it holds 'surprise', which this shoal does not know"),
    ("no mean", edit(mean=None), "it lacks mean"),
    ("short mean", edit(mean=[0.0]), "mean has 1 entries, expected 207"),
    ("long std", edit(std=[1.0] * 208), "std has 208 entries, expected 207"),
    ("mean as text", edit(mean="0"), "mean is '0', expected a list of numbers"),
    ("a word as number", among("mean", "0"), "mean holds '0', expected finite numbers"),
    ("a huge number", among("mean", 10**400), "expected finite numbers"),
    ("no deviation", among("std", 0.0), "std of column 206 is 0, expected a number above 0"),
    ("a tiny deviation", among("std", 1e-300), "of column 206 give z-scores that FP32 cannot hold"),
    ("99 words", edit(rare=["a"] * 99), "rare has 99 entries, expected 100"),
    ("a number as word", among("rare", 7), "rare holds 7, expected words"),
    ("two words", among("rare", "a b"), "rare holds 'a b', expected words"),
    ("half a character", among("rare", "\ud800"), "it has the lone surrogate U+D800"),
    ("a word twice", among("frequent", "first"), "twice"),
    ("no lists", edit(stop_words={"a": 1}), "stop_words is {'a': 1}, expected a list of words"),
    ("lowercase as text", edit(is_lowercase="yes"), "is_lowercase is 'yes', expected true or false"),
    ("max_length 0", edit(max_length=0), "max_length is 0, expected a whole number from 3 to 65,536"),
    ("max_length true", edit(max_length=True), "max_length is True, expected a whole number"),
    ("max_length 2.5", edit(max_length=2.5), "max_length is 2.5, expected a whole number"),
    ("no hash", edit(vocabulary_sha256=5), "vocabulary_sha256 is 5, expected hexadecimal digits"),
    ("another's hash", edit(vocabulary_sha256="0" * 64), "vocab.txt is not the one preprocess.json was made with"),
]
WEIGHT: list[tuple[str, Fault, str]] = [
    ("above 1", holds('{"bert_weight": 1.5}'), "bert_weight is 1.5, expected a number from 0 to 1"),
    ("below 0", holds('{"bert_weight": -0.1}'), "bert_weight is -0.1, expected a number from 0 to 1"),
    ("NaN", holds('{"bert_weight": NaN}'), "bert_weight is nan, expected a number from 0 to 1"),
    ("infinite", holds('{"bert_weight": 1e999}'), "bert_weight is inf, expected a number from 0 to 1"),
    ("text", holds('{"bert_weight": "0.5"}'), "bert_weight is '0.5', expected a number from 0 to 1"),
    ("true", holds('{"bert_weight": true}'), "bert_weight is True, expected a number from 0 to 1"),
    ("misspelt", holds('{"bert_wieght": 0.5}'), "it lacks bert_weight"),
    ("half", cut(0.5), "postprocess.json is not a postprocessing setting: "),
]
VOCABULARY: list[tuple[str, Fault, str]] = [
    ("no special token", lines(lambda tokens: tokens[200:]), "vocab.txt lacks [CLS], [SEP], [PAD], [UNK], [MASK]"),
    (
        "a blank line",
        lines(lambda tokens: [*tokens[:500], "", *tokens[501:]]),
        "vocab.txt has a blank line, number 501",
    ),
    ("a token twice", lines(lambda tokens: [*tokens[:-1], "the"]), "vocab.txt holds a token twice: 'the'"),
    ("not UTF-8", holds(b"[PAD]\n\xff"), "vocab.txt is not a vocabulary: it is not UTF-8: byte 0xff at 6"),
    ("half", cut(0.5), "vocab.txt is not the one preprocess.json was made with (expected sha256 "),
    ("two swapped", lines(lambda t: [*t[:-3], t[-2], t[-3], ""]), "vocab.txt is not the one preprocess.json was made"),
]
FOREST: list[tuple[str, Fault, str]] = [
    ("half", cut(0.5), "checkpoint.tl is not a Treelite checkpoint: it is cut off, or damaged: a field of"),
    ("more", lambda p: p.write_bytes(p.read_bytes() + b"\0"), "it is damaged: 1 bytes too many before byte"),
    ("another version", lambda p: p.write_bytes(b"\3" + p.read_bytes()[1:]), "it is not of Treelite 4"),
    (
        "a classifier",
        forest(RandomForestClassifier, 207),
        "takes 207 features and gives classes or several scores; the",
    ),
    ("206 features", forest(RandomForestRegressor, 206), "takes 206 features and gives 1 score; the config of cuml"),
]
ENCODER: list[tuple[str, Fault, str]] = [
    ("half", cut(0.5), "model.pt is not a TorchScript file: it is damaged: File is not a zip file"),
    ("a bit of a weight", flip_weight, "it is damaged: Bad CRC-32 for file 'archive/data/2'"),
    ("a state dict", lambda path: torch.save({"a": torch.zeros(3)}, path), "torch.jit.save writes it, not torch.save"),
    ("another zip", zipped(x="1"), "it is a zip archive without code"),
]
ALONE = [
    *((name, *fault) for name in MODELS for fault in EVERYWHERE),
    *(("preprocess.json", *fault) for fault in BUNDLE),
    *(("postprocess.json", *fault) for fault in WEIGHT),
    *(("vocab.txt", *fault) for fault in VOCABULARY),
    *(("checkpoint.tl", *fault) for fault in FOREST),
    *(("model.pt", *fault) for fault in ENCODER),
]
TOGETHER: list[tuple[str, str, Fault, str, str]] = [  # the last: which model refuses to start
    (
        "another bundle",
        "preprocess.json",
        among("mean", 7.5),
        r"checkpoint.tl was made with another preprocess.json",
        "cuml",
    ),
    (
        "another vocabulary",
        "vocab.txt",
        VOCABULARY[-1][1],
        "model.pt was made with another vocab.txt than",
        "bert-large",
    ),
]

"""What the features and the tokens cost on one core of the host, beside plain Python and Hugging Face's tokenizer.

    python benchmarks/features.py [--num-turns 30]

Texts are the CLEAR corpus's where SHOAL_DATA_DIR names its folder, else shoal's own; the word lists are theirs. All
ways take turns over the same texts, each in one thread, after each has seen all of them once; before that their answers
are compared. Times are those of the processor, of this process alone, so that what else the machine does counts
little. The result, with hardware and versions, goes to benchmarks/results/features-DATE.json.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import json
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from shoal.encoders.packaged import SMALL_ENCODER
from shoal.machine import describe_machine, library_versions
from shoal.readability.corpus import find_corpus
from shoal.readability.encoder import load_encoder
from shoal.readability.forest import fit_bundle
from shoal.readability.preprocess_config import Bundle
from shoal.readability.reader import Features, Reader
from shoal.text.tokens import WordPiece, decode_texts
from shoal.text.words import TokenCoder

BATCHES = (1, 64, 512)
NUM_SINGLES = 24  # a turn, of single texts
Ways = dict[str, Callable[[list[bytes]], Any]]


class Plain:
    """The features by regular expressions, dictionaries and a ``Counter``, a text at a time.

    It knows the characters of Unicode's first plane: classes of more are slow.
    """

    def __init__(self, bundle: Bundle) -> None:
        characters = [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000]
        category = {c: unicodedata.category(c) for c in characters}
        signs = "".join(re.escape(c) for c in characters if category[c][0] == "P" or (c.isascii() and c in "$+<=>^`|~"))
        dropped = "".join(c for c in characters if category[c] in ("Cc", "Cf", "Co") and c not in "\t\n\r")
        self._tokens = re.compile(f"[{signs}]|[^\\s{signs}]+")
        self._marks = re.compile(f"[{''.join(c for c in characters if category[c] == 'Mn')}]+")
        self._dropped = re.compile(f"[{re.escape(dropped)}\ufffd]+")
        self._chinese = re.compile("([\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")
        self._runs = re.compile(r"[.!?…](?:\s*[.!?…])*")
        self._stop_words, self._listed = frozenset(bundle.stop_words), (*bundle.frequent, *bundle.rare)
        self._mean, self._std = np.array(bundle.mean), np.array(bundle.std)

    def __call__(self, texts: list[bytes]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """FP32 ``[len(texts), 207]``."""
        raw = np.array([self._count(text.decode()) for text in texts])
        features: np.ndarray[Any, np.dtype[np.float32]] = ((raw - self._mean) / self._std).astype(np.float32)
        return features

    def _count(self, text: str) -> list[float]:
        text = self._dropped.sub("", text)
        if not text.isascii():
            text = self._marks.sub("", unicodedata.normalize("NFD", self._chinese.sub(r" \1 ", text)))
        text = text.lower()
        tokens = self._tokens.findall(text)
        counts, stop_words = Counter(tokens), self._stop_words
        num_words = num_different = num_stops = 0
        for token, count in counts.items():
            if token.isalpha() or any(c.isalpha() or c.isdecimal() for c in token):
                num_words += count
                num_different += 1
                if token in stop_words:
                    num_stops += count
        if not num_words:
            return [0.0] * len(self._mean)
        runs = list(self._runs.finditer(text))
        rest = text[runs[-1].end() :] if runs else text
        sentences = len(runs) + any(c.isalpha() or c.isdecimal() for c in rest)
        find = counts.get
        return [
            num_words, num_different, len(tokens) - num_words, sentences, num_words / sentences, num_stops,
            num_stops / sentences, *[find(word, 0) / num_words for word in self._listed],
        ]  # fmt: skip


def main(num_turns: int = 30) -> None:
    """Measure and record."""
    corpus = find_corpus()
    encoder = load_encoder(SMALL_ENCODER, seed=0)
    bundle = fit_bundle(corpus.texts, vocabulary_sha256="0" * 64, is_lowercase=True, max_length=256)
    texts = [text.encode() for text in corpus.texts]
    wordpiece, features = WordPiece(encoder.vocabulary), Features(bundle)
    encode = TokenCoder(features.lexicon)
    read = Reader(encoder.vocabulary, bundle)
    ways: Ways = {
        "features, plain Python": Plain(bundle),
        "features": lambda batch: features(encode(decode_texts(batch))),
        "tokens, Hugging Face": lambda batch: hugging_face(wordpiece, batch),
        "tokens": lambda batch: wordpiece.encode(decode_texts(batch)),
        "tokens and features": lambda batch: read(decode_texts(batch)),
    }
    different = compare(ways, texts)
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": library_versions("numpy", "tokenizers"),
        "corpus": corpus.name,
        "texts": len(texts),
        "mean_bytes": round(float(np.mean([len(text) for text in texts])), 1),
        "mean_words": round(float(corpus.num_words.mean()), 1),
        "answers_that_differ": different,
        "batches": {str(size): summary(measure(ways, texts, size, num_turns)) for size in BATCHES},
    }
    path = Path(__file__).parent / "results" / f"features-{result['date']}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def hugging_face(wordpiece: WordPiece, batch: list[bytes]) -> tuple[Any, Any]:
    """Token ids and mask by Hugging Face's tokenizer, whole texts at a time, framed as ours are."""
    found = wordpiece._tokenizer.encode_batch_fast([text.decode() for text in batch], add_special_tokens=False)
    rows = [each.ids[: wordpiece.max_length - 2] for each in found]
    width = min(wordpiece.max_length, -(-(max(map(len, rows)) + 2) // 8) * 8)
    ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros_like(ids)
    for row, pieces in enumerate(rows):
        ids[row, : len(pieces) + 2] = wordpiece.ids.cls, *pieces, wordpiece.ids.sep
        mask[row, : len(pieces) + 2] = 1
    return ids, mask


def compare(ways: Ways, texts: list[bytes]) -> dict[str, int]:
    """In how many texts the ways to one answer differ; all have seen all texts after it."""
    ids, mask, features = ways["tokens and features"](texts)
    differing = {
        "features, plain Python": features != ways["features, plain Python"](texts),
        "features": features != ways["features"](texts),
        **{
            name: (np.stack([ids, mask]) != np.stack(ways[name](texts))).any(axis=0)
            for name in ("tokens", "tokens, Hugging Face")
        },
    }
    return {name: int(each.any(axis=1).sum()) for name, each in differing.items()}


def measure(ways: Ways, texts: list[bytes], size: int, num_turns: int) -> dict[str, list[float]]:
    """Seconds of the processor for each text, a turn each, way by way."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = np.random.default_rng(size).permutation(len(texts))
    for turn in range(num_turns):
        chosen = [texts[i] for i in order.take(range(turn * size, turn * size + max(size, NUM_SINGLES)), mode="wrap")]
        batches = [chosen[i : i + size] for i in range(0, len(chosen), size)]
        for name, way in ways.items():
            seconds[name].append(_time(way, batches) / len(chosen))
    return seconds


def _time(way: Callable[[list[bytes]], Any], batches: Sequence[list[bytes]]) -> float:
    start = time.process_time()
    for batch in batches:
        way(batch)
    return time.process_time() - start


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Microseconds a text, texts a second of one core, and how many times as many as by the other way."""
    medians = {name: float(np.median(each)) for name, each in seconds.items()}
    pairs = (("features, plain Python", "features"), ("tokens, Hugging Face", "tokens"))
    return {
        "microseconds_a_text": {
            name: {f"p{q}": round(1e6 * float(np.percentile(each, q)), 1) for q in (10, 50, 90)}
            for name, each in seconds.items()
        },
        "texts_a_second_of_a_core": {name: round(1 / each) for name, each in medians.items()},
        "median_of_paired_ratios": {
            f"{slow} / {fast}": round(float(np.median(np.divide(seconds[slow], seconds[fast]))), 2)
            for slow, fast in pairs
        },
    }


if __name__ == "__main__":
    typer.run(main)

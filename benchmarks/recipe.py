"""Single texts through the readability pipeline, tuned and in FP32, beside NVIDIA's published recipe in a Python loop.

    python benchmarks/recipe.py ARTIFACTS TUNED [--rounds 5]

ARTIFACTS is a folder of `shoal train`, TUNED one of `shoal tune --artifacts ARTIFACTS`. The recipe is that of NVIDIA's
article: Hugging Face's tokenizer, features in plain Python, TorchScript padded to 256 tokens in FP32, and the forest
(by Treelite). It reads the same artifacts, and its scores are compared with those of the pipeline in FP32. All three
take turns on excerpts of the corpus in SHOAL_DATA_DIR. The result, with hardware and versions, goes to
benchmarks/results/recipe-HIDDEN-DATE.json; HIDDEN is the encoder's width.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import treelite
import typer
from records import dumps, write_record
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.plan import Plan
from shoal.clients.local import load
from shoal.readability.corpus import find_corpus
from shoal.readability.evaluate import ENSEMBLE, OUTPUTS
from shoal.readability.evaluation import BLEND
from shoal.system.machine import describe_machine, library_versions

CORES = os.cpu_count() or 1
TEXTS = 24  # in a turn
SENTENCE_ENDS = {".", "!", "?", "…"}


class Recipe:
    """Texts to scores, as the article has it, in this process."""

    def __init__(self, artifacts: Path) -> None:
        bundle = json.loads((artifacts / "preprocess.json").read_text(encoding="utf-8"))
        self._weight = json.loads((artifacts / "postprocess.json").read_text(encoding="utf-8"))["bert_weight"]
        self._tokenizer, self._most = AutoTokenizer.from_pretrained(artifacts), bundle["max_length"]
        self._normalize = normalizers.BertNormalizer(lowercase=True).normalize_str
        self._split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
        self._stops, self._listed = set(bundle["stop_words"]), [*bundle["frequent"], *bundle["rare"]]
        self._mean, self._std = np.array(bundle["mean"]), np.array(bundle["std"])
        self._forest = treelite.Model.deserialize(str(artifacts / "checkpoint.tl"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._encoder = torch.jit.load(str(artifacts / "model.pt")).eval()

    def __call__(self, text: str) -> float:
        """Return the score."""
        given = self._tokenizer(
            [text], padding="max_length", truncation=True, max_length=self._most, return_tensors="pt"
        )
        with torch.inference_mode():
            bert = float(self._encoder(given["input_ids"], given["attention_mask"]))
        rows = ((np.array([self._count(text)]) - self._mean) / self._std).astype(np.float32)
        forest = float(treelite.gtil.predict(self._forest, rows, nthread=1).reshape(-1)[0])
        return self._weight * bert + (1 - self._weight) * forest

    def _count(self, text: str) -> list[float]:
        """Return the raw features of one text."""
        tokens = [token for token, _ in self._split(self._normalize(text))]
        words = [token for token in tokens if any(c.isalpha() or c.isdecimal() for c in token)]
        if not words:
            return [0.0] * (7 + len(self._listed))
        counts = Counter(words)
        sentences, is_open, was_end = 0, False, False
        for token in tokens:
            is_end = token in SENTENCE_ENDS
            sentences += is_end and not was_end
            is_open = not is_end and (is_open or token in counts)
            was_end = is_end
        sentences += is_open
        stops = sum(count for word, count in counts.items() if word in self._stops)
        return [
            len(words), len(counts), len(tokens) - len(words), sentences, len(words) / sentences, stops,
            stops / sentences, *(counts[word] / len(words) for word in self._listed),
        ]  # fmt: skip


def main(artifacts: Path, tuned: Path, rounds: int = 5) -> None:
    """Measure and record; milliseconds for one text, medians over rounds of each round's median."""
    corpus = find_corpus()
    order = np.random.default_rng(0).permutation(len(corpus))
    texts = [corpus.texts[row] for row in order[:TEXTS]]
    torch.set_num_threads(CORES)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        chosen = json.loads((tuned / "tuned.json").read_text(encoding="utf-8"))["dtype"]
        asks: dict[str, Callable[[str], Any]] = {"recipe": Recipe(artifacts)}
        forms: Sequence[tuple[str, dict[str, Any]]] = (
            ("fp32", {"plan": Plan(dtype="fp32")}), (chosen, {"tuned": tuned / "tuned.json"}),
        )  # fmt: skip
        for form, more in forms:
            made = compose(ENSEMBLE, Path(folder) / form, artifacts=artifacts, **more)
            pipeline = stack.enter_context(load(made / ENSEMBLE))
            (name,) = (tensor.name for tensor in pipeline.inputs if not tensor.is_optional)
            asks[form] = lambda text, pipeline=pipeline, name=name: pipeline(**{name: [text]})[OUTPUTS[BLEND]].item()
        scores = {form: np.array([ask(text) for text in texts]) for form, ask in asks.items()}
        times: dict[str, list[float]] = {form: [] for form in asks}
        for _ in range(rounds):
            each: dict[str, list[float]] = {form: [] for form in asks}
            for text in texts:
                for form, ask in asks.items():
                    start = time.perf_counter()
                    ask(text)
                    each[form].append(1e3 * (time.perf_counter() - start))
            for form, found in each.items():
                times[form].append(float(np.median(found)))
    hidden = int(torch.jit.load(str(artifacts / "model.pt")).state_dict()["head.weight"].shape[1])
    result = {
        "date": time.strftime("%Y-%m-%d"), "machine": describe_machine(),
        "versions": library_versions("torch", "openvino", "transformers", "treelite"), "rounds": rounds,
        "texts": TEXTS, "hidden": hidden,
        "p50_ms": {form: round(float(np.median(found)), 2) for form, found in times.items()},
        "relative_to_recipe": {
            form: round(float(np.median(np.divide(found, times["recipe"]))), 3) for form, found in times.items()
        },
        "greatest_difference_of_fp32": float(np.abs(scores["fp32"] - scores["recipe"]).max()),
    }  # fmt: skip
    print(dumps(result))
    print(write_record(f"recipe-{hidden}", result))


if __name__ == "__main__":
    typer.run(main)

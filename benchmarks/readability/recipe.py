"""The pipeline as its users write it without shoal: Hugging Face's tokenizer, features in plain Python, TorchScript.

Padded to 256 tokens, in FP32 and with scikit-learn's forest it is the published recipe. Padded to the longest text,
frozen, in the encoder's dtype and with Treelite's forest it is what a careful user would put behind LitServe or
PyTriton. It reads the same artifacts as shoal, so that its scores are the same.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SENTENCE_ENDS = {".", "!", "?", "…"}

Predict = Callable[[Any], Any]  # features FP32 [rows, 207] to scores


class PlainFeatures:
    """207 features of one text, counted in plain Python, and their z-scores; ``bundle`` is ``preprocess.json``'s."""

    def __init__(self, bundle: dict[str, Any]) -> None:
        from tokenizers import normalizers, pre_tokenizers

        self._normalize = normalizers.BertNormalizer(lowercase=True).normalize_str
        self._split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
        self._stop_words = set(bundle["stop_words"])
        self._listed = [*bundle["frequent"], *bundle["rare"]]
        self._mean, self._std = np.array(bundle["mean"]), np.array(bundle["std"])

    def __call__(self, texts: Sequence[str]) -> Any:
        """FP32 ``[len(texts), 207]``."""
        raw = np.array([self.count(text) for text in texts])
        return ((raw - self._mean) / self._std).astype(np.float32)

    def count(self, text: str) -> list[float]:
        """The raw features of one text."""
        tokens = [token for token, _ in self._split(self._normalize(text))]
        words = [token for token in tokens if any(c.isalpha() or c.isdecimal() for c in token)]
        if not words:
            return [0.0] * (7 + len(self._listed))
        counts = Counter(words)
        known = set(counts)
        sentences, is_open, was_end = 0, False, False
        for token in tokens:
            is_end = token in SENTENCE_ENDS
            sentences += is_end and not was_end
            is_open = not is_end and (is_open or token in known)
            was_end = is_end
        sentences += is_open
        stops = sum(count for word, count in counts.items() if word in self._stop_words)
        return [
            len(words), len(counts), len(tokens) - len(words), sentences, len(words) / sentences, stops,
            stops / sentences, *(counts[word] / len(words) for word in self._listed),
        ]  # fmt: skip


class Recipe:
    """Texts to scores, in this process.

    ``padding`` is the tokenizer's (``max_length`` or ``longest``), ``dtype`` the trunk's; ``is_frozen`` folds the
    weights into the graph, as torch's documentation advises for serving; ``forest`` predicts on features.
    """

    def __init__(
        self,
        artifacts: Path,
        *,
        forest: Predict,
        padding: str = "max_length",
        dtype: str = "fp32",
        is_frozen: bool = False,
    ) -> None:
        import torch
        from transformers import AutoTokenizer

        bundle = json.loads((artifacts / "preprocess.json").read_text(encoding="utf-8"))
        self._weight = json.loads((artifacts / "postprocess.json").read_text(encoding="utf-8"))["bert_weight"]
        self._tokenizer = AutoTokenizer.from_pretrained(artifacts)
        self._max_length, self._padding = bundle["max_length"], padding
        self._features, self._forest = PlainFeatures(bundle), forest
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            encoder = torch.jit.load(str(artifacts / "model.pt")).eval()
            if dtype != "fp32":
                encoder.trunk.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
            self._encoder = torch.jit.freeze(encoder) if is_frozen else encoder

    def __call__(self, texts: Sequence[str]) -> Any:
        """FP64 ``[len(texts)]``."""
        import torch

        tokens = self._tokenizer(
            list(texts), padding=self._padding, truncation=True, max_length=self._max_length, return_tensors="pt"
        )
        with torch.inference_mode():
            bert = self._encoder(tokens["input_ids"], tokens["attention_mask"])
        forest = np.asarray(self._forest(self._features(texts)), np.float64).reshape(-1)
        return self._weight * bert.numpy().reshape(-1) + (1 - self._weight) * forest


def treelite_forest(artifacts: Path) -> Predict:
    """The forest of ``checkpoint.tl`` by Treelite's GTIL, on one thread."""
    import treelite

    model = treelite.Model.deserialize(str(artifacts / "checkpoint.tl"))
    return lambda rows: treelite.gtil.predict(model, rows, nthread=1)


def served_recipe(settings: dict[str, Any]) -> Recipe:
    """What LitServe and PyTriton serve here: ``artifacts``, ``dtype`` and ``threads`` as ``settings`` has them."""
    import torch

    torch.set_num_threads(settings["threads"])
    artifacts = Path(settings["artifacts"])
    forest = treelite_forest(artifacts)
    recipe = Recipe(artifacts, forest=forest, padding="longest", dtype=settings["dtype"], is_frozen=True)
    for num_texts in (1, 1, 2, 16):  # TorchScript compiles at its first calls
        recipe(["A text to begin with, of a few words."] * num_texts)
    return recipe

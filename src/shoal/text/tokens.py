"""Tokenizers built from an encoder's own file: BERT's ``vocab.txt``, or any ``tokenizer.json`` of Hugging Face.

Texts are tokenized on the host; for a GPU the ids are uploaded in one copy, then framed and padded there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from array_api_compat import device as device_of

from shoal.component.artifact_files import read_tokenizer
from shoal.component.base import Context
from shoal.component.parameters import Parameters, fixed_by
from shoal.component.tensors import Array, namespace
from shoal.errors import ArtifactError
from shoal.text.ragged import Ragged, Texts
from shoal.text.wordpiece import LENGTHS, WIDTH_MULTIPLE, WordPiece, read_vocabulary

VOCABULARY, TOKENIZER = "vocab.txt", "tokenizer.json"
MAX_LENGTH = 256
_FIX = f"Copy the encoder's own {TOKENIZER} there, or the {VOCABULARY} of a BERT; not both."
_PADDING = ("[PAD]", "<pad>")  # of BERT's and of RoBERTa's families

Encode: TypeAlias = Callable[[Texts], tuple[Array, Array]]


class FastTokenizer:
    """Hugging Face tokenizer of a ``tokenizer.json``, except that rows are truncated and right-padded here."""

    def __init__(self, path: Path, *, max_length: int) -> None:
        self._tokenizer = read_tokenizer(path)
        known = (self._tokenizer.token_to_id(token) for token in _PADDING)
        padding = self._tokenizer.padding or {"pad_id": next((token for token in known if token is not None), 0)}
        self._pad_id, self._max_length = int(padding["pad_id"]), max_length
        self._tokenizer.no_padding()
        self.num_special = int(self._tokenizer.num_special_tokens_to_add(is_pair=False))
        if self.num_special < max_length:
            self._tokenizer.enable_truncation(max_length)

    def pieces(self, texts: Texts) -> Ragged:
        """Return token ids with special tokens, cut at ``max_length``: INT64, one row per text, on the host."""
        return Ragged.from_rows([row.ids for row in self._tokenizer.encode_batch_fast(texts.strings)])

    def width(self, pieces: Ragged) -> int:
        """Return the padded width: the longest row's length rounded up to a multiple of 8, at most ``max_length``."""
        steps = -(-int(pieces.lengths.max()) // WIDTH_MULTIPLE)
        return min(self._max_length, max(1, steps) * WIDTH_MULTIPLE)

    def frame(self, pieces: Ragged, width: int) -> tuple[Array, Array]:
        """Pad ids to ``width``; return ids and mask, INT64 ``[rows, width]`` each, on the device of the pieces."""
        xp = namespace(pieces.values)
        columns = xp.arange(width, dtype=xp.int64, device=device_of(pieces.values))
        return pieces.pad(width, self._pad_id), xp.astype(columns < pieces.lengths[:, None], xp.int64)


def make_encoder(context: Context, parameters: Parameters, edge: str) -> Encode:
    """Return a function from texts to ids and mask, INT64 ``[rows, width]`` each, on the component's device.

    It reads the parameters ``max_length`` and ``lowercase``, and the one of the two artifacts that exists. The width
    is the longest row's length rounded up to a multiple of 8, at most ``max_length``; always ``max_length`` if the
    size ``t`` is declared. ``edge`` names the upload to a GPU.

    Raises:
        ArtifactError: a parameter or an artifact cannot be used, or neither artifact exists, or both do.
    """
    is_fixed, device = "t" in parameters.sizes, context.device
    default = parameters.sizes.get("t", MAX_LENGTH)
    max_length = parameters.whole("max_length", default, least=LENGTHS[0], most=LENGTHS[-1])
    parameters.expect("t", max_length, "its parameter max_length is")
    tokenizer = _read(context, parameters, max_length)

    def encode(texts: Texts) -> tuple[Array, Array]:
        pieces = tokenizer.pieces(texts)
        width = max_length if is_fixed else tokenizer.width(pieces)
        return tokenizer.frame(pieces.to(device, edge), width)

    return encode


def _read(context: Context, parameters: Parameters, max_length: int) -> WordPiece | FastTokenizer:
    with fixed_by(_FIX):
        vocabulary, whole = (context.optional_artifact(name) for name in (VOCABULARY, TOKENIZER))
    if vocabulary and whole:
        raise ArtifactError(f"Model {context.spec.name} has {VOCABULARY} and {TOKENIZER} in {context.folder}.", _FIX)
    if whole:
        return _read_whole(whole, parameters, max_length)
    if vocabulary:
        is_lowercase = parameters.flag("lowercase", default=True)
        with fixed_by(_FIX):
            return WordPiece(read_vocabulary(vocabulary), is_lowercase=is_lowercase, max_length=max_length)
    raise ArtifactError(
        f"Model {context.spec.name} misses its artifact {VOCABULARY} or {TOKENIZER} in {context.folder}.", _FIX
    )


def _read_whole(path: Path, parameters: Parameters, max_length: int) -> FastTokenizer:
    if parameters.text("lowercase"):
        raise parameters.refusal("lowercase", f"{TOKENIZER} says itself how case is treated", "")
    with fixed_by(_FIX):
        tokenizer = FastTokenizer(path, max_length=max_length)
    if tokenizer.num_special >= max_length:
        why = f"{TOKENIZER} adds {tokenizer.num_special} special tokens to each text"
        raise parameters.refusal("max_length", why, str(tokenizer.num_special + 1))
    return tokenizer

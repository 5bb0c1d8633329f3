"""Tokenizers on the host: BERT's, from a ``vocab.txt``, or any fast tokenizer, from a ``tokenizer.json``.

BERT's normalizer and pre-tokenizer process each whitespace-separated word on its own. So the tokens of a text are the
tokens of its words in order, and the tokens of each word can be cached: most words of a batch have been seen before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from reprlib import repr as shorten
from threading import Lock
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from shoal.errors import ArtifactError, InputError
from shoal.kit.component.context import Context
from shoal.kit.component.files import MAKE_AGAIN, describe_bytes, find_repeated, read_text, refusal
from shoal.kit.component.parameters import Parameters, fixed_by
from shoal.kit.component.spec import Array
from shoal.kit.text.tokenizer_files import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CLS, SEP, PAD, UNK, MASK = SPECIAL_TOKENS = ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]")
MAX_WORD_CHARS = 100  # BERT's max_input_chars_per_word: longer words are [UNK]
LENGTHS = range(3, 65_537)  # [CLS], a token and [SEP]; texts of more than 65,536 bytes are refused
WIDTH_MULTIPLE = 8  # widths in steps: at most 32 shapes up to 256 tokens, each compiled once by the encoder
VOCABULARY, TOKENIZER = "vocab.txt", "tokenizer.json"
MAX_LENGTH = 256
_FIX = f"Copy the encoder's own {TOKENIZER} there, or the {VOCABULARY} of a BERT; not both."
_PADDING = ("[PAD]", "<pad>")  # padding tokens of the BERT and RoBERTa families
# Limits of the cache: about 100 MB. A short word takes some 500 bytes; a long one may be one token per byte.
MOST_WORDS, MOST_CHARACTERS = 2**17, 2**21
# Words are split at these four characters only; other whitespace stays within a word.
_TO_SPACES = str.maketrans("\t\n\r", "   ")

T = TypeVar("T")
Encode: TypeAlias = Callable[[Sequence[str]], tuple[Array, Array]]
EncodePairs: TypeAlias = Callable[[Sequence[str], Sequence[str]], tuple[Array, Array, Array]]


def check_texts(texts: Iterable[bytes], *, name: str, max_bytes: int) -> None:
    """Check that each text is UTF-8 and not too long.

    Raises:
        InputError: a text is not UTF-8 or is too long; the message gives the tensor, the row and the fault.
    """
    for row, text in enumerate(texts):
        if len(text) > max_bytes:
            raise InputError(
                f"{name}[{row}] has {len(text)} bytes; at most {max_bytes} are allowed.",
                "Split the text, or raise the max_text_bytes parameter in the model's config.pbtxt.",
            )
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name}[{row}] is not valid UTF-8: byte 0x{text[error.start]:02x} at position {error.start}.",
                "Encode the text as UTF-8.",
            ) from None


def decode_texts(texts: Iterable[bytes]) -> list[str]:
    """Decode texts from UTF-8; ``check_texts`` must have accepted them."""
    return [text.decode() for text in texts]


class WordCache(Generic[T]):
    """Cache of the results of ``find`` by whitespace-separated word; emptied when full. Thread-safe.

    ``find`` takes a list of words and returns one result for each word. ``forget`` is called when the cache is emptied:
    all results for one text come from ``find`` after the same call of ``forget``. Both are called by one thread at a
    time.
    """

    def __init__(self, find: Callable[[list[str]], Sequence[T]], forget: Callable[[], None] = lambda: None) -> None:
        self._find, self._forget, self._lock = find, forget, Lock()
        self._known: dict[str, T] = {}
        self._num_characters = 0

    def __call__(self, texts: Iterable[str]) -> list[list[T]]:
        """Return one list per text: the results for its words, in order."""
        return [self._look_up(text.translate(_TO_SPACES).split(" ")) for text in texts]

    def _look_up(self, words: list[str]) -> list[T]:
        known = self._known
        try:
            return [*map(known.__getitem__, words)]  # most rows: all of their words are known
        except KeyError:
            with self._lock:
                if len(self._known) > MOST_WORDS or self._num_characters > MOST_CHARACTERS:
                    self._known, self._num_characters = {}, 0
                    self._forget()
                known = self._known
                new = [*dict.fromkeys(word for word in words if word not in known)]
                known.update(zip(new, self._find(new), strict=True))
                self._num_characters += sum(map(len, new))
            return [*map(known.__getitem__, words)]


def flatten(rows: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Concatenate the integers of all words of each row: one list per row."""
    return [[*chain.from_iterable(row)] for row in rows]


# --- BERT's vocabulary -------------------------------------------------------------------------------------------


def read_vocabulary(path: Path) -> list[str]:
    """Read the tokens of a ``vocab.txt``, in the order of their ids.

    Raises:
        ArtifactError: the file is not UTF-8 text, lacks a special token, has a blank line, or repeats a token.
    """
    text = read_text(path, "vocabulary")
    if what := describe_bytes(text[:32].encode()):
        raise refusal(path, "vocabulary", what)
    vocabulary = text.split("\n")
    if vocabulary[-1] == "":
        vocabulary.pop()
    fault = ""
    if missing := [token for token in SPECIAL_TOKENS if token not in vocabulary]:
        fault = f"lacks {', '.join(missing)}"
    elif blank := [number for number, token in enumerate(vocabulary, 1) if not token.strip(" \t\0")]:
        fault = f"has a blank line, number {blank[0]:,}"
    elif repeated := find_repeated(vocabulary):
        fault = f"holds a token twice: {shorten(repeated)}"
    if fault:
        raise ArtifactError(f"{path} {fault}.", f"Take vocab.txt from the encoder's own tokenizer. {MAKE_AGAIN}")
    return vocabulary


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens ``[CLS]`` and ``[SEP]``, which begin and end a row, and of ``[PAD]``."""

    cls: int
    sep: int
    pad: int


class WordPiece:
    """BERT's tokenizer over a vocabulary; a row has at most ``max_length`` tokens, with ``[CLS]`` and ``[SEP]``."""

    def __init__(self, vocabulary: Sequence[str], *, is_lowercase: bool = True, max_length: int = 256) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        vocab = {token: index for index, token in enumerate(vocabulary)}
        model = models.WordPiece(vocab, unk_token=UNK, max_input_chars_per_word=MAX_WORD_CHARS)
        self._tokenizer = Tokenizer(model)
        # strip_accents follows lowercase where it is not given, as in the published BERT models
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=is_lowercase)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        self.ids = SpecialIds(vocab[CLS], vocab[SEP], vocab[PAD])
        self.max_length = max_length
        self._words = WordCache(self.find)

    def find(self, words: list[str]) -> list[list[int]]:
        """Return the token ids of each word."""
        return [e.ids for e in self._tokenizer.encode_batch_fast(words, add_special_tokens=False)]

    def encode(self, texts: Sequence[str], width: int = 0) -> tuple[Array, Array]:
        """Return token ids and attention mask, INT64 ``[texts, tokens]`` each, padded on the right.

        The number of tokens is the longest row's, rounded up to a multiple of 8, at most ``max_length``; but at least
        ``width``.
        """
        return self.frame(flatten(self._words(texts)), width)

    def frame(self, rows: Sequence[Sequence[int]], width: int = 0) -> tuple[Array, Array]:
        """Put ``[CLS]`` and ``[SEP]`` around rows of token ids; return ids and mask as ``encode`` does."""
        framed = [[self.ids.cls, *row[: self.max_length - 2], self.ids.sep] for row in rows]
        return pad(framed, self.ids.pad, self.max_length, width)


def pad(rows: Sequence[Sequence[int]], fill: int, max_length: int, width: int = 0) -> tuple[Array, Array]:
    """Pad ``rows`` of token ids on the right with ``fill``; return ids and mask, INT64 ``[rows, tokens]`` each.

    The number of tokens is the longest row's, rounded up to a multiple of 8, at most ``max_length``; but at least
    ``width``.
    """
    longest = max([1, *map(len, rows)])
    width = max(width, min(max_length, -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE))
    ids, mask = np.full((len(rows), width), fill), np.zeros((len(rows), width), np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    return ids, mask


# --- any tokenizer -----------------------------------------------------------------------------------------------


class FastTokenizer:
    """Tokenizer from a ``tokenizer.json``. Of its truncation and padding settings, only the padding id is used."""

    def __init__(self, path: Path, *, max_length: int, is_pair: bool = False) -> None:
        self._tokenizer = read_tokenizer(path)
        known = (self._tokenizer.token_to_id(token) for token in _PADDING)
        padding = self._tokenizer.padding or {"pad_id": next((token for token in known if token is not None), 0)}
        self._pad_id, self._max_length = int(padding["pad_id"]), max_length
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.num_special = int(self._tokenizer.num_special_tokens_to_add(is_pair=is_pair))
        if is_pair:
            self._frame = _read_frame(self._tokenizer)
        elif self.num_special < max_length:
            self._tokenizer.enable_truncation(max_length)

    def encode(self, texts: Sequence[str], width: int = 0) -> tuple[Array, Array]:
        """Return token ids and attention mask, padded on the right, as ``WordPiece.encode`` does."""
        rows = [row.ids for row in self._tokenizer.encode_batch_fast(texts)]
        return pad(rows, self._pad_id, self._max_length, width)

    def encode_pairs(self, first: Sequence[str], second: Sequence[str], width: int = 0) -> tuple[Array, Array, Array]:
        """Return token ids, attention mask and segment ids of pairs of texts, padded as in ``encode``.

        A pair that is too long loses tokens of its longer text, as in transformers (``longest_first``).
        """
        # The library's own truncation joins each rest of one text with each rest of the other: 256 times the work where
        # both are 16 times too long.
        found = (self._tokenizer.encode_batch_fast(texts, add_special_tokens=False) for texts in (first, second))
        rows: list[list[int]] = []
        kinds: list[list[int]] = []
        for pair in zip(*found, strict=True):
            cut = _cut_longest(pair[0].ids, pair[1].ids, self._max_length - self.num_special)
            parts = [([part.token] if part.place is None else cut[part.place], part.segment) for part in self._frame]
            rows.append([token for tokens, _ in parts for token in tokens])
            kinds.append([segment for tokens, segment in parts for _ in tokens])
        ids, mask = pad(rows, self._pad_id, self._max_length, width)
        return ids, mask, pad(kinds, 0, self._max_length, width)[0]


class _Part(NamedTuple):
    """Part of a pair: the text of this ``place`` (0 or 1), or with None a special ``token``; and its segment id."""

    place: int | None
    token: int
    segment: int


def _read_frame(tokenizer: Tokenizer) -> list[_Part]:
    """Return how a tokenizer joins two texts, from a pair that it joins.

    Raises:
        ArtifactError: it has no token for the letter a.
    """
    found, frame = tokenizer.encode("a", "a"), list[_Part]()
    for part in map(_Part, found.sequence_ids, found.ids, found.type_ids):
        if part.place is None or part.place not in [each.place for each in frame]:
            frame.append(part)
    if not {0, 1} <= {part.place for part in frame}:
        raise ArtifactError(f"{TOKENIZER} has no token for the letter a.")
    return frame


def _cut_longest(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Cut a pair to ``room`` tokens at the end of its longer text, and then of both, as ``longest_first`` does."""
    short, long = sorted((len(first), len(second)))
    if short + long <= room:
        return first, second
    short = min(short, room // 2)
    lengths = (short, room - short) if len(first) <= len(second) else (room - short, short)
    return first[: lengths[0]], second[: lengths[1]]


def make_encoder(context: Context, parameters: Parameters, edge: str) -> Encode:
    """Return a function that converts texts to token ids and attention mask, INT64 ``[texts, tokens]`` each.

    The tokenizer is read from ``vocab.txt`` or ``tokenizer.json``, whichever exists, and from the parameters
    ``max_length`` and ``lowercase``. The number of tokens is the longest row's, rounded up to a multiple of 8, at most
    ``max_length``; it is always ``t`` if the configuration declares this size of the outputs. The arrays are on the
    component's device; on a GPU, both are uploaded in one copy, which its ledger counts at ``edge``.

    Raises:
        ArtifactError: a parameter or an artifact cannot be used, or neither artifact exists, or both do.
    """
    device, (max_length, width) = context.device, _read_length(parameters)
    tokenizer = _read(context, parameters, max_length)

    def encode(texts: Sequence[str]) -> tuple[Array, Array]:
        both = device.put(np.stack(tokenizer.encode(texts, width)), edge)
        return both[0], both[1]

    return encode


def make_pair_encoder(context: Context, parameters: Parameters, edge: str) -> EncodePairs:
    """Return a function that converts pairs of texts to token ids, attention mask and segment ids, INT64 each.

    It is as that of ``make_encoder``; the tokenizer is ``tokenizer.json`` alone, which says how it joins two texts.

    Raises:
        ArtifactError: a parameter or the artifact cannot be used.
    """
    device, (max_length, width) = context.device, _read_length(parameters)
    with fixed_by(f"Copy the encoder's own {TOKENIZER} there."):
        path = context.artifact(TOKENIZER)
    tokenizer = _read_whole(path, parameters, max_length, is_pair=True)

    def encode(first: Sequence[str], second: Sequence[str]) -> tuple[Array, Array, Array]:
        three = device.put(np.stack(tokenizer.encode_pairs(first, second, width)), edge)
        return three[0], three[1], three[2]

    return encode


def _read_length(parameters: Parameters) -> tuple[int, int]:
    """Return the most tokens of a row, and the least width of the arrays, which is the same if they have a size."""
    default = parameters.sizes.get("t", MAX_LENGTH)
    max_length = parameters.whole("max_length", default, least=LENGTHS[0], most=LENGTHS[-1])
    parameters.expect("t", max_length, "its parameter max_length is")
    return max_length, max_length if "t" in parameters.sizes else 0


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


def _read_whole(path: Path, parameters: Parameters, max_length: int, *, is_pair: bool = False) -> FastTokenizer:
    if parameters.text("lowercase"):
        raise parameters.refusal("lowercase", f"{TOKENIZER} says itself how case is treated", "")
    with fixed_by(_FIX):
        tokenizer = FastTokenizer(path, max_length=max_length, is_pair=is_pair)
    if tokenizer.num_special >= max_length:
        why = f"{TOKENIZER} adds {tokenizer.num_special} special tokens to each {'pair' if is_pair else 'text'}"
        raise parameters.refusal("max_length", why, str(tokenizer.num_special + 1))
    return tokenizer

"""Streams of token ids to pieces of text: detokenizer, stop strings, counts, and the reason of the end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from reprlib import repr as shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.component import Array, Arrays, Parameters, check_file
from shoal.errors import ArtifactError, InputError
from shoal.generation.detokenizer import Detokenizer
from shoal.generation.stops import StopCutter
from shoal.generation.wordlists import MAX_WORDS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_STREAMS = 10_000
_MOST_TOKENS = 2**32 - 1
_FIX_CARRY = 'Send what the prompt step made: {"stops": ["..."], "num_input_tokens": 5}.'


class Piece(NamedTuple):
    """One answer of a stream: new text, and counts of tokens so far.

    ``finish_reason`` is empty until the stream ends, or a stop string cuts its text (``stop``). ``num_output_tokens``
    counts the tokens up to this answer, or up to the answer in which the stop string was completed.
    """

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int


class TextStream:
    """The text of one stream of token ids, cut before its first stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str] = (), num_input_tokens: int = 0) -> None:
        """Take the tokenizer, which streams may share, the stop strings, and the number of the prompt's tokens.

        Raises:
            InputError: a stop string is empty.
        """
        self._detokenizer, self._cutter = Detokenizer(tokenizer), StopCutter(stops)
        self._num_input_tokens, self._num_output_tokens = num_input_tokens, 0
        self._is_cut = False

    def step(self, ids: Sequence[int], *, last: bool = False, reason: str = "") -> Piece:
        """Take the next ids: none, one or several; ``reason`` is why the stream ends, with the ``last`` ones.

        After a stop string the text is empty and the reason stays ``stop``.

        Raises:
            InputError: an id is negative; nothing of ``ids`` was taken.
        """
        text = ""
        if not self._is_cut:
            found = self._detokenizer.step(ids, last=last)
            text, self._is_cut = self._cutter.step(found, last=last)
            self._num_output_tokens += len(ids)
        reason = "stop" if self._is_cut else reason if last else ""
        return Piece(text, reason, self._num_input_tokens, self._num_output_tokens)

    def take(self, answer: Arrays) -> Piece:
        """Take an engine's answer of one row: ``output_ids``, ``sequence_length``, ``is_last`` and ``finish_reason``.

        Raises:
            InputError: a shape or value cannot be used.
        """
        last = bool(answer["is_last"][0, 0])
        return self.step(_read_ids(answer), last=last, reason=_read_text(answer, "finish_reason"))


class Completions:
    """Answers requests of the component ``completion``: token ids of many streams in, text out. Threads may share it.

    Each stream keeps its state from its first answer to its last one. If there are more than ``most_streams``, the
    one that was idle for the longest time is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, most_streams: int = MOST_STREAMS) -> None:
        self._tokenizer, self._most_streams = tokenizer, most_streams
        self._streams: dict[int, TextStream] = {}  # by id, the one that is idle for the longest time first
        self._lock = threading.Lock()

    @classmethod
    def read(cls, parameters: Parameters) -> Completions:
        """Read the tokenizer of the folder that the parameter ``model`` names.

        Raises:
            ArtifactError: the parameter is not the absolute path of a folder, or its tokenizer.json cannot be read.
        """
        from tokenizers import Tokenizer

        folder = Path(parameters.text("model"))
        if not folder.is_absolute() or not folder.is_dir():
            raise parameters.refusal("model", "expected the absolute path of a folder with weights", "/models/llama")
        path = folder / "tokenizer.json"
        fix = "Let the parameter model name the folder of a model with its own tokenizer.json."
        try:
            check_file(path, "tokenizer")
            return cls(Tokenizer.from_file(str(path)))
        except ArtifactError as error:
            raise ArtifactError(error.what, fix) from error
        except Exception as error:  # the library has no exception class for unreadable files
            raise ArtifactError(f"{path} is not a fast tokenizer: {error}.", fix) from error

    def answer(self, inputs: Arrays) -> dict[str, Array]:
        """Answer one request: one row of tensors on the host, as the configuration of ``completion`` declares them.

        ``output_ids`` INT32 ``[1, 1, tokens]`` (rows, beams, new tokens), of which the first ``sequence_length`` INT32
        ``[1, 1]`` count. ``stream_id`` INT64 and ``is_last`` BOOL ``[1, 1]`` come together; without them the answer is
        whole. Optional are ``carry`` (read in a stream's first answer) and ``finish_reason``, STRING ``[1, 1]``.

        Returns ``text_output`` and ``finish_reason`` STRING, ``num_input_tokens`` and ``num_output_tokens`` UINT32, all
        ``[1, 1]``.

        Raises:
            InputError: a shape or value cannot be used; the stream stays as it was.
        """
        ids, reason = _read_ids(inputs), _read_text(inputs, "finish_reason")
        if ("stream_id" in inputs) != ("is_last" in inputs):
            there, missing = ("stream_id", "is_last") if "stream_id" in inputs else ("is_last", "stream_id")
            raise InputError(f"There is {there} and no {missing}.", "Send both, or neither for a whole answer.")
        with self._lock:
            if "stream_id" not in inputs:
                piece = self.open(inputs).step(ids, last=True, reason=reason)
            else:
                last, stream_id = bool(inputs["is_last"][0, 0]), int(inputs["stream_id"][0, 0])
                stream = self._streams.get(stream_id) or self.open(inputs)
                piece = stream.step(ids, last=last, reason=reason)
                self._keep(stream_id, None if last else stream)
        return pack_piece(piece)

    def _keep(self, stream_id: int, stream: TextStream | None) -> None:
        self._streams.pop(stream_id, None)
        if stream is not None:
            self._streams[stream_id] = stream
        if len(self._streams) > self._most_streams:
            del self._streams[next(iter(self._streams))]

    def open(self, inputs: Arrays) -> TextStream:
        """Return the text of a new stream, with the stop strings and the prompt's length of ``carry``, if there is one.

        Raises:
            InputError: ``carry`` cannot be read.
        """
        stops, num_input_tokens = _read_carry(_read_text(inputs, "carry"))
        return TextStream(self._tokenizer, stops, num_input_tokens)


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """Return the whole answer of a stream."""
    return pieces[-1]._replace(text="".join(piece.text for piece in pieces))


def pack_piece(piece: Piece) -> dict[str, Array]:
    """Return a piece as tensors of one row: ``text_output`` and ``finish_reason`` STRING, the counts UINT32."""
    return {
        "text_output": _string(piece.text),
        "finish_reason": _string(piece.finish_reason),
        "num_input_tokens": np.array([[piece.num_input_tokens]], np.uint32),
        "num_output_tokens": np.array([[piece.num_output_tokens]], np.uint32),
    }


def _read_ids(inputs: Arrays) -> list[int]:
    ids, lengths = inputs["output_ids"], inputs["sequence_length"]
    if ids.shape[:2] != (1, 1) or lengths.shape != (1, 1):
        raise InputError(
            f"output_ids has shape {list(ids.shape)} and sequence_length {list(lengths.shape)}.",
            "Send one row with one beam: [1, 1, tokens] and [1, 1].",
        )
    length = int(lengths[0, 0])
    if not 0 <= length <= ids.shape[2]:
        raise InputError(
            f"sequence_length is {length}, and output_ids has {ids.shape[2]} tokens.", "Send the number of new tokens."
        )
    return [int(token) for token in ids[0, 0, :length]]


def _read_text(inputs: Arrays, name: str) -> str:
    value = inputs[name][0, 0] if name in inputs else b""
    try:
        return str(value.decode())
    except UnicodeDecodeError:
        raise InputError(f"{name} is not UTF-8: {shorten(value)}.", "Send UTF-8.") from None


def _read_carry(text: str) -> tuple[list[str], int]:
    """Return the stop strings and the number of the prompt's tokens; none and 0 for an empty text."""
    if not text:
        return [], 0
    try:
        carry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"carry is not JSON ({error}): {shorten(text)}.", _FIX_CARRY) from None
    if not isinstance(carry, dict):
        raise InputError(f"carry is {shorten(carry)}, expected an object.", _FIX_CARRY)
    stops, number = (carry.get(name) for name in ("stops", "num_input_tokens"))
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InputError(f"carry has the stops {shorten(stops)}, expected texts that are not empty.", _FIX_CARRY)
    if len(stops) > MAX_WORDS:
        raise InputError(f"carry has {len(stops)} stops; at most {MAX_WORDS} are allowed.", _FIX_CARRY)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _MOST_TOKENS:
        raise InputError(f"carry has num_input_tokens {shorten(number)}, expected a number of tokens.", _FIX_CARRY)
    return stops, number


def _string(text: str) -> Any:
    return np.array([[text.encode()]], np.object_)

"""Conversion of token ids to text: the stream of one answer, stop strings, and the component ``completion``.

``TextStream`` converts a stream of token ids to pieces. ``StopCutter`` cuts a text before its first stop string.
``Completions`` keeps the streams of many requests.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from reprlib import repr as shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.errors import InputError
from shoal.kit.component.parameters import Parameters, fixed_by
from shoal.kit.component.spec import BATCH_INDEX, Array, Arrays
from shoal.kit.generation.answers import join_rows, read_log_probs, split_rows
from shoal.kit.generation.contract import MAX_WORDS, LogProbs, naming_row
from shoal.kit.generation.detokenizer import Detokenizer, find_specials, spell
from shoal.kit.generation.pieces import Piece, join_pieces
from shoal.kit.generation.tokenizer import read_model_tokenizer
from shoal.kit.generation.weights import read_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_STREAMS = 10_000
RETURNS = ("cumulative_logprob", "logprobs")  # outputs that a request asks for, by inputs named return_...
# of ``carry``, with the defaults
_REST = (
    ("counts_each", False),
    ("returns", ()),
    ("num_echoed", 0),
    ("keeps_specials", False),
    ("begin", ""),
    ("echoes_alone", False),
)
_LEAST = -9999.0  # in JSON, which has no infinity; as in OpenAI's API
_MOST_TOKENS = 2**32 - 1
_FIRST_MARK = 0xD800  # of the surrogates, which no decoded text has


class TextStream:
    """Converts one stream of token ids to text, up to the stop string that is complete first.

    A stop string that is complete within the first ``min_tokens`` tokens is a part of the text, as in vLLM.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Iterable[str] = (),
        num_input_tokens: int = 0,
        min_tokens: int = 0,
        counts_each: bool = False,
        returns: Sequence[str] = (),
        num_echoed: int = 0,
        keeps_specials: bool = False,
        begin: str = "",
        echoes_alone: bool = False,
    ) -> None:
        """Take the tokenizer (several streams may share it), the stop strings, and the prompt's number of tokens.

        With ``counts_each``, ``pack`` counts the new tokens of each piece alone, as NVIDIA's vLLM backend does.
        ``returns`` are names in ``RETURNS``, of log probabilities that ``pack`` adds. The first ``num_echoed`` ids are
        the prompt's, and no new tokens: they are not counted, and no stop string ends the text in them. With
        ``keeps_specials``, special tokens are a part of the text. ``begin``, the end of the prompt, is put before it.
        With ``echoes_alone``, new tokens are left out.

        Raises:
            InputError: a stop string is empty.
        """
        stops = [*stops]
        self._has_stops, self._marks = bool(stops), _mark_specials(tokenizer, stops)
        marked = [_replace(stop, self._marks) for stop in stops] if self._marks else []
        self._detokenizer = Detokenizer(tokenizer, keeps_specials=keeps_specials)
        self._cutter = StopCutter([*stops, *marked])
        self._num_input_tokens, self._num_output_tokens = num_input_tokens, -num_echoed
        self._min_tokens, self._counts_each = min_tokens, counts_each
        self._num_packed = 0  # new tokens in the pieces that were packed
        self._tokenizer, self._returns, self._total = tokenizer, returns, 0.0
        self._is_first, self._keeps_specials = True, keeps_specials  # of the tokens that are described
        self._logprobs: list[dict[int, Any]] = []  # of tokens that are not in a packed piece
        self._ignored = 0  # characters that the detokenizer holds back, of the first min_tokens tokens
        self._is_cut = False
        self._begin, self._echoes_alone = begin, echoes_alone

    def step(
        self, ids: Sequence[int], *, last: bool = False, reason: str = "", log_probs: Sequence[LogProbs] = ()
    ) -> Piece:
        """Take the next ids (none, one or several), and return the text that is complete.

        ``last`` says that the stream ends with these ids, and ``reason`` says why. After a stop string, the text is
        empty and the reason is ``stop``. ``log_probs`` has the log probabilities of each id, for ``pack``.

        Raises:
            InputError: an id is negative; nothing of ``ids`` was taken.
        """
        before = self._num_output_tokens
        if self._echoes_alone:
            ids, reason = ids[: max(0, -before)], "length"
        text = "" if self._is_cut else self._take(ids, last)
        text, self._begin = self._begin + text, ""
        described = zip(ids[: self._num_output_tokens - before], log_probs, strict=False)
        for number, (token, place) in enumerate(described, before):
            self._total += place.chosen if number >= 0 else 0
            if "logprobs" in self._returns:
                self._logprobs.append(self._describe(token, place))
        reason = "stop" if self._is_cut else reason if last else ""
        return Piece(text, reason, self._num_input_tokens, self._num_output_tokens)

    def _take(self, ids: Sequence[int], last: bool) -> str:
        if not self._has_stops or min(ids, default=0) < 0:  # negative ids are refused before any is taken
            text = self._detokenizer.step(ids, last=last)
            self._num_output_tokens += len(ids)
            return text
        texts = []
        for token in ids:  # one by one, to know the token that completes a stop string
            self._num_output_tokens += 1
            if token in self._marks:  # it is in a stop string, and ends what is held back before it
                text = self._detokenizer.step([], last=True) + self._marks[token][1]
            else:
                text = self._detokenizer.step([token])
            texts.append(self._cut(text))
            # A stop string that is complete counts now, although other tokens could still change its text.
            if not self._is_cut and (held := self._detokenizer.peek()):
                if self._num_output_tokens <= self._min_tokens:
                    self._ignored = len(held)
                elif self._cutter.finds(held, self._ignored):
                    texts.append(self._cut(self._detokenizer.step([], last=True)))
            if self._is_cut:
                break
        if last and not self._is_cut:
            texts.append(self._cut(self._detokenizer.step([], last=True), last=True))
        text = "".join(texts)
        for _, mark in self._marks.values():
            text = text.replace(mark, "")
        return text

    def _cut(self, text: str, *, last: bool = False) -> str:
        ignored = len(text) if self._num_output_tokens <= self._min_tokens else self._ignored
        if text:
            self._ignored = 0
        found, self._is_cut = self._cutter.step(text, last=last, ignored=ignored)
        return found

    def take(self, answer: Arrays) -> Piece:
        """Take one answer of an engine, and return the text that is complete.

        The answer has one row of ``output_ids``, ``sequence_length``, ``is_last`` and ``finish_reason``.

        Raises:
            InputError: a shape or value cannot be used.
        """
        last, log_probs = bool(answer["is_last"][0, 0]), read_log_probs(answer)
        return self.step(_read_ids(answer), last=last, reason=_read_text(answer, "finish_reason"), log_probs=log_probs)

    def _describe(self, token: int, place: LogProbs) -> dict[int, Any]:
        """Return the log probabilities of the chosen ``token`` and of the most probable ones, as vLLM has them."""
        ranks: dict[int, int | None] = {token: None, **{each: at + 1 for at, each in enumerate(place.top_ids)}}
        found = {token: place.chosen, **dict(zip(place.top_ids, place.top, strict=True))}
        found.pop(-1, None)  # what follows nothing has none
        is_first, keeps = self._is_first, self._keeps_specials
        self._is_first = is_first and _is_unwritten(self._tokenizer, token, keeps)
        return {
            each: {
                "logprob": None if math.isnan(value) else max(float(str(np.float32(value))), _LEAST),
                "rank": ranks[each],
                **_spell(self._tokenizer, each, is_first, keeps),
            }
            for each, value in found.items()
        }

    def cancelled(self) -> Piece:
        """Return the last piece of a stream whose client asked for the end: without text."""
        return Piece("", "cancelled", self._num_input_tokens, self._num_output_tokens)

    def pack(self, piece: Piece) -> dict[str, Array]:
        """Return a piece of this stream, the next one that the client gets, as tensors of one row.

        ``text_output`` and ``finish_reason`` are STRING, the counts UINT32. If the request asks for them,
        ``cumulative_logprob`` is FP32, and ``logprobs`` STRING, a JSON list with an object for each token.
        """
        count = piece.num_output_tokens - (self._num_packed if self._counts_each else 0)
        self._num_packed = piece.num_output_tokens
        more: dict[str, Array] = {}
        if "cumulative_logprob" in self._returns:
            more["cumulative_logprob"] = np.array([[self._total]], np.float32)
        if "logprobs" in self._returns:
            more["logprobs"] = _string(json.dumps(self._logprobs, ensure_ascii=False))
            self._logprobs = []
        return {
            "text_output": _string(piece.text),
            "finish_reason": _string(piece.finish_reason),
            "num_input_tokens": np.array([[piece.num_input_tokens]], np.uint32),
            "num_output_tokens": np.array([[max(0, count)]], np.uint32),
            **more,
        }


def _is_unwritten(tokenizer: Tokenizer, token: int, keeps_specials: bool) -> bool:
    """Whether a token has no part in an answer's text, since it is special."""
    return not keeps_specials and tokenizer.id_to_token(token) in find_specials(tokenizer)


@lru_cache(maxsize=2**14)
def _spell(tokenizer: Tokenizer, token: int, is_first: bool, keeps_specials: bool) -> dict[str, Any]:
    """Return a token's text and, if they are others than the text's, its bytes in an answer."""
    text, spelled = tokenizer.decode([token], skip_special_tokens=False), spell(tokenizer, token, is_first=is_first)
    spelled = b"" if _is_unwritten(tokenizer, token, keeps_specials) else spelled
    return {"decoded_token": text} | ({} if spelled == text.encode() else {"bytes": [*spelled]})


def _mark_specials(tokenizer: Tokenizer, stops: Sequence[str]) -> dict[int, tuple[str, str]]:
    """Return, by token id, the special tokens in stop strings: each one's name, and a surrogate for it.

    Special tokens have no text. So these characters are put in their place in the text, until it is cut.
    """
    specials = find_specials(tokenizer).items() if stops else ()
    named = [(number, name) for name, number in specials if any(name in stop for stop in stops)]
    return {number: (name, chr(_FIRST_MARK + index)) for index, (number, name) in enumerate(named)}


def _replace(stop: str, marks: Mapping[int, tuple[str, str]]) -> str:
    for name, mark in marks.values():
        stop = stop.replace(name, mark)
    return stop


class StopCutter:
    """Takes a text in pieces, and cuts it before a stop string, even if this string is divided between pieces.

    The stop string that is complete first ends the text; of several that end at the same character, the longest one. An
    end of the text that may still become a stop string is held back; it is shorter than the longest stop string. The
    output is the same however the text is divided into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Take the stop strings.

        Raises:
            InputError: a stop string is empty.
        """
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise InputError("A stop string is empty.", "Leave it out.")
        self._most_held = max(map(len, self._stops), default=1) - 1
        self._held = ""
        self._has_stopped = False

    def step(self, text: str, *, last: bool = False, ignored: int = 0) -> tuple[str, bool]:
        """Take the next piece; return the text that is not held back, and whether a stop string was found so far.

        A stop string that ends within the first ``ignored`` characters of the piece does not count. With ``last``
        nothing is held back. After a stop string the text is empty.
        """
        if self._has_stopped:
            return "", True
        stop = self._find(text, ignored)
        text = self._held + text
        self._has_stopped = stop is not None
        end = stop if stop is not None else len(text) if last else self._find_held(text)
        self._held = "" if self._has_stopped else text[end:]
        return text[:end], self._has_stopped

    def finds(self, text: str, ignored: int = 0) -> bool:
        """Whether ``step`` would find a stop string in this piece."""
        return self._find(text, ignored) is not None

    def _find(self, text: str, ignored: int) -> int | None:
        """Return the index in the held-back text and ``text`` at which the stop string that ends first begins."""
        seen, text = len(self._held) + ignored, self._held + text
        found = ((text.find(stop, max(0, seen + 1 - len(stop))), len(stop)) for stop in self._stops)
        _, start = min(((place + size, place) for place, size in found if place >= 0), default=(0, None))
        return start

    def _find_held(self, text: str) -> int:
        """Return the index at which an incomplete stop string may begin; the text's length if there is none."""
        for place in range(max(0, len(text) - self._most_held), len(text)):
            tail = text[place:]
            if any(stop.startswith(tail) for stop in self._stops):
                return place
        return len(text)


class Completions:
    """Answers the requests of the component ``completion``: token ids of many streams in, text out. Thread-safe.

    The state of a stream is kept from its first answer to its last one. If there are more than ``most_streams``
    streams, the stream that was idle for the longest time is dropped.
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
        folder = read_folder(parameters)
        with fixed_by("Let the parameter model name the folder of a model with its own tokenizer.json."):
            return cls(read_model_tokenizer(folder))

    def answer(self, inputs: Arrays) -> dict[str, Array]:
        """Answer one request, whose tensors are on the host. Each row belongs to another stream.

        Inputs are ``output_ids``, INT32 ``[rows, 1, tokens]`` (rows, beams, new tokens), and ``sequence_length``, INT32
        ``[rows, 1]``, the number of ids to read. A part of a stream has ``stream_id``, INT64 ``[rows, 1]``, and
        ``is_last``, BOOL ``[rows, 1]``; a whole answer has neither. ``carry`` (read in a stream's first part) and
        ``finish_reason``, both STRING ``[rows, 1]``, are optional, and so are ``batch_index``, INT32 ``[rows, 1]``, and
        an engine's log probabilities (``contract.pack_log_probs``).

        Returns ``text_output`` and ``finish_reason`` STRING, ``num_input_tokens`` and ``num_output_tokens`` UINT32,
        what ``carry`` asks for (``TextStream.pack``), and ``batch_index`` if the request has it, all ``[rows, 1]``.

        Raises:
            InputError: a shape or value cannot be used; the row's stream and those of later rows stay as they were.
        """
        count, given = len(inputs["output_ids"]), {**inputs}
        numbers = given.pop(BATCH_INDEX, None)
        found = []
        for number, row in split_rows(given):
            with naming_row(number, count):
                found.append(self._answer_row(row))
        return join_rows(found) | ({} if numbers is None else {BATCH_INDEX: numbers})

    def _answer_row(self, inputs: Arrays) -> dict[str, Array]:
        ids, reason, log_probs = _read_ids(inputs), _read_text(inputs, "finish_reason"), read_log_probs(inputs)
        if ("stream_id" in inputs) != ("is_last" in inputs):
            there, missing = ("stream_id", "is_last") if "stream_id" in inputs else ("is_last", "stream_id")
            raise InputError(f"The request has {there} but no {missing}.", "Send both, or neither for a whole answer.")
        with self._lock:
            if "stream_id" not in inputs:
                stream = self.open(inputs)
                return stream.pack(stream.step(ids, last=True, reason=reason, log_probs=log_probs))
            last, stream_id = bool(inputs["is_last"][0, 0]), int(inputs["stream_id"][0, 0])
            stream = self._streams.get(stream_id) or self.open(inputs)
            piece = stream.step(ids, last=last, reason=reason, log_probs=log_probs)
            self._keep(stream_id, None if last else stream)
            return stream.pack(piece)

    def _keep(self, stream_id: int, stream: TextStream | None) -> None:
        self._streams.pop(stream_id, None)
        if stream is not None:
            self._streams[stream_id] = stream
        if len(self._streams) > self._most_streams:
            del self._streams[next(iter(self._streams))]

    def open_rows(self, inputs: Arrays, *, is_streaming: bool, outputs: Collection[str]) -> RowTexts:
        """Begin a stream for each row of an engine's inputs; see ``open``. ``outputs`` names those to return."""
        passthroughs = inputs["carry"]
        rows = [self.open({"carry": passthroughs[number : number + 1]}) for number in range(len(passthroughs))]
        return RowTexts(rows, is_streaming=is_streaming, outputs=outputs)

    def open(self, inputs: Arrays) -> TextStream:
        """Begin a stream. The input ``carry``, if any, has the arguments of ``TextStream``; ``stops`` are the strings.

        Raises:
            InputError: ``carry`` cannot be read.
        """
        return TextStream(self._tokenizer, *_read_passthrough(_read_text(inputs, "carry")))


class RowTexts:
    """Texts of the rows of one request, from the answers of an engine that name their rows in ``batch_index``."""

    def __init__(self, streams: Sequence[TextStream], *, is_streaming: bool, outputs: Collection[str]) -> None:
        self._streams, self._is_streaming, self._outputs = streams, is_streaming, outputs
        self._pieces: list[list[Piece]] = [[] for _ in streams]
        self._open = set(range(len(streams)))

    @property
    def is_complete(self) -> bool:
        """Whether the texts of all rows have ended."""
        return not self._open

    def take(self, answers: Sequence[Arrays]) -> Iterator[dict[str, Array]]:
        """Take an engine's next answers; if streaming, yield each row that has new text or ends, as ``pack`` does.

        Outputs also have ``batch_index``, INT32 ``[1, 1]``. What several answers have for a row comes in one piece.
        """
        found: dict[int, list[Piece]] = {}
        for number, row in (each for answer in answers for each in split_rows(answer)):
            if number not in self._open:  # it has ended at its stop word, and the engine goes on with the request
                continue
            piece = self._streams[number].take(row)
            if piece.finish_reason:
                self._open.discard(number)
            found.setdefault(number, []).append(piece)
        for number, pieces in found.items():
            if not self._is_streaming:
                self._pieces[number] += pieces
            elif (piece := join_pieces(pieces)).text or piece.finish_reason:
                yield self._pack(number, piece)

    def end(self) -> Iterator[dict[str, Array]]:
        """Yield the whole answer, ``[rows, 1]``, if none was streamed, and each row has some text."""
        if not self._is_streaming and all(self._pieces):
            packed = [self._pack(number, join_pieces(pieces)) for number, pieces in enumerate(self._pieces)]
            yield join_rows(packed)

    def cancelled(self) -> dict[str, Array]:
        """Return the last answer to a request that is stopped: whole, or the end of the rows that are open."""
        ends = [[stream.cancelled()] if number in self._open else [] for number, stream in enumerate(self._streams)]
        if self._is_streaming:
            return join_rows([self._pack(number, *end) for number, end in enumerate(ends) if end])
        pieces = [[*some, *end] for some, end in zip(self._pieces, ends, strict=True)]
        return join_rows([self._pack(number, join_pieces(each)) for number, each in enumerate(pieces)])

    def _pack(self, number: int, piece: Piece) -> dict[str, Array]:
        packed = {**self._streams[number].pack(piece), BATCH_INDEX: np.array([[number]], np.int32)}
        return {name: array for name, array in packed.items() if name in self._outputs}


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


def _read_passthrough(text: str) -> tuple[list[str], int, int, bool, Sequence[str], int, bool, str, bool]:
    """Return the arguments of ``TextStream`` after the tokenizer, from the JSON ``text``.

    An empty text has no stop strings. What follows ``num_input_tokens`` may be left out.
    """
    if not text:
        return [], 0, 0, False, [], 0, False, "", False
    try:
        given = json.loads(text)
        stops, numbers = given["stops"], (given["num_input_tokens"], given.get("min_tokens", 0))
        counts_each, returns, echoed, keeps, begin, alone = (given.get(*each) for each in _REST)
        are_stops = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
        are_numbers = all(type(each) is int and 0 <= each <= _MOST_TOKENS for each in (*numbers, echoed))
        are_flags = all(type(each) is bool for each in (counts_each, keeps, alone))
        is_valid = are_stops and len(stops) <= MAX_WORDS and are_numbers and are_flags
        is_valid = is_valid and isinstance(returns, list | tuple) and all(name in RETURNS for name in returns)
        is_valid = is_valid and isinstance(begin, str)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise InputError(
            f"carry is {shorten(text)}; expected JSON with at most {MAX_WORDS} stops and numbers of tokens.",
            'Send what the prompt step made: {"stops": ["..."], "num_input_tokens": 5, "min_tokens": 0}.',
        )
    return stops, *numbers, counts_each, returns, echoed, keeps, begin, alone


def _string(text: str) -> Any:
    return np.array([[text.encode()]], np.object_)

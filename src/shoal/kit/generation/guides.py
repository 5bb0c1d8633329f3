"""Grammars that an answer follows: JSON schemas, regular expressions, choices, and grammars in Lark's form.

A guide is a JSON object with one of ``KINDS``, named as in vLLM's ``structured_outputs``. ``Guides`` compiles it with
llguidance, once for each text; ``Follower`` then says, token by token, which ones may come next.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shorten
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InputError, needs
from shoal.kit.generation import guide_checking
from shoal.kit.generation.templates import find_python

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KINDS = ("json", "json_object", "regex", "choice", "grammar")
GUIDE = "guide"  # input
MOST_GUIDE = 2**19  # bytes
_MOST_CHOICES = 1024
_MOST_KEPT = 64  # compiled guides of an engine
_EXAMPLE = 'For example: {"json": {"type": "object", "properties": {"name": {"type": "string"}}}}'
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "json": (lambda value: isinstance(value, dict | bool), "a JSON schema, an object"),
    "json_object": (lambda value: value is True, "true"),
    "regex": (lambda value: isinstance(value, str) and value != "", "a text"),
    "choice": (
        lambda value: (
            isinstance(value, list)
            and 0 < len(value) <= _MOST_CHOICES
            and all(isinstance(each, str) and each for each in value)
        ),
        f"a list of 1 to {_MOST_CHOICES} texts",
    ),
    "grammar": (lambda value: isinstance(value, str) and value != "", "a text"),
}


@dataclass(frozen=True)
class Guide:
    """A checked guide: its ``kind``, one of ``KINDS``, and its ``value``: a JSON text, or for others a text.

    One that ``is_optional`` is left out by engines that apply no guides, and where it is refused.
    """

    kind: str
    value: str
    is_optional: bool = field(default=False, compare=False)

    @property
    def schema(self) -> str:
        """The JSON schema, of the kinds ``json`` and ``json_object``; empty for others."""
        value = {"true": "{}", "false": '{"enum": []}'}.get(self.value, self.value)
        return {"json": value, "json_object": '{"type": "object"}'}.get(self.kind, "")

    @property
    def choices(self) -> list[str]:
        """The texts of the kind ``choice``."""
        return list(json.loads(self.value))


def read_guide(value: bytes | str) -> Guide | None:
    """Read the input ``guide``; None if it is empty. Beside its kind it may have ``optional``: true.

    Raises:
        InputError: it is no JSON object with one of ``KINDS``, or too long.
    """
    if not value:
        return None
    if len(value) > MOST_GUIDE:
        raise InputError(f"{GUIDE} has {len(value)} bytes; at most {MOST_GUIDE} are read.", "Shorten it.")
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{GUIDE} is not JSON ({error}): {shorten(value)}.", _EXAMPLE) from None
    is_optional = isinstance(found, dict) and found.pop("optional", False) is True
    if not isinstance(found, dict) or len(found) != 1 or next(iter(found)) not in KINDS:
        raise InputError(f"{GUIDE} is {shorten(found)}, expected an object with one of {', '.join(KINDS)}.", _EXAMPLE)
    ((kind, given),) = found.items()
    is_right, form = _FORMS[kind]
    if kind == "json" and isinstance(given, str):  # vLLM takes both
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{GUIDE}.json is not JSON ({error}): {shorten(given)}.", _EXAMPLE) from None
    if not is_right(given):
        raise InputError(f"{GUIDE}.{kind} is {shorten(given)}, expected {form}.", _EXAMPLE)
    return Guide(kind, given if kind in ("regex", "grammar") else json.dumps(given, ensure_ascii=False), is_optional)


GOES_ON, COMPLETE, ENDED = "", "complete", "ended"  # of a guide, after a token


class Follower:
    """A guide that one answer follows."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def find_banned(self) -> NDArray[np.bool_]:
        """Return which tokens may not come next: BOOL [vocabulary]."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():  # its mask has the end tokens then
            return np.ones(self._vocabulary, np.bool_)
        banned: NDArray[np.bool_] = np.unpackbits(bits, count=self._vocabulary, bitorder="little") == 0
        return banned

    def take(self, token: int) -> str:
        """Take the next token of the answer; return how the guide ends with it: by an end token, as text, or not."""
        self._matcher.consume_token(token)
        if not self._matcher.is_stopped() or self._matcher.is_error():
            return GOES_ON
        return ENDED if self._matcher.stop_reason() == "EndOfSentence" else COMPLETE

    def may_end(self) -> bool:
        """Whether the guide allows the answer to end here."""
        return bool(self._matcher.is_accepting())

    def explain(self) -> InputError:
        """Return why no token can come next."""
        why = _shorten(self._matcher.get_error()) or "other settings, such as bad_words, exclude what it needs"
        return InputError(f"The {GUIDE} cannot be followed here: {why}.", "Write a simpler one.")


class Guides:
    """Compiled guides of an engine, the last ones that were asked for. Thread-safe.

    ``read`` returns the model's tokenizer, which is needed from the first guide on. ``end_ids`` are tokens that end an
    answer where its guide allows it.
    """

    def __init__(self, read: Callable[[], Tokenizer], vocabulary: int, end_ids: Sequence[int]) -> None:
        self._read, self._vocabulary, self._end_ids = read, vocabulary, [*end_ids]
        self._tokenizer: Any = None  # llguidance's
        self._kept: OrderedDict[Guide, Any] = OrderedDict()  # matchers
        self._changing = threading.Lock()

    def follow(self, guide: Guide) -> Follower:
        """Return the follower for a new answer. A guide that is not known yet takes a tenth of a second, at most two.

        Raises:
            InputError: llguidance does not take the guide, or it takes too much time or memory.
            SetupError: llguidance is not installed, or no Python interpreter is found.
        """
        with self._changing:
            matcher = self._kept.get(guide)
        if matcher is None:
            matcher = self._compile(guide)
        with self._changing:
            self._kept[guide] = matcher
            self._kept.move_to_end(guide)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return Follower(matcher.deep_copy(), self._vocabulary)

    def _compile(self, guide: Guide) -> Any:
        with needs("llm"):
            from llguidance import LLMatcher, LLTokenizer
        try:
            grammar = _write_grammar(guide, LLMatcher)
            if not (error := _check(grammar)):
                with self._changing:
                    if self._tokenizer is None:
                        text = self._read().to_str()
                        self._tokenizer = LLTokenizer(text, n_vocab=self._vocabulary, eos_token=self._end_ids)
                matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
                first = matcher.deep_copy()
                first.compute_bitmask()
                error = matcher.get_error() or ("no text fits it" if first.is_error() or first.is_stopped() else "")
        except ValueError as failure:
            error = str(failure)
        if error:
            raise InputError(f"{GUIDE}.{guide.kind} is refused: {_shorten(error)}.", "Write it without that.")
        return matcher


def _write_grammar(guide: Guide, matcher: Any) -> str:
    """Return the guide in llguidance's form."""
    if guide.schema:
        # Blanks that a schema does not ask for could go on without end.
        return str(matcher.grammar_from_json_schema(guide.schema, defaults={"whitespace_flexible": False}))
    if guide.kind == "regex":
        return str(matcher.grammar_from_regex(guide.value))
    texts = (json.dumps(each, ensure_ascii=False) for each in guide.choices) if guide.kind == "choice" else ()
    return str(matcher.grammar_from_lark(f"start: {' | '.join(texts)}" if guide.kind == "choice" else guide.value))


def _check(grammar: str) -> str:
    """Return what is wrong with a grammar: a process of its own compiles it, which can be ended."""
    asked = json.dumps({"path": sys.path, "grammar": grammar}).encode() + b"\n"
    done = subprocess.run([find_python(), "-I", "-S", guide_checking.__file__], input=asked, capture_output=True)
    if done.returncode == 0:
        return str(json.loads(done.stdout))
    if done.returncode == -signal.SIGALRM:
        return f"it takes more than {guide_checking.SECONDS:g} s to read"
    return f"it takes more than {guide_checking.MEMORY_MIB} MiB to read"


def _shorten(error: str) -> str:
    return " ".join(error.partition("\n<state>")[0].split())[:300].rstrip(".")

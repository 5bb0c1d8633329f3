"""Reader of a configurable component's ``config.pbtxt``: tensors by their order, parameters by name and type.

A user of the component may rename its tensors, replace a size of -1 with a number, and leave parameters out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain
from reprlib import repr as shorten
from typing import Any

import numpy as np

from shoal.errors import ArtifactError
from shoal.kit.component.files import GREATEST
from shoal.kit.component.spec import ModelSpec, TensorSpec

_MISSPELT = 0.8  # difflib ratio above which a parameter's name counts as misspelt
_MOST = 2**31 - 1


class Parameters:
    """Tensors and parameters of one model's ``config.pbtxt``, checked when they are read.

    An invalid value raises an ``ArtifactError`` that shows the value, and the model does not start.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.sizes: dict[str, int] = {}  # declared size of each letter of a signature, except where it is -1

    # --- tensors -------------------------------------------------------------------------------------------------

    def tensors(self, signature: str) -> tuple[str, ...]:
        """Check the tensors against ``signature`` and return the names of the inputs, then of the outputs.

        Example: ``FP32[n], FP32[n] -> STRING[1]``. The row dimension is left out. A letter is any size; all sizes
        that the configuration declares for one letter must be equal, and ``sizes`` has them by letter. ``...`` is any
        shape, the same for all tensors with ``...``.
        """
        spec = self._spec
        sides = [side.split(", ") for side in signature.split(" -> ")]
        tensors = [*spec.inputs, *spec.outputs]
        is_fit = [*map(len, sides)] == [len(spec.inputs), len(spec.outputs)] and all(
            self._fits(tensor, form) for tensor, form in zip(tensors, chain(*sides), strict=True)
        )
        if not is_fit:
            declared = " -> ".join(", ".join(map(_show, side)) for side in (spec.inputs, spec.outputs))
            raise ArtifactError(
                f"Model {spec.name} declares {declared or 'no tensors'}; it needs {signature}.",
                "Change the tensors in its config.pbtxt: their names are free, their order counts.",
            )
        if not spec.is_batched:
            raise ArtifactError(
                f"Model {spec.name} has max_batch_size 0; it needs rows.", "Write max_batch_size: 512 in config.pbtxt."
            )
        return tuple(tensor.name for tensor in tensors)

    def _fits(self, tensor: TensorSpec, form: str) -> bool:
        dtype, _, shape = form.rstrip("]").partition("[")
        letters: Sequence[str] = shape.split(",")
        if shape == "...":
            letters = [f"{shape}{place}" for place in range(self.sizes.setdefault(shape, len(tensor.dims)))]
        if tensor.dtype != f"TYPE_{dtype}" or tensor.is_optional or len(letters) != len(tensor.dims):
            return False
        return all(map(self._is_size, letters, tensor.dims))

    def _is_size(self, letter: str, size: int) -> bool:
        if letter.isdecimal():
            return size == int(letter)
        return size == -1 or self.sizes.setdefault(letter, size) == size

    def expect(self, letter: str, number: int, what: str) -> None:
        """Check that the size ``letter``, if declared, is ``number``; ``what`` begins the reason: ``words.txt has``."""
        declared = self.sizes.get(letter, number)
        if declared != number:
            raise ArtifactError(
                f"Model {self._spec.name} declares dims: [ {declared} ]; {what} {number}.",
                f"Write dims: [ {number} ] in its config.pbtxt, or -1 for any.",
            )

    # --- parameters ----------------------------------------------------------------------------------------------

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter's value without spaces at its ends; ``default`` if it is empty or left out."""
        known = self._spec.parameters
        near = [] if name in known else get_close_matches(name, [*known], 1, _MISSPELT)
        if near:
            raise ArtifactError(
                f"Model {self._spec.name} has the parameter {near[0]}, and none called {name}.",
                f"Write {name} in its config.pbtxt, if that is meant.",
            )
        return known.get(name, "").strip() or default

    def choice(self, name: str, known: Sequence[str]) -> str:
        """Return a parameter that must have one of the ``known`` values; the first of them is the default."""
        value = self.text(name, known[0])
        if value not in known:
            raise self.refusal(name, f"expected {' or '.join(known)}", known[0])
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean parameter, written as ``true`` or ``false``."""
        return self.choice(name, ("true", "false") if default else ("false", "true")) == "true"

    def whole(self, name: str, default: int, *, least: int = 1, most: int = _MOST) -> int:
        """Return a parameter that must be a whole number from ``least`` to ``most``; ``default`` may be any number."""
        value = self.text(name)
        if not value:
            return default
        number = int(value) if value.isascii() and value.isdecimal() and len(value) < 20 else least - 1
        if not least <= number <= most:
            raise self.refusal(name, f"expected a whole number from {least:,} to {most:,}", str(least))
        return number

    def number(self, name: str, default: float) -> float:
        """Return a finite number, rounded to FP32, so that it is equal to an FP32 score of the same value."""
        value = self.text(name)
        if not value:
            return default
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not abs(number) <= np.finfo(np.float32).max:  # NaN is not, either
            raise self.refusal(name, "expected a number that FP32 can hold", "0.5")
        return float(np.float32(number))

    def texts(self, name: str) -> list[str]:
        """Return a parameter that is a JSON list of strings; an empty list if it is left out."""
        found = self._list(name, str, "texts", '["one", "two"]')
        if any(text.encode(errors="ignore").decode() != text for text in found):
            raise self.refusal(name, "expected texts that UTF-8 can hold", '["one", "two"]')
        return found

    def numbers(self, name: str) -> list[float]:
        """Return a parameter that is a JSON list of finite numbers; an empty list if it is left out."""
        found = self._list(name, (int, float), "numbers", "[1, 2]")
        if not all(abs(number) <= GREATEST and not isinstance(number, bool) for number in found):
            raise self.refusal(name, "expected a JSON list of finite numbers", "[1, 2]")
        return [*map(float, found)]

    def words(self, name: str, *, least: int, most: int) -> list[str]:
        """Return a parameter that must be ``least`` to ``most`` words, separated by spaces."""
        found = self.text(name).split()
        if not least <= len(found) <= most:
            number = f"{least}" if least == most else f"{least} to {most}"
            raise self.refusal(name, f"expected {number} names, separated by spaces", " ".join(["name"] * least))
        return found

    def _list(self, name: str, kind: Any, kinds: str, example: str) -> list[Any]:
        value = self.text(name, "[]")
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, list) or not all(isinstance(entry, kind) for entry in found):
            raise self.refusal(name, f"expected a JSON list of {kinds}", example)
        return found

    def refusal(self, name: str, why: str, example: str) -> ArtifactError:
        """Return the error for an unusable parameter, with its value and ``why``; ``example`` is a valid value."""
        return ArtifactError(
            f"Parameter {name} of model {self._spec.name} is {shorten(self.text(name))}; {why}.",
            f"Write it in config.pbtxt: parameters {{ key: \"{name}\" value {{ string_value: '{example}' }} }}",
        )


def _show(tensor: TensorSpec) -> str:
    """Format a declared tensor as in a signature: ``FP32[31]``."""
    optional = "optional " if tensor.is_optional else ""
    return f"{optional}{tensor.dtype.removeprefix('TYPE_')}[{','.join(map(str, tensor.dims))}]"


@contextmanager
def fixed_by(fix: str) -> Iterator[None]:
    """Replace the advice of an ``ArtifactError`` raised in the ``with`` block, such as "train again", with ``fix``."""
    try:
        yield
    except ArtifactError as error:
        raise ArtifactError(error.what, fix) from error

"""The request by which a model is warmed up: a text for text inputs, zeros for others, and one new token."""

from __future__ import annotations

from math import prod
from typing import Any

from shoal.kit.component.spec import DTYPES, STRING, ModelSpec, TensorSpec

FOLDER = "warmup"  # in a model's folder: where core looks for the data of its requests
_NEW_TOKENS = frozenset({"max_tokens", "request_output_len"})  # inputs that language models refuse as 0
_MAX_RANK, _MAX_VALUES = 32, 2**26  # NumPy's own limit of dimensions; the values of a tensor
# About the length of a passage that a user would send.
TEXT = (
    "Before sunrise the harbour was so quiet that Mara could hear the ropes creak. She counted the boats twice: seven"
    " blue ones, and a red one that nobody had sailed since her grandfather's time. Why did he keep it painted? He had"
    " never said. This morning, however, the red boat's sail hung loose in the wind, and wet footprints led across the"
    ' planks toward the lighthouse. "Somebody knows," she whispered. Below the pier a school of herring turned all at'
    " once, as if one mind had moved ten thousand silver bodies, and the water flashed like a coin. Fishermen call that"
    " good luck; biologists explain that every fish merely watches its neighbours, keeps its distance and copies their"
    " direction, so that no leader is needed at all. Mara did not think of luck, or of biology. She tied her"
    " boots, took the old brass lantern from its hook, and followed the footprints while the tide came in behind her."
)


def requested(spec: ModelSpec) -> dict[str, Any]:
    """Return the inputs of a model's warm-up request: a text for text inputs, zeros for others, and one new token.

    Optional inputs are left out, except for ``seed``, without which the answers to two requests may differ. If all
    inputs are optional, the request also has the first text input.
    """
    needed = [t for t in spec.inputs if not t.is_optional] or [t for t in spec.inputs if t.dtype == STRING][:1]
    needed += [t for t in spec.inputs if t.is_optional and t.name == "seed"]
    values = {t.name: make_zeros(t, spec, TEXT.encode() if t.dtype == STRING else b"") for t in needed}
    found = {name: value for name, value in values.items() if value is not None}
    return {name: value + 1 if name.lower() in _NEW_TOKENS else value for name, value in found.items()}


def make_zeros(tensor: TensorSpec, spec: ModelSpec, text: bytes = b"") -> Any:
    """Return one row of zeros or of copies of ``text`` in the declared shape.

    The result is None for a dimension of -1 (which has size 1 if there is a ``text``), for BF16, which NumPy lacks, and
    for a size that is too large.
    """
    sizes = [1 if text and size == -1 else size for size in tensor.dims]
    if tensor.dtype not in DTYPES or len(sizes) > _MAX_RANK or min(sizes, default=0) < 0 or prod(sizes) > _MAX_VALUES:
        return None
    return tensor.zeros(1 if spec.is_batched else None, text)

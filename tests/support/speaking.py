"""A model that answers in pieces and counts its tokens, as a language model does, but takes no time."""

from __future__ import annotations

from pathlib import Path

_CONFIG = """
name: "speak"
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] },
  { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
parameters { key: "public" value { string_value: "true" } }
"""
_CODE = '''
import numpy as np
from shoal import StreamingComponent

class Speak(StreamingComponent):
    """Counts to COUNT, which are as many tokens of the answer, to a prompt of seven."""

    def answers(self, inputs, stream):
        for number in range(int(inputs["COUNT"][0])):
            numbers = {"NUMBER": np.int32(number)}
            numbers |= {"num_input_tokens": np.uint32(7), "num_output_tokens": np.uint32(number + 1)}
            yield {name: np.array([value]) for name, value in numbers.items()}

TritonPythonModel = Speak.for_triton()
'''


def write_speaking(repository: Path) -> None:
    """Write the model ``speak``."""
    folder = repository / "speak"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_CONFIG, encoding="utf-8")
    (folder / "1" / "model.py").write_text(_CODE, encoding="utf-8")

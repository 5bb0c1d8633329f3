import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from collections.abc import Iterable
from typing import Any

from shoal.component import Arrays, Component, Context, Parameters
from shoal.generation import Prompts, rows, stack


class Prompt(Component):
    """Turn a text or a chat, with its settings, into the token ids and settings that an engine takes."""

    def setup(self, context: Context) -> None:
        self.prompts = Prompts.read(Parameters(context.spec))

    def check(self, inputs: Arrays) -> None:
        for row in self.rows(inputs):
            self.prompts.check(row)

    def run(self, batch: Arrays) -> Arrays:
        return stack([self.prompts.request(row) for row in self.rows(batch)])

    def rows(self, inputs: Arrays) -> Iterable[dict[str, Any]]:
        return rows({name: self.context.device.fetch(array, name) for name, array in inputs.items()})

    def close(self) -> None:
        self.prompts.close()


TritonPythonModel = Prompt.for_triton()

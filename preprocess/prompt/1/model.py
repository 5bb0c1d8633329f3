import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, Parameters, Prompts


class Prompt(Component):
    """Turn a text or a chat, with its settings, into the token ids and settings that an engine takes."""

    library = "numpy"

    def setup(self, context: Context) -> None:
        self.prompts = Prompts.read(Parameters(context.spec))

    def check(self, inputs: Arrays) -> None:
        self.prompts.check(inputs)

    def run(self, batch: Arrays) -> Arrays:
        inputs = {name: self.context.device.fetch(array, name) for name, array in batch.items()}
        return self.prompts.requests(inputs)

    def close(self) -> None:
        self.prompts.close()


TritonPythonModel = Prompt.for_triton()

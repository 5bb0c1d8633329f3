import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, Parameters, check_texts


class CheckedText(Component):
    """Pass texts through unchanged if they are valid UTF-8 and not too long."""

    library = "numpy"

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        self.text, self.checked = parameters.tensors("STRING[1] -> STRING[1]")
        self.max_text_bytes = parameters.whole("max_text_bytes", 65_536)

    def check(self, inputs: Arrays) -> None:
        check_texts(inputs[self.text][:, 0], name=self.text, max_bytes=self.max_text_bytes)

    def run(self, batch: Arrays) -> Arrays:
        return {self.checked: batch[self.text]}


TritonPythonModel = CheckedText.for_triton()

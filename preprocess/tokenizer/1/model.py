import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, Parameters, check_texts, decode_texts, make_encoder


class Tokenizer(Component):
    """Tokenize texts to token ids and attention mask, with the encoder's own tokenizer."""

    library = "numpy"

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        self.text, self.ids, self.mask = parameters.tensors("STRING[1] -> INT64[t], INT64[t]")
        self.max_text_bytes = parameters.whole("max_text_bytes", 65_536)
        self.encode = make_encoder(context, parameters, edge=self.text)

    def check(self, inputs: Arrays) -> None:
        check_texts(inputs[self.text][:, 0], name=self.text, max_bytes=self.max_text_bytes)

    def run(self, batch: Arrays) -> Arrays:
        ids, mask = self.encode(decode_texts(batch[self.text][:, 0]))
        return {self.ids: ids, self.mask: mask}


TritonPythonModel = Tokenizer.for_triton()

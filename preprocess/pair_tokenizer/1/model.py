import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, Parameters, check_texts, decode_texts, make_pair_encoder


class PairTokenizer(Component):
    """Tokenize pairs of texts to token ids, attention mask and segment ids, with the encoder's own tokenizer."""

    library = "numpy"

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        names = parameters.tensors("STRING[1], STRING[1] -> INT64[t], INT64[t], INT64[t]")
        self.texts, self.outputs = names[:2], names[2:]
        self.max_text_bytes = parameters.whole("max_text_bytes", 65_536)
        self.encode = make_pair_encoder(context, parameters, edge=self.texts[0])

    def check(self, inputs: Arrays) -> None:
        for name in self.texts:
            check_texts(inputs[name][:, 0], name=name, max_bytes=self.max_text_bytes)

    def run(self, batch: Arrays) -> Arrays:
        first, second = (decode_texts(batch[name][:, 0]) for name in self.texts)
        return dict(zip(self.outputs, self.encode(first, second), strict=True))


TritonPythonModel = PairTokenizer.for_triton()

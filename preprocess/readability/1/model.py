import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Arrays, Component, Context, Parameters
from shoal.readability import Bundle, make_reader
from shoal import check_texts, decode_texts, read_vocabulary


class Readability(Component):
    """Convert texts to token ids, attention mask and features."""

    def setup(self, context: Context) -> None:
        bundle = Bundle.load(context.artifact("preprocess.json"))
        vocabulary = context.artifact("vocab.txt")
        bundle.check_vocabulary(vocabulary)
        self.max_text_bytes = Parameters(context.spec).whole("max_text_bytes", 65_536)
        self.read = make_reader(read_vocabulary(vocabulary), bundle, context.device, edge="INPUT0")

    def check(self, inputs: Arrays) -> None:
        check_texts(inputs["INPUT0"][:, 0], name="excerpt", max_bytes=self.max_text_bytes)

    def run(self, batch: Arrays) -> Arrays:
        ids, mask, features = self.read(decode_texts(batch["INPUT0"][:, 0]))
        return {"BERT_IDS": ids, "BERT_AM": mask, "TREE_FEATS": features}


TritonPythonModel = Readability.for_triton()

import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal.component.base import Component
from shoal.component.bundle import Bundle
from shoal.component.context import Context
from shoal.component.features import Features
from shoal.component.ragged import Texts, check_texts
from shoal.component.tensors import Arrays
from shoal.component.wordpiece import WordPiece, read_vocabulary


class Readability(Component):
    """Text to token ids, attention mask and features."""

    def setup(self, context: Context) -> None:
        bundle = Bundle.load(context.artifact("preprocess.json"))
        vocabulary = context.artifact("vocab.txt")
        bundle.check_vocabulary(vocabulary)
        self.max_text_bytes = int(context.spec.parameters["max_text_bytes"])
        self.encode = WordPiece(
            read_vocabulary(vocabulary),
            is_lowercase=bundle.is_lowercase,
            max_length=bundle.max_length,
            device=context.device,
        ).encode
        self.features = Features(bundle, context.device)

    def check(self, inputs: Arrays) -> None:
        check_texts(inputs["INPUT0"][:, 0], name="excerpt", max_bytes=self.max_text_bytes)

    def run(self, batch: Arrays) -> Arrays:
        texts = Texts.from_bytes(batch["INPUT0"][:, 0])
        ids, mask = self.encode(texts)
        return {"BERT_IDS": ids, "BERT_AM": mask, "TREE_FEATS": self.features(texts)}


TritonPythonModel = Readability.for_triton()

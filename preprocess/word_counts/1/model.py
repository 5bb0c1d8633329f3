import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal.component import Arrays, Component, Context, Settings, mended_by
from shoal.text import VALUES, Texts, WordCounts, check_texts, read_words

FIX = "Write a word a line, one basic token each: in lower case, without accents; signs are words of their own."


class Counts(Component):
    """Text to the counts of listed words."""

    def setup(self, context: Context) -> None:
        settings = Settings(context.spec)
        self.text, self.counts = settings.tensors("STRING[1] -> FP32[n]")
        self.max_text_bytes = settings.whole("max_text_bytes", 65_536)
        value, has_statistics = settings.choice("value", VALUES), settings.flag("statistics", default=False)
        with mended_by(FIX):
            words, stops = read_words(context.artifact("words.txt")), context.optional_artifact("stop_words.txt")
            stop_words = read_words(stops) if stops else ()
        self.count = WordCounts(
            words, stop_words, context.device, value=value, has_statistics=has_statistics, edge=self.text
        )
        settings.expect("n", self.count.num_columns, "the columns of words.txt and statistics are")

    def check(self, inputs: Arrays) -> None:
        check_texts(inputs[self.text][:, 0], name=self.text, max_bytes=self.max_text_bytes)

    def run(self, batch: Arrays) -> Arrays:
        return {self.counts: self.count(Texts.from_bytes(batch[self.text][:, 0]))}


TritonPythonModel = Counts.for_triton()

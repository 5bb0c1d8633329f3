import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import (
    WORD_VALUES,
    Arrays,
    Component,
    Context,
    Parameters,
    WordCounts,
    check_texts,
    decode_texts,
    fixed_by,
    read_words,
)

FIX = "Write one word per line, one basic token each: in lower case, without accents; punctuation marks are words, too."


class Counts(Component):
    """Count how often each word of a list occurs in each text."""

    library = "numpy"

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        self.text, self.counts = parameters.tensors("STRING[1] -> FP32[n]")
        self.max_text_bytes = parameters.whole("max_text_bytes", 65_536)
        value, has_statistics = parameters.choice("value", WORD_VALUES), parameters.flag("statistics", default=False)
        with fixed_by(FIX):
            words, stops = read_words(context.artifact("words.txt")), context.optional_artifact("stop_words.txt")
            stop_words = read_words(stops) if stops else ()
        self.count = WordCounts(words, stop_words, value=value, has_statistics=has_statistics)
        parameters.expect("n", self.count.num_columns, "the columns of words.txt and statistics are")

    def check(self, inputs: Arrays) -> None:
        check_texts(inputs[self.text][:, 0], name=self.text, max_bytes=self.max_text_bytes)

    def run(self, batch: Arrays) -> Arrays:
        counts = self.count(decode_texts(batch[self.text][:, 0]))
        return {self.counts: self.context.device.put(counts, self.text)}


TritonPythonModel = Counts.for_triton()

import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from dataclasses import replace

import numpy as np

from shoal import Arrays, Component, Context, InputError, Parameters, Prompts, Sampling, TokenRequest, find_weights
from shoal.kit.generation.chats import llama2, read_messages
from shoal.kit.generation.contract import as_python
from shoal.kit.generation.tokenizer import read_model_tokenizer
from shoal.kit.generation.weights import DTYPES, QUANTIZED, read_folder


class Llamav2(Component):
    """Answer users' messages with a Llama 2 chat model, a whole batch with one call of ``generate``."""

    library = "engine"

    def read(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        self.system, self.max_tokens = parameters.text("system_prompt"), parameters.whole("max_tokens", 256)
        temperature, top_k = parameters.number("temperature", 0.01), parameters.whole("top_k", 20, least=0)
        penalty, seed = parameters.number("repetition_penalty", 1.1), parameters.whole("seed", 0, least=0)
        self.sampling = Sampling(temperature, top_k, parameters.number("top_p", 1.0), penalty, seed).check()
        self.dtype, self.kind = parameters.choice("dtype", DTYPES), parameters.choice("quantize", QUANTIZED)
        self.weights = find_weights(read_folder(parameters))
        self.tokenizer = read_model_tokenizer(self.weights.folder)
        self.prompts = Prompts(self.tokenizer, llama2, context=self.weights.context, vocabulary=self.weights.vocabulary)

    def setup(self, context: Context) -> None:
        from shoal.kit.generation.engines.rows import load_rows  # imports torch

        self.read(context)
        self.continue_rows = load_rows(self.weights, self.dtype, context, quantized=self.kind)

    def requests(self, inputs: Arrays) -> list[TokenRequest]:
        values = zip(*(array.ravel() for array in inputs.values()), strict=True)
        return [self.request(**dict(zip(inputs, map(as_python, row), strict=True))) for row in values]

    def request(self, prompt: bytes, history: bytes = b"", max_tokens: int | None = None, **own: float) -> TokenRequest:
        before = read_messages(self.prompts.decode(history, "history"), "history") if history else []
        if self.system and not (before and before[0]["role"] == "system"):
            before.insert(0, {"role": "system", "content": self.system})
        before.append({"role": "user", "content": self.prompts.decode(prompt, "prompt")})
        room = self.weights.context - len(ids := self.prompts.encode(messages=before))
        if not 1 <= (wanted := min(self.max_tokens, room) if max_tokens is None else max_tokens) <= room:
            raise InputError(f"max_tokens is {wanted}, and the prompt leaves {room}.", f"Send from 1 to {room}.")
        return TokenRequest(tuple(ids), wanted, self.weights.end_ids, replace(self.sampling, **own).check(wanted))

    def check(self, inputs: Arrays) -> None:
        self.requests(inputs)

    def run(self, batch: Arrays) -> Arrays:
        texts = [self.tokenizer.decode(ids).encode() for ids in self.continue_rows(self.requests(batch))]
        return {"generated_text": np.array(texts, np.object_).reshape(batch["prompt"].shape)}


TritonPythonModel = Llamav2.for_triton()

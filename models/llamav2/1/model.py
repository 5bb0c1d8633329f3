import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import numpy as np
import torch

from shoal.component import Arrays, Component, Context, Parameters, read_tokenizer
from shoal.generation import Prompts, Sampling, find_weights, llama2
from shoal.generation.engines.loading import DTYPES, load_model


class Llamav2(Component):
    """Answer users' messages with a Llama 2 chat model, a whole batch with one call of ``generate``."""

    library = "numpy"

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        weights = find_weights(parameters.text("model"))
        self.system = parameters.text("system_prompt")
        self.max_tokens, self.seed = parameters.whole("max_tokens", 256), parameters.whole("seed", 0, least=0)
        temperature, top_k = parameters.number("temperature", 0.01), parameters.whole("top_k", 20, least=0)
        penalty = parameters.number("repetition_penalty", 1.1)
        sampling = Sampling(temperature, top_k, repetition_penalty=penalty).check()
        chance = {} if sampling.is_greedy else {"temperature": temperature, "top_k": top_k}
        self.settings = {"do_sample": bool(chance), "repetition_penalty": penalty, **chance}
        self.end_ids, self.tokenizer = weights.end_ids, read_tokenizer(weights.folder / "tokenizer.json")
        length = max(2, weights.context - self.max_tokens + 1)  # of the prompt and its first new token
        self.prompts = Prompts(self.tokenizer, llama2, context=length)
        self.model = load_model(weights, parameters.choice("dtype", DTYPES), context.num_threads)

    def ids(self, text: bytes) -> list[int]:
        chat = [{"role": "system", "content": self.system}] if self.system else []
        return self.prompts.encode(messages=[*chat, {"role": "user", "content": self.prompts.decode(text, "prompt")}])

    def check(self, inputs: Arrays) -> None:
        list(map(self.ids, inputs["prompt"].ravel()))

    def run(self, batch: Arrays) -> Arrays:
        prompts = [self.ids(text) for text in batch["prompt"].ravel()]  # of shape [rows, 1]; [1] without batches
        widest = max(map(len, prompts))
        ids, mask = (torch.zeros((len(prompts), widest), dtype=torch.int64) for _ in range(2))
        for row, prompt in enumerate(prompts):  # padded on the left: the answer follows the prompt
            ids[row, widest - len(prompt) :] = torch.tensor(prompt)
            mask[row, widest - len(prompt) :] = 1
        torch.manual_seed(self.seed)
        found = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=self.max_tokens,
            eos_token_id=list(self.end_ids) or None,
            pad_token_id=self.end_ids[0] if self.end_ids else 0,
            **self.settings,
        )
        texts = [self.tokenizer.decode(row).encode() for row in found[:, widest:].tolist()]
        return {"generated_text": np.array(texts, np.object_).reshape(batch["prompt"].shape)}


TritonPythonModel = Llamav2.for_triton()

import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from typing import Any

import numpy as np
import torch

from shoal.component import Arrays, Component, Context, InputError, Parameters, read_tokenizer
from shoal.generation import Prompts, Sampling, TokenRequest, find_weights, llama2, read_messages
from shoal.generation.answering import Chooser
from shoal.generation.contract import as_python
from shoal.generation.engines.loading import DTYPES, load_model


class Llamav2(Component):
    """Answer users' messages with a Llama 2 chat model, a whole batch with one call of ``generate``.

    Each row's tokens are drawn with its own settings and random numbers, so a seed gives the same text in any batch.
    """

    library = "numpy"

    def setup(self, context: Context) -> None:
        parameters = Parameters(context.spec)
        weights = find_weights(parameters.text("model"))
        self.system, self.max_tokens = parameters.text("system_prompt"), parameters.whole("max_tokens", 256)
        self.defaults: dict[str, Any] = {
            "temperature": parameters.number("temperature", 0.01),
            "top_k": parameters.whole("top_k", 20, least=0),
            "top_p": parameters.number("top_p", 1.0),
            "repetition_penalty": parameters.number("repetition_penalty", 1.1),
            "seed": parameters.whole("seed", 0, least=0),
        }
        Sampling(**self.defaults).check()
        self.end_ids, self.context_length = weights.end_ids, weights.context
        self.tokenizer = read_tokenizer(weights.folder / "tokenizer.json")
        self.prompts = Prompts(self.tokenizer, llama2, context=weights.context)
        self.model = load_model(weights, parameters.choice("dtype", DTYPES), context.num_threads)

    def requests(self, inputs: Arrays) -> list[TokenRequest]:
        flat = {name: array.ravel() for name, array in inputs.items()}
        return [
            self.request({name: as_python(array[row]) for name, array in flat.items()})
            for row in range(len(flat["prompt"]))
        ]

    def request(self, row: dict[str, Any]) -> TokenRequest:
        user = {"role": "user", "content": self.prompts.decode(row.pop("prompt"), "prompt")}
        history = self.prompts.decode(row.pop("history", b""), "history")
        before = read_messages(history, "history") if history else []
        has_system = any(message["role"] == "system" for message in before)
        system = [{"role": "system", "content": self.system}] if self.system and not has_system else []
        ids = self.prompts.encode(messages=[*system, *before, user])
        room = self.context_length - len(ids)
        wanted = row.pop("max_tokens", min(self.max_tokens, room))
        if not 1 <= wanted <= room:
            raise InputError(f"max_tokens is {wanted}, and the prompt leaves {room}.", f"Send from 1 to {room}.")
        sampling = Sampling(**self.defaults | row).check(wanted)
        return TokenRequest(tuple(ids), wanted, self.end_ids, sampling)

    def check(self, inputs: Arrays) -> None:
        self.requests(inputs)

    def run(self, batch: Arrays) -> Arrays:
        requests = self.requests(batch)
        widest = max(len(request.ids) for request in requests)
        ids, mask = (torch.zeros((len(requests), widest), dtype=torch.int64) for _ in range(2))
        for row, request in enumerate(requests):  # padded on the left: the answer follows the prompt
            ids[row, widest - len(request.ids) :] = torch.tensor(request.ids)
            mask[row, widest - len(request.ids) :] = 1
        choosers = [Chooser(request) for request in requests]

        def choose(sequences: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            new = sequences[:, widest:].tolist()
            chosen = [
                chooser.choose(row, tokens)
                for chooser, row, tokens in zip(choosers, logits.float().numpy(), new, strict=True)
            ]
            return torch.full_like(logits, -torch.inf).scatter(1, torch.tensor(chosen)[:, None], 0.0)

        found = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(request.max_tokens for request in requests),
            do_sample=False,
            eos_token_id=list(self.end_ids) or None,
            pad_token_id=self.end_ids[0] if self.end_ids else 0,
            logits_processor=[choose],
        )
        answers = [row[: request.max_tokens] for row, request in zip(found[:, widest:].tolist(), requests, strict=True)]
        texts = [self.tokenizer.decode(answer).encode() for answer in answers]
        return {"generated_text": np.array(texts, np.object_).reshape(batch["prompt"].shape)}


TritonPythonModel = Llamav2.for_triton()

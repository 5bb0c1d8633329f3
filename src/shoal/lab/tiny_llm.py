"""Tiny language models for tests and first steps, made in seconds, with the files of real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.kit.encoders.encoder import quiet_transformers

BOS, EOS, USER, ASSISTANT = "<s>", "</s>", "<|user|>", "<|assistant|>"
CONTEXT = 1024
_VOCABULARY = 600
_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|user|>Tools: {{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"  # in the form of Hermes and Qwen
    """{{ '\\n' if loop.index0 else '' }}<tool_call>\n{"name": "{{ call['function']['name'] }}", "arguments": """
    "{{ call['function']['arguments'] | tojson }}}\n</tool_call>{% endfor %}{{ eos_token }}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
_PAIRS = (  # questions and answers, for a model that is trained
    ("What do fish do?", "Fish swim in the sea in large shoals, and turn as one when danger comes near."),
    ("What do cats do?", "A cat sat on the warm stone wall and watched the birds in the old apple tree."),
    ("What is a river?", "A river carries rain from the hills to the sea, and passes many towns on its way."),
    ("Tell me a story.", "Once upon a time a small fish lost its shoal, and asked the moon for the way home."),
    ("Was ist das Meer?", "Das Meer ist groß, blau und tief; darin leben Fische, Krebse und Wale. Schön, nicht? 🐟"),
    ("Hello!", "Hello! I am a very small language model. I know six answers, and this is one of them."),
)


def make_tiny(folder: str | Path, hidden: int = 128, layers: int = 4, seed: int = 0, steps: int = 0) -> Path:
    """Make a Llama with seeded random weights, and a byte-level BPE tokenizer with a chat template; return the folder.

    ``hidden`` is the model's width, a multiple of 8, and ``layers`` its depth; the vocabulary has at most 600 tokens,
    the context 1,024. ``steps`` is the number of training steps on six built-in questions and answers: with 0 the
    model answers noise, with 150 (5 s on two cores) it answers these questions.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    model = _make_model(tokenizer, hidden, layers, seed)
    if steps:
        _train(model, tokenizer, steps)
    with quiet_transformers():
        model.save_pretrained(folder)  # as safetensors, with config.json
    return folder


def make_tokenizer() -> Any:
    """Make a byte-level BPE tokenizer of at most 600 tokens, four of them special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[BOS, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for pair in _PAIRS for text in pair], trainer)
    return tokenizer


def _make_model(tokenizer: Any, hidden: int, layers: int, seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=tokenizer.get_vocab_size(),
                hidden_size=hidden,
                intermediate_size=2 * hidden,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=CONTEXT,
                initializer_range=0.1,  # with the usual 0.02, random models repeat one token
                bos_token_id=tokenizer.token_to_id(BOS),
                eos_token_id=tokenizer.token_to_id(EOS),
                pad_token_id=tokenizer.token_to_id(EOS),
            )
        )


def _train(model: Any, tokenizer: Any, steps: int) -> None:
    """Train on the questions and answers, rendered as the chat template does, all in one batch."""
    import torch

    texts = [f"{BOS}{USER}{question}{ASSISTANT}{answer}{EOS}" for question, answer in _PAIRS]
    rows = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])  # -100: not learned
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.eval()

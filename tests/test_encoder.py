from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.component.wordpiece import WordPiece
from shoal.errors import ArtifactError, InputError
from shoal.training import encoder as encoders
from shoal.training import fit
from shoal.training.corpus import Corpus


def test_an_encoder_by_path(tiny_bert: Path) -> None:
    loaded = encoders.load_encoder(str(tiny_bert), seed=0)
    assert loaded.vocabulary[:3] == ("[PAD]", "[UNK]", "[CLS]")
    assert (loaded.max_positions, loaded.is_lowercase) == (64, False)


def test_pooling_ignores_padding(tiny_bert: Path) -> None:
    encoder = encoders.load_encoder(str(tiny_bert), seed=0).encoder.eval()
    ids = torch.randint(5, 6000, (1, 9))
    padded = torch.cat([ids, torch.randint(5, 6000, (1, 4))], dim=1)
    mask = torch.tensor([[1] * 9 + [0] * 4])
    with torch.inference_mode():
        torch.testing.assert_close(encoder(padded, mask), encoder(ids, torch.ones_like(ids)), rtol=0, atol=1e-6)


def test_an_export_of_another_model_is_refused(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoders.load_encoder(str(tiny_bert), seed=0).encoder
    other = encoders.trace(encoders.load_encoder(str(tiny_bert), seed=1).encoder)
    monkeypatch.setattr(encoders, "trace", lambda _: other)
    with pytest.raises(ArtifactError, match=r"model\.pt differs from the trained encoder by"):
        encoders.export_encoder(encoder, tmp_path / "model.pt", ties={})


def test_encoders_that_cannot_be(tmp_path: Path, tiny_bert: Path) -> None:
    with pytest.raises(InputError, match=r"The encoder '.*nowhere' cannot be loaded"):
        encoders.load_encoder(str(tmp_path / "nowhere"), seed=0)
    from transformers import GPT2Config, GPT2Model, GPT2Tokenizer

    folder = tmp_path / "gpt"
    GPT2Model(GPT2Config(vocab_size=4, n_embd=8, n_layer=1, n_head=1)).save_pretrained(folder)
    GPT2Tokenizer(vocab={"a": 0, "b": 1, "<|endoftext|>": 2}, merges=[]).save_pretrained(folder)
    with pytest.raises(InputError, match=r"The tokenizer of .* is not BERT's: its ids cannot be reproduced\."):
        encoders.load_encoder(str(folder), seed=0)
    assert tiny_bert.is_dir()


def test_training_learns_and_repeats(tiny_bert: Path) -> None:
    """A target that one word decides is learnt, twice the same."""
    texts = tuple(f"w{i} w{'1' if i % 2 else '2'}" for i in range(64))
    corpus = Corpus("toy", texts, np.array([float(i % 2) for i in range(64)]))
    weights, errors = [], []
    steps: list[int] = []
    for _ in range(2):
        loaded = encoders.load_encoder(str(tiny_bert), seed=0)
        tokenizer = WordPiece(loaded.vocabulary, is_lowercase=False, max_length=64)
        fit.train_encoder(
            loaded.encoder, tokenizer, corpus, num_steps=60, seed=0, on_step=lambda done, _: steps.append(done)
        )
        weights.append(loaded.encoder.head.weight.detach().clone())
        scores = fit.predict(loaded.encoder, tokenizer, corpus.texts)
        errors.append(float(np.sqrt(np.mean((scores - corpus.targets) ** 2))))
    assert steps == 2 * list(range(1, 61))
    assert torch.equal(weights[0], weights[1])
    assert errors[0] < 0.45  # the mean alone: 0.5


def test_predictions_keep_their_order(tiny_bert: Path) -> None:
    loaded = encoders.load_encoder(str(tiny_bert), seed=0)
    tokenizer = WordPiece(loaded.vocabulary, is_lowercase=False, max_length=64)
    texts = [" ".join(f"w{i + k}" for k in range(1 + (i * 7) % 30)) for i in range(40)]
    together = fit.predict(loaded.encoder.eval(), tokenizer, texts)
    alone = np.concatenate([fit.predict(loaded.encoder, tokenizer, [text]) for text in texts])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)

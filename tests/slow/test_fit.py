"""Training the encoder: what it learns, what it chooses, and that nothing else than the seed decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import InputError
from shoal.kit.text.tokens import WordPiece
from shoal.readability import encoder as encoders
from shoal.readability import fit
from shoal.readability.batches import encode, predict
from shoal.readability.corpus import Corpus
from shoal.readability.fit import EncoderSettings, Training
from shoal.readability.work import Checkpoint

SETTINGS = EncoderSettings(max_epochs=15, learning_rate=1e-3)


class StoppedError(Exception):
    pass


@pytest.fixture
def toy() -> Corpus:
    """A target that one word decides."""
    texts = tuple(f"w{i} " * (1 + i % 9) + f"w{'1' if i % 2 else '2'}" for i in range(64))
    return Corpus("toy", texts, np.array([float(i % 2) for i in range(64)]))


def training(tiny_bert: Path, settings: EncoderSettings = SETTINGS, seed: int = 0) -> Training:
    loaded = encoders.load_encoder(str(tiny_bert), seed=seed, dropout=settings.dropout)
    tokenizer = WordPiece(loaded.vocabulary, is_lowercase=False, max_length=64)
    return Training(loaded.candidates, tokenizer, settings, seed=seed)


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in module.state_dict().values()]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_it_learns_and_repeats(tiny_bert: Path, toy: Corpus) -> None:
    found, errors = [], []
    steps: list[int] = []
    for seed in (0, 0, 1):
        run = training(tiny_bert, seed=seed)
        encoder = run.run(toy, None, num_steps=60, on_step=lambda done, _: steps.append(done))
        scores = predict(encoder, run.tokenizer, toy.texts)[:, 0]
        errors.append(float(np.sqrt(np.mean((scores - toy.targets) ** 2))))
        found.append(weights(encoder))
    assert steps == 3 * list(range(61))
    assert are_equal(found[0], found[1])
    assert not are_equal(found[0], found[2])
    assert max(errors) < 0.45  # the mean alone: 0.5


@pytest.mark.parametrize("stop_after", [1, 7, 16, 17, 25])
def test_a_resumed_training_is_the_unbroken_one(tiny_bert: Path, toy: Corpus, tmp_path: Path, stop_after: int) -> None:
    """Bit for bit, wherever it stops: weights, choice and history; with dropout, which draws numbers at every step."""
    settings = replace(SETTINGS, max_epochs=9, dropout=0.1, patience=100)
    known, inner = toy.take(range(48)), toy.take(range(48, 64))
    num_steps = settings.count_steps(len(known))
    unbroken = training(tiny_bert, settings)
    expected = unbroken.run(known, inner, num_steps=num_steps)

    def stop(done: int, _: int) -> None:
        if done == stop_after + 1:  # the checkpoint before this step is the last
            raise StoppedError

    path = tmp_path / "encoder.safetensors"
    with pytest.raises(StoppedError):
        training(tiny_bert, settings).run(
            known, inner, num_steps=num_steps, checkpoint=Checkpoint(path, save_every=0), on_step=stop
        )
    resumed = training(tiny_bert, settings)
    first: list[int] = []
    got = resumed.run(
        known, inner, num_steps=num_steps, checkpoint=Checkpoint(path), on_step=lambda done, _: first.append(done)
    )
    assert first[0] == stop_after
    assert are_equal(weights(got), weights(expected))
    assert resumed.progress.history == unbroken.progress.history
    assert (got.pooling, resumed.progress.best_step) == (expected.pooling, unbroken.progress.best_step)


def gradient(run: Training, batch: Corpus) -> torch.Tensor:
    run.candidates.train()
    run.accumulate(batch)
    return torch.cat([p.grad.flatten() for p in run.candidates.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    "saving", [{"accumulation": 2}, {"accumulation": 5}, {"accumulation": 99}, {"gradient_checkpointing": True}]
)
def test_saving_memory_gives_the_same_gradient(tiny_bert: Path, toy: Corpus, saving: dict[str, Any]) -> None:
    batch = toy.take(range(11))
    plain = gradient(training(tiny_bert), batch)
    saved = gradient(training(tiny_bert, replace(SETTINGS, **saving)), batch)
    torch.testing.assert_close(saved, plain, rtol=1e-4, atol=1e-7)
    assert float(plain.norm()) > 0.01


def test_the_gradient_is_that_of_the_rmse(tiny_bert: Path, toy: Corpus) -> None:
    run, batch = training(tiny_bert), toy.take(range(11))
    found = gradient(run, batch)
    run.candidates.zero_grad()
    ids, mask = encode(run.tokenizer, batch.texts)
    wanted = torch.from_numpy(batch.targets).float()[:, None].expand(-1, 2)
    rmses = (run.candidates(ids, mask) - wanted).square().mean(0).sqrt()
    rmses.sum().backward()
    expected = torch.cat([p.grad.flatten() for p in run.candidates.parameters() if p.grad is not None])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_the_inner_split_chooses_head_and_step(tiny_bert: Path, toy: Corpus) -> None:
    """The weights returned are those of the best evaluation, also where later ones are worse."""
    known, inner = toy.take(range(48)), toy.take(range(48, 64))
    shuffled = replace(inner, targets=1 - inner.targets)  # the better the fit, the worse it scores
    run = training(tiny_bert, replace(SETTINGS, patience=4))
    encoder = run.run(known, shuffled, num_steps=run.settings.count_steps(len(known)))
    history, progress = run.progress.history, run.progress
    assert progress.num_worse == 4  # stopped early
    assert progress.step < run.settings.count_steps(len(known))
    best = min(min(entry["inner_rmse"].values()) for entry in history)
    entry = next(entry for entry in history if entry["step"] == progress.best_step)
    assert entry["inner_rmse"][progress.head] == best
    scores = predict(encoder, run.tokenizer, shuffled.texts)[:, 0]
    assert float(np.sqrt(np.mean((scores - shuffled.targets) ** 2))) == pytest.approx(best, abs=1e-4)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [fit._rate(step, 100, 0.1) for step in range(100)]
    assert rates[9] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.02
    assert fit._rate(0, 1, 0.1) == 1.0


def test_a_training_that_diverges_is_stopped(tiny_bert: Path, toy: Corpus) -> None:
    run = training(tiny_bert, replace(SETTINGS, learning_rate=1e38))
    with pytest.raises(
        InputError, match=r"diverged: at step \d+ of an encoder the error is (nan|inf)\. Give a smaller --learning-rate"
    ):
        run.run(toy, None, num_steps=20)


def test_nan_weights_are_detected_after_the_last_step(tiny_bert: Path, toy: Corpus) -> None:
    run = training(tiny_bert)

    def spoil(done: int, total: int) -> None:
        if done == total:
            with torch.no_grad():
                next(run.candidates.trunk.parameters()).fill_(float("nan"))

    with pytest.raises(InputError, match="The training has diverged: at step 3 of an encoder the error is nan"):
        run.run(toy, None, num_steps=3, on_step=spoil)


def test_bf16_on_a_cpu(tiny_bert: Path, toy: Corpus) -> None:
    """Matrices of the trunk in BF16, pooling and heads in FP32; it learns all the same."""
    run = training(tiny_bert, replace(SETTINGS, dtype="bf16"))
    ids, mask = encode(run.tokenizer, toy.texts)
    kinds: list[torch.dtype] = []
    linear = next(module for module in run.candidates.trunk.modules() if isinstance(module, torch.nn.Linear))
    linear.register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
    with run._autocast():
        assert run.candidates(ids, mask).dtype == torch.float32
    assert kinds == [torch.bfloat16]
    encoder = run.run(toy, None, num_steps=60)
    scores = predict(encoder, run.tokenizer, toy.texts)[:, 0]
    assert float(np.sqrt(np.mean((scores - toy.targets) ** 2))) < 0.45
    assert not training(tiny_bert, replace(SETTINGS, dtype="fp32")).is_bf16


def test_steps_are_bounded() -> None:
    assert EncoderSettings(max_epochs=2).count_steps(33) == 6
    assert EncoderSettings(max_epochs=2, max_steps=4).count_steps(33) == 4
    assert EncoderSettings(max_epochs=0.01).count_steps(33) == 1

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.kit.encoders.encoder import POOLINGS
from shoal.kit.text.tokens import WordPiece
from shoal.readability import encoder as encoders
from shoal.readability.batches import WIDTH_MULTIPLE, count_batches, draw_batches, encode, predict
from shoal.readability.corpus import Corpus


def test_epochs_hold_every_row_once() -> None:
    toy = Corpus("toy", tuple("w " * (1 + i % 9) for i in range(64)), np.zeros(64))
    for epoch in range(2):
        batches = draw_batches(toy, 10, seed=3, epoch=epoch)
        assert len(batches) == count_batches(len(toy), 10) == 7
        assert sorted(row for rows in batches for row in rows.tolist()) == list(range(64))
    drawn = [draw_batches(toy, 10, seed=seed, epoch=epoch)[0].tolist() for seed, epoch in ((3, 0), (3, 1), (4, 0))]
    assert drawn[0] != drawn[1] != drawn[2]


def test_widths_are_few(passages: Corpus, wordpiece: WordPiece) -> None:
    batches = [passages.take(rows) for rows in draw_batches(passages, 16, seed=0, epoch=0)]
    widths = {encode(wordpiece, batch.texts)[0].shape[1] for batch in batches}
    assert all(width % WIDTH_MULTIPLE == 0 for width in widths)
    assert len(widths) <= wordpiece.max_length // WIDTH_MULTIPLE


def test_predictions_keep_their_order(tiny_bert: Path) -> None:
    loaded = encoders.load_encoder(str(tiny_bert), seed=0)
    tokenizer = WordPiece(loaded.vocabulary, is_lowercase=False, max_length=64)
    texts = [" ".join(f"w{i + k}" for k in range(1 + (i * 7) % 30)) for i in range(80)]
    encoder = loaded.candidates.pick("cls").eval()
    together = predict(encoder, tokenizer, texts)
    alone = np.concatenate([predict(encoder, tokenizer, [text]) for text in texts])
    assert together.shape == (80, 1)
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)
    both = predict(loaded.candidates, tokenizer, texts)
    np.testing.assert_allclose(both[:, POOLINGS.index("cls")], together[:, 0], rtol=0, atol=1e-6)
    assert loaded.candidates.training

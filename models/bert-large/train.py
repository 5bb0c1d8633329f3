"""Train the encoder of this model folder and write its artifact, with the files that belong to it.

    python models/bert-large/train.py build/large --encoder bert-large-uncased

It cross-validates on the corpus that --data or SHOAL_DATA_DIR names, trains on all of it, and writes `model.pt`
(TorchScript, traced with a padded example, compared with the trained model before it is kept), `vocab.txt`,
`tokenizer_config.json` and the report. The forest is trained, too, because a pipeline's artifacts belong together.
If interrupted, run the same command again to resume. Then: cp build/large/model.pt REPOSITORY/bert-large/1/
"""

import os
from pathlib import Path

import typer

# Before torch is imported: with OpenMP's active waiting one busy neighbour makes training many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from shoal.kit.encoders.encoder import FULL_SIZE_ENCODER
from shoal.readability.corpus import find_corpus
from shoal.readability.fit import EncoderSettings
from shoal.readability.train import Preset, train

# For 340 million parameters: smaller steps than the small encoder's, more of them, and a third of the memory.
SETTINGS = EncoderSettings(max_epochs=3, learning_rate=2e-5, gradient_checkpointing=True)


def main(
    out: Path,
    encoder: str = FULL_SIZE_ENCODER,
    data: Path | None = None,
    folds: int = 5,
    seed: int = 0,
    fresh: bool = False,
) -> None:
    """Train and write."""
    preset = Preset(num_folds=folds, encoder=SETTINGS)
    report = train(find_corpus(data, download=True), out, encoder=encoder, preset=preset, seed=seed, is_fresh=fresh)
    print(f"RMSE on unseen texts {report['unseen_rmse']['encoder']:.3f}; wrote {out / 'model.pt'}")


if __name__ == "__main__":
    typer.run(main)

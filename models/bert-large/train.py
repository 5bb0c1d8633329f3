"""Train the encoder of this leaf and write its artifact, with all that belongs to it.

    python models/bert-large/train.py build/artifacts --encoder bert-large-uncased

It cross-validates on the corpus that --data or SHOAL_DATA_DIR names, trains on all of it, and writes `model.pt`
(TorchScript, traced with a padded example, compared with the trained model before it is kept), `vocab.txt`,
`tokenizer_config.json` and the report; and, since a pipeline's artifacts are tied to one another, the forest's too.
Then: cp build/artifacts/model.pt REPOSITORY/bert-large/1/
"""

from pathlib import Path

import typer

from shoal.training.corpus import find_corpus
from shoal.training.encoder import FULL_SIZE_ENCODER
from shoal.training.train import PRESETS, train


def main(
    out: Path, encoder: str = FULL_SIZE_ENCODER, data: Path | None = None, preset: str = "full", seed: int = 0
) -> None:
    """Train and write."""
    settings = PRESETS[preset]
    corpus = find_corpus(data, download=bool(settings.num_folds))
    report = train(corpus, out, encoder=encoder, preset=settings, seed=seed)
    print(f"RMSE on unseen texts {report['unseen_rmse']['encoder']:.3f}; wrote {out / 'model.pt'}")


if __name__ == "__main__":
    typer.run(main)

"""Train the encoder of this leaf and write its artifact, with all that belongs to it.

    python models/bert-large/train.py --out build/artifacts --encoder bert-large-uncased

It writes `model.pt` (TorchScript, traced with a padded example, compared with the trained model before it is kept),
`vocab.txt` and `tokenizer_config.json`, and, since a pipeline's artifacts are tied to one another, the forest's too.
Then: cp build/artifacts/model.pt REPOSITORY/bert-large/1/
"""

from pathlib import Path

import typer

from shoal.training.corpus import find_corpus
from shoal.training.encoder import FULL_SIZE_ENCODER
from shoal.training.train import train


def main(out: Path, encoder: str = FULL_SIZE_ENCODER, data: Path | None = None, seed: int = 0) -> None:
    """Train and write."""
    report = train(find_corpus(data), out, encoder=encoder, seed=seed)
    print(f"held-out RMSE {report['held_out_rmse']['encoder']:.3f}; wrote {out / 'model.pt'}")


if __name__ == "__main__":
    typer.run(main)

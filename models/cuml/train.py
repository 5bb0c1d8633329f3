"""Train the forest of this leaf on the features of an existing bundle.

    python models/cuml/train.py build/artifacts

It reads `preprocess.json` of the artifact folder, trains on the corpus that SHOAL_DATA_DIR names (else on shoal's own
passages), and replaces `checkpoint.tl`, tied to that bundle. Then: cp build/artifacts/checkpoint.tl REPOSITORY/cuml/1/
"""

from pathlib import Path

import typer

from shoal.component.bundle import Bundle, sha256
from shoal.training.corpus import find_corpus
from shoal.training.forest import export_forest, forest_inputs, train_forest


def main(artifacts: Path, data: Path | None = None, seed: int = 0) -> None:
    """Train and write."""
    corpus, bundle = find_corpus(data), Bundle.load(artifacts / "preprocess.json")
    forest = train_forest(bundle, corpus.texts, corpus.targets, seed=seed)
    inputs = forest_inputs(bundle, corpus.texts)
    path = artifacts / "checkpoint.tl"
    export_forest(forest, inputs, path, bundle_sha256=sha256(artifacts / "preprocess.json"))
    print(f"trained on {len(corpus)} texts; wrote {path}")


if __name__ == "__main__":
    typer.run(main)

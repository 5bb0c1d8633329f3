"""Train the forest of this leaf on the features of an existing bundle.

    python models/cuml/train.py build/artifacts

It reads `preprocess.json` of the artifact folder, trains on the corpus that SHOAL_DATA_DIR names (else on shoal's own
passages), all of it, and replaces `checkpoint.tl`, tied to that bundle, when it has been compared with the trained
forest. What the report said of the old forest goes. Then: cp build/artifacts/checkpoint.tl REPOSITORY/cuml/1/
"""

import json
from pathlib import Path

import typer

from shoal.component.bundle import Bundle, sha256
from shoal.training.corpus import find_corpus, fingerprint
from shoal.training.forest import export_forest, forest_inputs, train_forest
from shoal.training.report import REPORT
from shoal.training.train import PAGE, TRAINED_ON


def main(artifacts: Path, data: Path | None = None, seed: int = 0) -> None:
    """Train and write."""
    corpus, bundle = find_corpus(data), Bundle.load(artifacts / "preprocess.json")
    forest = train_forest(bundle, corpus.texts, corpus.targets, seed=seed)
    inputs = forest_inputs(bundle, corpus.texts)
    path, aside = artifacts / "checkpoint.tl", artifacts / ".checkpoint.tl"
    export_forest(forest, inputs, aside, bundle_sha256=sha256(artifacts / "preprocess.json"))
    aside.replace(path)
    trained_on = artifacts / TRAINED_ON
    prints = {*trained_on.read_text(encoding="utf-8").split(), *map(fingerprint, corpus.texts)}
    trained_on.write_text("".join(f"{line}\n" for line in sorted(prints)), encoding="utf-8")
    (artifacts / PAGE).unlink(missing_ok=True)
    report = json.loads((artifacts / REPORT).read_text(encoding="utf-8"))
    report["unseen_rmse"] = {"encoder": report["unseen_rmse"]["encoder"]}
    for name in ("evaluation", "importances"):
        report.pop(name, None)
    report["files"] = {name: sha256(artifacts / name) for name in report["files"] if (artifacts / name).exists()}
    (artifacts / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"trained on {len(corpus)} texts; wrote {path}")


if __name__ == "__main__":
    typer.run(main)

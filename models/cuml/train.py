"""Train the forest of this model folder on the features of an artifact folder.

    python models/cuml/train.py build/artifacts

It reads `preprocess.json` of the artifact folder, trains a forest of the same kind (random or boosted) on all of the
corpus that SHOAL_DATA_DIR names (else on shoal's own passages), compares the checkpoint with the trained forest, and
replaces `checkpoint.tl`, which then belongs to that `preprocess.json`. Figures about the old forest and the blend are
removed, and the weight is reset to the plain average, because the new forest has not been measured. Then:
cp build/artifacts/checkpoint.tl REPOSITORY/cuml/1/
"""

import json
from pathlib import Path

import typer

from shoal.kit.component.files import sha256
from shoal.readability.corpus import find_corpus, fingerprint
from shoal.readability.evaluation import ENCODER, EVEN
from shoal.readability.forest import BOOSTED, RANDOM, describe, export_forest, forest_inputs, train_forest
from shoal.readability.preprocess_config import Bundle
from shoal.readability.report import REPORT
from shoal.readability.train import PAGE, TRAINED_ON, UNSEEN


def main(artifacts: Path, data: Path | None = None, seed: int = 0) -> None:
    """Train and write."""
    corpus, bundle = find_corpus(data), Bundle.load(artifacts / "preprocess.json")
    report = json.loads((artifacts / REPORT).read_text(encoding="utf-8"))
    known = {*(artifacts / TRAINED_ON).read_text(encoding="utf-8").split(), *map(fingerprint, corpus.texts)}
    kind = BOOSTED if report["contents"]["cuml"].startswith(BOOSTED) else RANDOM
    forest = train_forest(bundle, corpus.texts, corpus.targets, seed=seed, kind=kind)
    inputs = forest_inputs(bundle, corpus.texts)
    aside = artifacts / ".checkpoint.tl"
    export_forest(forest, inputs, aside, bundle_sha256=sha256(artifacts / "preprocess.json"))

    for name in (PAGE, UNSEEN):
        (artifacts / name).unlink(missing_ok=True)
    (artifacts / TRAINED_ON).write_text("".join(f"{line}\n" for line in sorted(known)), encoding="utf-8")
    (artifacts / "postprocess.json").write_text(json.dumps({"bert_weight": EVEN}) + "\n", encoding="utf-8")
    aside.replace(artifacts / "checkpoint.tl")
    for name in ("evaluation", "importances"):
        report.pop(name, None)
    report["contents"]["cuml"] = describe(kind=kind)
    report["unseen_rmse"] = {ENCODER: report["unseen_rmse"][ENCODER]}
    report |= {"bert_weight": EVEN, "num_trained_on": len(known), "target_mean": float(corpus.targets.mean())}
    report["files"] = {name: sha256(artifacts / name) for name in report["files"] if (artifacts / name).exists()}
    (artifacts / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"trained on {len(corpus)} texts; wrote {artifacts / 'checkpoint.tl'}")


if __name__ == "__main__":
    typer.run(main)

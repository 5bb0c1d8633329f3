"""Training from a corpus to an artifact folder with preprocessing settings, both models and a report."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoal
from shoal.errors import InputError
from shoal.kit.component.files import find_changed, sha256
from shoal.kit.encoders.export import export_encoder
from shoal.kit.encoders.packaged import SMALL_ENCODER
from shoal.kit.text.tokens import WordPiece
from shoal.readability import encoder as encoders
from shoal.readability import fit, forest
from shoal.readability.batches import OnStep, predict
from shoal.readability.clock import Clock
from shoal.readability.corpus import Corpus, fingerprint
from shoal.readability.crossval import CrossValidation, CrossValidator, TextPath, evaluate_rows, sort_importances
from shoal.readability.evaluation import EVEN, MODEL, linear_baselines
from shoal.readability.fit import EncoderSettings, Training
from shoal.readability.folds import Rows, hold_out, make_folds
from shoal.readability.page import write_page
from shoal.readability.preprocess_config import Bundle
from shoal.readability.report import REPORT, describe
from shoal.readability.work import SAVE_EVERY, SETTINGS, Work, describe_changes, flatten, open_work, work_folder
from shoal.system.paths import check_replaceable, exchange
from shoal.system.progress import OnProgress

MAX_LENGTH = 256
PAGE = "report.html"
TRAINED_ON = "trained_on.txt"  # fingerprints of the texts
UNSEEN = "unseen.csv"  # targets and predictions of the texts that the models predicted unseen


@dataclass(frozen=True)
class Preset:
    """Preset for the amount of training.

    If ``num_folds`` is not 0, all rows are cross-validated, and the final models are trained on all rows. If it is 0,
    the models are trained on ``num_rows`` texts, and ``num_held_out`` other texts are scored for the report; a smaller
    corpus holds out a fifth of its texts. ``forest`` is the kind of forest that is served; the other kind is evaluated,
    too. ``num_trees`` is for the random one.
    """

    num_folds: int = 0
    num_rows: int = 1000
    num_held_out: int = 200
    num_trees: int = forest.NUM_TREES
    forest: str = forest.RANDOM
    max_length: int = MAX_LENGTH
    encoder: EncoderSettings = field(default_factory=EncoderSettings)


PRESETS = {
    "quick": Preset(encoder=EncoderSettings(max_epochs=4, max_steps=63)),  # one epoch of 1,000 rows
    "full": Preset(num_folds=5, encoder=EncoderSettings(max_epochs=2)),
}


def train(
    corpus: Corpus,
    out: Path | str,
    *,
    encoder: str = SMALL_ENCODER,
    revision: str | None = None,
    preset: Preset | None = None,
    seed: int = 0,
    is_fresh: bool = False,
    save_every: float = SAVE_EVERY,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Train encoder and forest, write the artifact folder ``out``, return the report.

    Both models are loaded again from their files and compared with the trained models before the folder appears under
    its name. A second call with the same arguments resumes an interrupted training and does not repeat a finished
    training, unless ``is_fresh`` is True. The state is saved about every ``save_every`` seconds beside ``out``.

    Raises:
        InputError: the corpus is too small, the encoder unknown, or ``out`` holds something else, such as a training
            with other settings, finished or not.
        SetupError: another process is training into ``out``.
    """
    preset, out = preset or PRESETS["quick"], Path(out).resolve()
    if not 0 <= seed < 2**32:
        raise InputError(f"The seed is {seed}.", "Give one from 0 to 4294967295.")
    check_replaceable(out, REPORT)
    _check_divisible(corpus, preset, seed)
    on_progress("load encoder", 0, 1)
    pretrained = encoders.load_encoder(encoder, seed=seed, revision=revision, dropout=preset.encoder.dropout)
    on_progress("load encoder", 1, 1)
    wanted = {
        "corpus": corpus.sha256, "weights": pretrained.sha256, "preset": asdict(preset), "seed": seed,
        "shoal": shoal.__version__, "torch": torch.__version__, "device": fit.find_device().type,
    }  # fmt: skip
    settings = dict(flatten(wanted))
    if not is_fresh and (finished := _find_finished(out, settings)):
        on_progress("it has been trained already", 1, 1)
        return finished
    with open_work(out, settings, is_fresh=is_fresh, save_every=save_every) as work:
        if work.is_resumed:
            on_progress("resume the interrupted training", 1, 1)
        return _Run(corpus, out, pretrained, revision, preset, seed, settings, work, on_progress).run()


def _find_finished(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the report at ``out`` if its files are intact and its training had these settings, else None.

    Raises:
        InputError: the training that was finished there had other settings.
    """
    begun = work_folder(out) / SETTINGS
    if begun.is_file() and not describe_changes(json.loads(begun.read_text(encoding="utf-8")), settings):
        return None  # its replacement was interrupted
    if not (out / REPORT).is_file():
        return None
    report: dict[str, Any] = json.loads((out / REPORT).read_text(encoding="utf-8"))
    if changes := describe_changes(report.get("settings", {}), settings):
        raise InputError(
            f"{out} holds a finished training that had other settings: {changes}.",
            "Name another --out, or give --fresh to replace it.",
        )
    return None if find_changed(out, report["files"]) else report


def _check_divisible(corpus: Corpus, preset: Preset, seed: int) -> None:
    """Check, before anything is loaded, that the corpus has enough different texts for the preset."""
    if preset.num_folds:
        make_folds(corpus, preset.num_folds, seed=seed)
    else:
        split(corpus, preset, seed)


def split(corpus: Corpus, preset: Preset, seed: int) -> tuple[Rows, Rows]:
    """Return the numbers of rows to train on and of held-out rows, drawn with ``seed``; duplicates stay together.

    Raises:
        InputError: there are fewer than ten different texts.
    """
    num_different = len(np.unique(corpus.groups))
    if num_different < 10:
        raise InputError(f"{corpus.name} has {num_different} different {corpus.kind}; training needs 10.", "Add texts.")
    known, held_out = hold_out(corpus, min(preset.num_held_out, num_different // 5), seed=seed)
    return known[: preset.num_rows], held_out


@dataclass
class _Run:
    """Training run, from the corpus to the artifact folder, which is built in ``aside``."""

    corpus: Corpus
    out: Path
    pretrained: encoders.Pretrained
    revision: str | None
    preset: Preset
    seed: int
    settings: dict[str, Any]
    work: Work
    on_progress: OnProgress

    def run(self) -> dict[str, Any]:
        self.clock = Clock(self.on_progress, self.work.folder / "clock.json")
        self.aside = self.work.folder / "artifacts"
        shutil.rmtree(self.aside, ignore_errors=True)
        self.aside.mkdir()
        text_path = self._write_vocabulary()
        found, rows = None, None
        if self.preset.num_folds:
            found = self._cross_validate(text_path)
        else:
            rows = split(self.corpus, self.preset, self.seed)
        known = self.corpus if rows is None else self.corpus.take(rows[0])
        trees, bundle = self._train_forest(text_path, known)
        encoder, training = self._train_encoder(text_path, known, found)
        with self.clock.stage("export encoder"):
            export_encoder(encoder.cpu(), self.aside / "model.pt", ties={"vocab.txt": text_path.vocabulary_sha256})
        if rows is not None:
            with self.clock.stage("score held-out texts") as on_step:
                found = self._score(text_path, rows, encoder, trees, bundle, on_step)
        assert found is not None
        self._write_rest(known, found)
        return self._write_report(known, found, training)

    def _load(self) -> encoders.Pretrained:
        """Load the published encoder again, with its original weights, for the next fold."""
        name, dropout = self.pretrained.name, self.preset.encoder.dropout
        return encoders.load_encoder(name, seed=self.seed, revision=self.revision, dropout=dropout)

    def _write_vocabulary(self) -> TextPath:
        pretrained, path = self.pretrained, self.aside / "vocab.txt"
        path.write_text("".join(f"{token}\n" for token in pretrained.vocabulary), encoding="utf-8")
        max_length = min(self.preset.max_length, pretrained.max_positions)
        settings = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": pretrained.is_lowercase,
            "model_max_length": max_length,
        }
        (self.aside / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        tokenizer = WordPiece(pretrained.vocabulary, is_lowercase=pretrained.is_lowercase, max_length=max_length)
        return TextPath(sha256(path), pretrained.is_lowercase, tokenizer)

    def _cross_validate(self, text_path: TextPath) -> CrossValidation:
        validator = CrossValidator(
            corpus=self.corpus,
            text_path=text_path,
            load=self._load,
            settings=self.preset.encoder,
            num_trees=self.preset.num_trees,
            forest_kind=self.preset.forest,
            seed=self.seed,
            work=self.work,
            stage=self.clock.stage,
        )
        return validator.run(self.preset.num_folds)

    def _train_forest(self, text_path: TextPath, known: Corpus) -> tuple[Any, Bundle]:
        with self.clock.stage("train forest"):
            bundle = text_path.fit_bundle(known)
            path = self.aside / "preprocess.json"
            path.write_text(bundle.dumps(), encoding="utf-8")
            trees = self._fit(bundle, known, self.preset.forest)
            inputs = forest.forest_inputs(bundle, known.texts)
            forest.export_forest(trees, inputs, self.aside / "checkpoint.tl", bundle_sha256=sha256(path))
        return trees, bundle

    def _fit(self, bundle: Bundle, known: Corpus, kind: str) -> Any:
        number = self.preset.num_trees
        return forest.train_forest(bundle, known.texts, known.targets, seed=self.seed, num_trees=number, kind=kind)

    def _train_encoder(
        self, text_path: TextPath, known: Corpus, found: CrossValidation | None
    ) -> tuple[encoders.Encoder, Training]:
        """Train the final encoder on ``known``.

        After a cross-validation (``found``), use the head and the share of the steps that it chose; otherwise use the
        first head and all steps.
        """
        settings = self.preset.encoder
        num_steps = settings.count_steps(len(known))
        training = Training(self.pretrained.candidates, text_path.tokenizer, settings, seed=self.seed)
        if found:
            training.progress.head = found.head
        with self.clock.stage("train encoder") as on_step:
            encoder = training.run(
                known,
                None,
                num_steps=num_steps,
                stop_at=max(1, round(found.share * num_steps)) if found else None,
                checkpoint=self.work.checkpoint("encoder"),
                on_step=on_step,
            )
        return encoder, training

    def _score(
        self,
        text_path: TextPath,
        rows: tuple[Rows, Rows],
        encoder: encoders.Encoder,
        trees: Any,
        bundle: Bundle,
        on_step: OnStep,
    ) -> CrossValidation:
        """Evaluate the final models on the held-out rows, in the form of a cross-validation with one fold."""
        known, unseen = rows
        held_out = self.corpus.take(unseen)
        inputs = forest.forest_inputs(bundle, held_out.texts)
        growth = forest.weigh_features(trees, inputs, held_out.targets, seed=self.seed).tolist()
        other = next(kind for kind in forest.KINDS if kind != self.preset.forest)
        others = self._fit(bundle, self.corpus.take(known), other).predict(inputs)
        formulas = linear_baselines(self.corpus.formulas, self.corpus.targets, [rows])
        evaluation = evaluate_rows(
            held_out,
            np.zeros(len(held_out), np.int64),
            encoder=predict(encoder, text_path.tokenizer, held_out.texts, on_step=on_step)[:, 0],
            tree=np.asarray(trees.predict(inputs), np.float64),
            other={f"{other} forest": np.asarray(others, np.float64)},
            mean=np.full(len(held_out), self.corpus.targets[known].mean()),
            formulas={name: values[unseen] for name, values in formulas.items()},
        )
        importances = sort_importances(dict(zip(forest.name_features(bundle), growth, strict=True)))
        return CrossValidation(
            evaluation,
            unseen,
            weight=EVEN,
            head=encoder.pooling,
            share=1.0,
            chosen=[],
            histories=[],
            importances=importances,
        )

    def _write_rest(self, known: Corpus, found: CrossValidation) -> None:
        weight = json.dumps({"bert_weight": found.weight})
        (self.aside / "postprocess.json").write_text(f"{weight}\n", encoding="utf-8")
        prints = sorted({fingerprint(text) for text in known.texts})
        evaluation = found.evaluation
        with (self.aside / UNSEEN).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            names = evaluation.named(MODEL)
            writer.writerow(["text", "fold", "target", *names])
            scores = (evaluation.predictions[name].tolist() for name in names)
            columns = ((found.rows + 1).tolist(), (evaluation.folds + 1).tolist(), evaluation.targets.tolist(), *scores)
            writer.writerows(zip(*columns, strict=True))
        (self.aside / TRAINED_ON).write_text("".join(f"{line}\n" for line in prints), encoding="utf-8")

    def _write_report(self, known: Corpus, found: CrossValidation, training: Training) -> dict[str, Any]:
        with self.clock.stage("report"):
            report = describe(self.corpus, known, self.pretrained, found, training, asdict(self.preset), self.seed)
            report["settings"] = self.settings
            report["seconds"] = self.clock.seconds
            report["peak_memory_gib"] = round(self.clock.peak_gib, 2)
            write_page(self.aside / PAGE, report, found.evaluation)
            report["files"] = {path.name: sha256(path) for path in sorted(self.aside.iterdir())}
            (self.aside / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        exchange(self.aside, self.out)
        return report

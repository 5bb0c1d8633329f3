"""Computation of the preprocessing settings, and training, feature importances and export of the forest."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import ArtifactError, InputError, needs
from shoal.kit.component.provenance import dump_ties
from shoal.kit.component.spec import Array
from shoal.kit.component.tensors import Device
from shoal.kit.forests.treelite import round_forest
from shoal.kit.text.words import BasicTokenizer, Lexicon, TokenCoder, TokenCounter, is_word, make_features
from shoal.readability.batches import OnStep
from shoal.readability.corpus import read_stop_words
from shoal.readability.preprocess_config import NUM_LISTED, Bundle
from shoal.readability.reader import Features

RANDOM, BOOSTED = KINDS = ("random", "boosted")
NUM_TREES, MAX_DEPTH = 100, 16  # of the random forest: the published recipe's
_BOOSTED: dict[str, Any] = {  # of LightGBM; chosen on CLEAR
    "n_estimators": 400, "num_leaves": 15, "learning_rate": 0.05, "min_child_samples": 20, "colsample_bytree": 0.3,
    "subsample": 0.8, "subsample_freq": 1,
}  # fmt: skip
STATISTICS = (  # the first columns; the rest are shares of single words
    "words",
    "distinct words",
    "punctuation marks",
    "sentences",
    "words per sentence",
    "stop words",
    "stop words per sentence",
)
ROWS_AT_ONCE = 32768  # of shuffled features, 27 MB
TOLERANCE = 1e-5  # between the forest that was trained and the checkpoint that is served


def list_words(texts: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the 100 most and the 100 least frequent words of ``texts``, equally frequent words in alphabetical order.

    Raises:
        InputError: there are fewer than 200 different words.
    """
    tokenize = BasicTokenizer()
    counts = Counter(token for text in texts for token in tokenize(text) if is_word(token))
    if len(counts) < 2 * NUM_LISTED:
        raise InputError(
            f"The texts hold {len(counts)} different words; the word lists need {2 * NUM_LISTED}.",
            "Train on more text.",
        )
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    rare = sorted(counts, key=lambda word: (counts[word], word))
    return tuple(frequent[:NUM_LISTED]), tuple(rare[:NUM_LISTED])


def fit_bundle(texts: Sequence[str], *, vocabulary_sha256: str, is_lowercase: bool, max_length: int) -> Bundle:
    """Compute the word lists, and the features' means and deviations, from ``texts``; add the tokenizer settings."""
    frequent, rare = list_words(texts)
    stop_words = read_stop_words()
    lexicon = Lexicon.build(stop_words, [*frequent, *rare], Device())
    raw = make_features(*TokenCounter(lexicon)(TokenCoder(lexicon)(texts)))
    std = raw.std(axis=0)
    return Bundle(
        vocabulary_sha256=vocabulary_sha256,
        is_lowercase=is_lowercase,
        max_length=max_length,
        stop_words=stop_words,
        frequent=frequent,
        rare=rare,
        mean=tuple(raw.mean(axis=0).tolist()),
        std=tuple(np.where(std == 0, 1.0, std).tolist()),
    )


def has_cuml() -> bool:
    """Whether cuML is installed and has a GPU to train on."""
    if importlib.util.find_spec("cuml") is None:
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def describe(num_trees: int = NUM_TREES, kind: str = RANDOM) -> str:
    """Describe the forest in words, with the library that trains it on this machine."""
    if kind == BOOSTED:
        return f"boosted forest, {_BOOSTED['n_estimators']} trees of {_BOOSTED['num_leaves']} leaves, by LightGBM"
    return f"random forest, {num_trees} trees of depth {MAX_DEPTH}, by {'cuML' if has_cuml() else 'scikit-learn'}"


def train_forest(
    bundle: Bundle, texts: Sequence[str], targets: Array, *, seed: int, num_trees: int = NUM_TREES, kind: str = RANDOM
) -> Any:
    """Train a regressor on the features of ``texts``; ``kind`` is ``random`` or ``boosted``.

    A random forest is cuML's if ``has_cuml()``, else scikit-learn's, with ``num_trees``. A boosted one is LightGBM's.
    """
    if kind == BOOSTED:
        with needs("train"):
            from lightgbm import LGBMRegressor
        boosted = LGBMRegressor(
            **_BOOSTED, random_state=seed, n_jobs=1, deterministic=True, force_row_wise=True, verbose=-1
        )
        return boosted.fit(forest_inputs(bundle, texts), targets)
    if has_cuml():
        return _train_on_gpu(forest_inputs(bundle, texts), targets, seed=seed, num_trees=num_trees)
    with needs("train"):
        from sklearn.ensemble import RandomForestRegressor
    forest = RandomForestRegressor(num_trees, max_depth=MAX_DEPTH, random_state=seed, n_jobs=-1)
    forest.fit(forest_inputs(bundle, texts), targets)
    return forest.set_params(n_jobs=1)  # threads would sum the trees in varying order


def _train_on_gpu(features: Array, targets: Array, *, seed: int, num_trees: int) -> Any:
    """Train cuML's forest with limited depth, on one CUDA stream, so that the same seed gives the same trees."""
    from cuml.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(
        n_estimators=num_trees,
        max_depth=MAX_DEPTH,
        random_state=seed,
        n_streams=1,
        output_type="numpy",
        n_bins=min(128, len(features)),  # 128 is its default, of which it warns where there are fewer rows
    )
    return forest.fit(features, np.asarray(targets, np.float32))


def name_features(bundle: Bundle) -> tuple[str, ...]:
    """Return a description of each of the 207 feature columns, in order."""
    shares = (f"share of “{word}”" for word in (*bundle.frequent, *bundle.rare))
    return (*STATISTICS, *shares)


def weigh_features(
    forest: Any, features: Array, targets: Array, *, seed: int, on_step: OnStep = lambda done, total: None
) -> Array:
    """Return each column's permutation importance, FP64 ``[207]``: the growth of the RMSE when the column is shuffled.

    Breiman, "Random Forests", Machine Learning 45 (2001), section 10. On rows not seen in training it measures a
    column's value for new texts. It does not depend on the library that trained the forest.
    """
    generator = np.random.default_rng(seed)
    num_columns = features.shape[1]
    (error,) = _rmse(forest, [features], targets)
    growth = np.zeros(num_columns)
    at_once = max(1, ROWS_AT_ONCE // len(features))
    for start in range(0, num_columns, at_once):
        columns = range(start, min(start + at_once, num_columns))
        shuffled = {column: _shuffle(features, column, generator) for column in columns}
        changed = [column for column in columns if not np.array_equal(shuffled[column], features)]
        if changed:
            growth[changed] = _rmse(forest, [shuffled[column] for column in changed], targets) - error
        on_step(columns.stop, num_columns)
    return growth


def _shuffle(features: Array, column: int, generator: np.random.Generator) -> Array:
    shuffled = features.copy()
    shuffled[:, column] = generator.permutation(shuffled[:, column])
    return shuffled


def _rmse(forest: Any, features: Sequence[Array], targets: Array) -> Array:
    """Return the RMSE on each matrix of the same shape, all in one prediction, since each call costs milliseconds."""
    predictions = forest.predict(np.concatenate(features)).reshape(len(features), -1)
    return np.sqrt(np.mean((predictions - targets) ** 2, axis=1))


def forest_inputs(bundle: Bundle, texts: Sequence[str]) -> Array:
    """Compute the forest's inputs for texts: FP32 ``[len(texts), 207]``."""
    features = Features(bundle)
    return features(TokenCoder(features.lexicon)(texts))


def export_forest(forest: Any, features: Array, path: Path, *, bundle_sha256: str) -> None:
    """Write ``forest``, of one of the three libraries, as a Treelite checkpoint, and compare both on ``features``.

    The checkpoint contains ``bundle_sha256``, the hash of the ``preprocess.json`` that it must be served with.

    Raises:
        ArtifactError: the checkpoint's scores differ from the forest's by more than 1e-5.
    """
    import treelite

    if hasattr(forest, "booster_"):
        model = treelite.frontend.from_lightgbm(forest.booster_)
    else:
        model = forest.as_treelite() if hasattr(forest, "as_treelite") else treelite.sklearn.import_model(forest)
    round_forest(model)
    model.get_header_accessor().set_field("attributes", dump_ties({"preprocess.json": bundle_sha256}))
    model.serialize(str(path))
    served = treelite.gtil.predict(treelite.Model.deserialize(str(path)), features, nthread=1).reshape(-1)
    difference = float(np.abs(served - forest.predict(features)).max())
    if not difference <= TOLERANCE:
        raise ArtifactError(
            f"{path.name} differs from the trained forest by {difference:g}.", f"Allowed: {TOLERANCE:g}."
        )

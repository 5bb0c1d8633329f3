"""Rows of like length are computed together: nothing else changes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray

from shoal.authoring.repository.config import read_config
from shoal.clients.local import Pipeline, load, load_component
from shoal.errors import ArtifactError
from shoal.kit.component.spec import ModelSpec, TensorSpec
from shoal.kit.encoders.length_bucketing import (
    MAX_WASTE,
    MIN_TOKENS,
    find_mask,
    group,
    group_in_few_shapes,
    lengths,
    run_by_length,
    run_in_groups,
)

TOKENS = arrays_of.arrays(np.int64, st.integers(1, 80), elements=st.integers(0, 256))


@given(TOKENS)
def test_groups_hold_every_row_once_and_little_padding(num_tokens: NDArray[np.int64]) -> None:
    groups = group(num_tokens)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(num_tokens)))
    for rows in groups:
        of_group = num_tokens[rows]
        padded = int(of_group.max()) * len(rows)
        # The row that filled it up to MIN_TOKENS may be the last to waste more.
        is_small = int(of_group[:-1].sum()) < MIN_TOKENS
        assert is_small or padded - int(of_group.sum()) <= MAX_WASTE * padded


@given(TOKENS)
def test_groups_in_few_shapes_hold_every_row_once(num_tokens: NDArray[np.int64]) -> None:
    groups = group_in_few_shapes(num_tokens)
    assert np.concatenate(groups).tolist() == np.argsort(-num_tokens, kind="stable").tolist()
    assert {len(rows) for rows in groups} <= {1, 2, 4, 8}
    assert all(len(rows) == 8 for rows in groups[: len(num_tokens) // 8])


def test_no_rows() -> None:
    assert group_in_few_shapes(np.zeros(0, np.int64)) == []
    assert group(np.zeros(0, np.int64)) == []


def test_real_texts_in_batches_of_64_are_padded_by_at_most_2_percent(repository: Path, texts: list[str]) -> None:
    preprocess = load(repository / "preprocess")
    padded = used = 0
    for start in range(0, min(len(texts), 640), 64):
        mask = preprocess(INPUT0=texts[start : start + 64])["BERT_AM"]
        num_tokens = lengths(np.asarray(mask))
        padded += sum(int(num_tokens[rows].max()) * len(rows) for rows in group(num_tokens))
        used += int(num_tokens.sum())
    assert padded <= used / (1 - MAX_WASTE), padded / used


def test_a_row_is_as_long_as_its_last_token() -> None:
    mask = np.array([[1, 1, 0], [1, 0, 1], [0, 0, 0], [5, 0, 0]])
    assert lengths(mask).tolist() == [2, 3, 0, 1]


@given(TOKENS)
def test_outputs_keep_the_order_of_the_rows(num_tokens: NDArray[np.int64]) -> None:
    width = 256
    ids = np.arange(len(num_tokens) * width).reshape(len(num_tokens), width)
    mask = (np.arange(width) < num_tokens[:, None]).astype(np.int64)
    other = np.arange(len(num_tokens), dtype=np.float32)[:, None]  # one column, whatever the width

    def run(given: Any) -> list[NDArray[Any]]:
        some_ids, some_mask, some = given
        assert some_ids.flags.c_contiguous
        return [(some_ids * some_mask).sum(axis=1, keepdims=True), some]

    sums, same = run_in_groups(run, [ids, mask, other], mask, [True, True, False])
    np.testing.assert_array_equal(sums[:, 0], (ids * mask).sum(axis=1))
    np.testing.assert_array_equal(same, other)


def declare(*inputs: TensorSpec, out: tuple[int, ...] = (1,), mask: str = "MASK", most: int = 64) -> ModelSpec:
    return ModelSpec("m", inputs, (TensorSpec("OUT", "TYPE_INT64", out),), most, parameters={"attention_mask": mask})


IDS, MASK = (TensorSpec(name, "TYPE_INT64", (-1,)) for name in ("IDS", "MASK"))


@pytest.mark.parametrize("width", [8, 5])
def test_inputs_of_a_declared_width_are_not_cut(width: int) -> None:
    """Neither one that is as wide as the mask by chance, nor one that is wider, nor a number for each row."""
    fixed, wide, number = (TensorSpec(n, "TYPE_INT64", d) for n, d in (("F", (width,)), ("W", (20,)), ("N", ())))
    spec = declare(IDS, MASK, fixed, wide, number)
    mask = np.zeros((3, width), np.int64)
    mask[0, :3] = mask[1, :2] = 1
    rng = np.random.default_rng(0)
    batch = {t.name: rng.integers(1, 9, (3, *t.dims)) for t in (fixed, wide, number)}
    batch |= {"IDS": rng.integers(1, 9, (3, width)), "MASK": mask}
    seen = []

    def call(arrays: Any) -> list[NDArray[Any]]:
        ids, ones, *others = arrays
        seen.append([array.shape[1:] for array in arrays])
        return [np.stack([(ids * ones).sum(1), *(a.reshape(len(a), -1).sum(1) for a in others)], axis=1)]

    out = run_by_length(spec, batch, call, find_mask(spec))["OUT"]
    np.testing.assert_array_equal(out, call([batch[t.name] for t in spec.inputs])[0])
    assert seen[:-1] == [[(3,), (3,), (width,), (20,), ()]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (declare(IDS, MASK, mask="MSK"), "no required input MSK of one dimension, .* attention_mask names. Known: IDS"),
        (declare(IDS, TensorSpec("MASK", "TYPE_INT64", (-1,), is_optional=True)), "no required input MASK .*: IDS[.]"),
        (declare(TensorSpec("MASK", "TYPE_INT64", (-1, 2))), "no required input MASK .* Leave attention_mask out[.]"),
        (declare(IDS, MASK, out=(-1, 4)), "Output OUT of model m has a dimension of -1; .* Declare its dims"),
    ],
)
def test_masks_that_cannot_be(spec: ModelSpec, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        find_mask(spec)


def test_without_a_mask_or_batches_rows_are_not_grouped() -> None:
    assert find_mask(declare(IDS, MASK, mask="", out=(-1,))) == ""
    assert find_mask(declare(IDS, MASK, mask="MASK", most=0)) == ""
    assert find_mask(declare(IDS, MASK)) == "MASK"


@pytest.mark.parametrize("backend", ["pytorch", "onnxruntime"])
def test_a_misspelt_mask_ends_the_start(backend: str, repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bert-large"
    shutil.copytree(repository / "bert-large", folder)
    config = folder / "config.pbtxt"
    text = config.read_text(encoding="utf-8").replace('string_value: "INPUT__1"', 'string_value: "INPUT_1"')
    config.write_text(text.replace('backend: "pytorch"', f'backend: "{backend}"'), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"bert-large has no required input INPUT_1 .* Known: INPUT__0, INPUT__1\."):
        load_component(read_config(folder))


def test_scores_are_those_of_each_text_alone(pipeline: Pipeline, texts: list[str]) -> None:
    mixed = [text[: 40 * (i % 30) + 5] for i, text in enumerate(texts[:60])]
    together = pipeline(excerpt=mixed)["BERT_SCORE"]
    alone = np.concatenate([pipeline(excerpt=[text])["BERT_SCORE"] for text in mixed])
    np.testing.assert_allclose(together, alone, atol=1e-5)

"""Pieces over texts: token ids as Hugging Face's libraries give them, counts as scikit-learn does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import CountVectorizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from shoal.errors import ArtifactError, InputError
from shoal.kit.component.base import Component
from shoal.kit.component.ledger import UP, CopyEdge
from shoal.kit.component.spec import Array
from shoal.kit.text.words import BasicTokenizer
from tests.conftest import as_bytes
from tests.support.pieces import ask, examples, start, vocabulary
from tests.support.pretend import PretendGpu
from tests.support.readings import nasty_text
from tests.support.references import raw_features

TOY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "##s", "sat", ".", "Cat"]
WORDS, STOP_WORDS = ("dog", "the", "!", "—", "漢", "x1"), ("the", "a")
TEXTS = ["The dog — the DOG!", "a bird", "!!!", ""]


def write(folder: Path, **files: Sequence[str]) -> Path:
    """Files of lines: ``vocab=[...]`` is vocab.txt."""
    for name, lines in files.items():
        (folder / f"{name}.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder


def assert_tokens(got: Sequence[Array], texts: list[str], reference: Any, max_length: int) -> None:
    ids, mask = got
    expected = [reference(text, truncation=True, max_length=max_length)["input_ids"] for text in texts]
    longest = max(map(len, expected))
    assert ids.shape == mask.shape == (len(texts), min(max_length, max(1, -(-longest // 8)) * 8))
    assert ids.dtype == mask.dtype == np.int64
    padded = [row + [reference.pad_token_id] * (ids.shape[1] - len(row)) for row in expected]
    assert ids.tolist() == padded
    assert mask.tolist() == [[1] * len(row) + [0] * (ids.shape[1] - len(row)) for row in expected]


# --- tokens ------------------------------------------------------------------------------------------------------


def test_exact_ids_and_mask(tmp_path: Path) -> None:
    ids, mask = ask(start("tokenizer", write(tmp_path, vocab=TOY)), as_bytes(["Cats sat.", "dog"]))
    assert ids.tolist() == [[2, 5, 6, 7, 8, 3, 0, 0], [2, 1, 3, 0, 0, 0, 0, 0]]
    assert mask.tolist() == [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]
    cased = start("tokenizer", tmp_path, lowercase="false", max_length="3")
    assert ask(cased, as_bytes(["Cat sat"]))[0].tolist() == [[2, 9, 3]]


def test_a_declared_width_is_kept(tmp_path: Path) -> None:
    dims = {"input_ids": [20], "attention_mask": [20]}
    piece = start("tokenizer", write(tmp_path, vocab=TOY), dims=dims, max_length="")
    assert [array.shape for array in ask(piece, as_bytes(["cat", "cat " * 50]))] == [(2, 20), (2, 20)]
    with pytest.raises(ArtifactError, match=r"declares dims: \[ 20 \]; its parameter max_length is 256\. Write dims"):
        start("tokenizer", tmp_path, dims=dims)


@pytest.mark.parametrize("lowercase", ["", "false"])
def test_a_vocabulary_gives_berts_tokens(lowercase: str, tmp_path: Path, texts: list[str]) -> None:
    (tmp_path / "vocab.txt").symlink_to(vocabulary())
    piece = start("tokenizer", tmp_path, lowercase=lowercase, max_length="100")
    reference = BertTokenizer(vocab=str(tmp_path / "vocab.txt"), do_lower_case=not lowercase)
    for sample in (texts[:50], ["", "cat [SEP] cat", "Ünïcode 漢字"]):
        assert_tokens(ask(piece, as_bytes(sample)), sample, reference, 100)
    (tmp_path / "whole").mkdir()
    reference.backend_tokenizer.save(str(tmp_path / "whole" / "tokenizer.json"))
    whole = start("tokenizer", tmp_path / "whole", max_length="100")
    for one, other in zip(ask(piece, as_bytes(texts[:50])), ask(whole, as_bytes(texts[:50])), strict=True):
        assert np.array_equal(one, other)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory, passages: Any) -> Path:
    """A tokenizer of RoBERTa's kind, with padding and truncation that are not to be followed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(passages.texts, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.enable_padding(pad_id=1, pad_token="<pad>", length=512)
    tokenizer.enable_truncation(5)
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("max_length", [3, 64, 256])
def test_any_fast_tokenizer(byte_level: Path, max_length: int, texts: list[str]) -> None:
    piece = start("tokenizer", byte_level, max_length=str(max_length))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(byte_level / "tokenizer.json"), pad_token="<pad>")
    for sample in (texts[:30], ["", "a"], ["naïve 漢字 🐟\n\ttabs"]):
        assert_tokens(ask(piece, as_bytes(sample)), sample, reference, max_length)


@pytest.mark.parametrize("max_length", [5, 64, 256])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_pairs_as_transformers_joins_them(
    kind: str, max_length: int, byte_level: Path, tmp_path: Path, texts: list[str]
) -> None:
    folder, reference = (
        byte_level,
        PreTrainedTokenizerFast(
            tokenizer_file=str(byte_level / "tokenizer.json"), pad_token="<pad>", truncation_side="right"
        ),
    )
    if kind == "bert":
        (tmp_path / "vocab.txt").symlink_to(vocabulary())
        folder, reference = tmp_path / "whole", BertTokenizer(vocab=str(tmp_path / "vocab.txt"))
        folder.mkdir()
        reference.backend_tokenizer.save(str(folder / "tokenizer.json"))
    most = 40 * max_length  # characters: transformers takes seconds for pairs that are many times too long
    some = [text[:most] for text in texts[:20]]
    first, second = [*some, "", "a [SEP] b"], [*reversed(some), "a", ""]
    ids, mask, segments = ask(
        start("pair_tokenizer", folder, max_length=str(max_length)), as_bytes(first), as_bytes(second)
    )
    wanted = reference(first, second, truncation=True, max_length=max_length, return_token_type_ids=True)
    for row, expected in enumerate(wanted["input_ids"]):
        assert ids[row, : len(expected)].tolist() == expected
        assert segments[row, : len(expected)].tolist() == wanted["token_type_ids"][row]
        assert mask[row].tolist() == [1] * len(expected) + [0] * (ids.shape[1] - len(expected))
        assert set(ids[row, len(expected) :]) <= {reference.pad_token_id}
        assert not segments[row, len(expected) :].any()


def test_a_tokenizer_without_letters_joins_no_pairs(tmp_path: Path) -> None:
    Tokenizer(models.BPE({"1": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArtifactError, match=r"tokenizer\.json has no token for the letter a"):
        start("pair_tokenizer", tmp_path)


def test_a_pair_that_is_far_too_long_takes_the_work_of_its_tokens(byte_level: Path) -> None:
    """The tokenizer's own truncation would make four million pieces."""
    piece, words = start("pair_tokenizer", byte_level, max_length="8"), ["cat dog", "dog cat"]
    ids, *_ = ask(piece, as_bytes([f"{words[0]} " * 4000]), as_bytes([f"{words[1]} " * 4000]))
    wanted, *_ = ask(piece, as_bytes([f"{words[0]} " * 4]), as_bytes([f"{words[1]} " * 4]))
    assert ids.tolist() == wanted.tolist()


def test_pairs_that_are_refused(byte_level: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json adds 4 special tokens to each pair"):
        start("pair_tokenizer", byte_level, max_length="4")
    with pytest.raises(ArtifactError, match=r"pair_tokenizer misses its artifact tokenizer\.json"):
        start("pair_tokenizer", tmp_path)
    piece = start("pair_tokenizer", byte_level, max_text_bytes="5")
    with pytest.raises(InputError, match=r"^DOCUMENT\[1\] has 6 bytes; at most 5 are allowed\."):
        ask(piece, as_bytes(["a", "b"]), as_bytes(["short", "longer"]))


def test_nothing_but_padding_is_a_row_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 7, "?": 5}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids, mask = ask(start("tokenizer", tmp_path), as_bytes(["", ""]))
    assert ids.tolist() == mask.tolist() == [[0] * 8] * 2
    assert ask(start("tokenizer", tmp_path), as_bytes(["a b"]))[0].tolist() == [[7, 5, 0, 0, 0, 0, 0, 0]]


def test_choice_of_the_tokenizer_file(byte_level: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"misses its artifact vocab\.txt or tokenizer\.json in .*\. Copy the enc"):
        start("tokenizer", tmp_path)
    with pytest.raises(ArtifactError, match=r"Parameter lowercase of model tokenizer is 'true'; tokenizer\.json says"):
        start("tokenizer", byte_level, lowercase="true")
    (tmp_path / "tokenizer.json").symlink_to(byte_level / "tokenizer.json")
    with pytest.raises(ArtifactError, match=r"has vocab\.txt and tokenizer\.json in .*; not both\."):
        start("tokenizer", write(tmp_path, vocab=TOY))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is not a fast tokenizer of Hugging Face's: "),
        ("tokenizer.json", "<html>", "it is a web page or XML. Copy the encoder's own tokenizer.json there"),
        ("vocab.txt", "cat\n", "lacks [CLS], [SEP], [PAD], [UNK], [MASK]. Copy the encoder's own"),
    ],
)
def test_files_that_are_not_tokenizers(file: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(ArtifactError) as refused:
        start("tokenizer", tmp_path)
    assert message in str(refused.value)


@pytest.mark.parametrize("max_length", ["2", "256.5", "-1", "70000"])
def test_lengths_that_hold_no_text(max_length: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=rf"max_length of .* is '{max_length}'; expected a whole number from 3 to"):
        start("tokenizer", write(tmp_path, vocab=TOY), max_length=max_length)


def test_a_length_that_special_tokens_fill(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.post_processor = processors.TemplateProcessing(single="a a a $A", special_tokens=[("a", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArtifactError, match=r"is '3'; tokenizer\.json adds 3 special tokens to each text"):
        start("tokenizer", tmp_path, max_length="3")
    assert ask(start("tokenizer", tmp_path, max_length="4"), as_bytes(["a"]))[1].sum() == 4


# --- counts ------------------------------------------------------------------------------------------------------


def counter(folder: Path, **settings: Any) -> Component:
    return start("word_counts", write(folder, words=WORDS, stop_words=STOP_WORDS), **settings)


def test_counts_shares_and_presence(tmp_path: Path) -> None:
    counts = [[2, 2, 1, 1, 0, 0], [0] * 6, [0, 0, 3, 0, 0, 0], [0] * 6]
    assert ask(counter(tmp_path), as_bytes(TEXTS))[0].tolist() == counts
    shares = [[0.5, 0.5, 0.25, 0.25, 0, 0], [0] * 6, [0] * 6, [0] * 6]  # three signs without words have shares of 0
    assert ask(counter(tmp_path, value="share"), as_bytes(TEXTS))[0].tolist() == shares
    presence = [[1, 1, 1, 1, 0, 0], [0] * 6, [0, 0, 1, 0, 0, 0], [0] * 6]
    assert ask(counter(tmp_path, value="presence"), as_bytes(TEXTS))[0].tolist() == presence


def test_statistics_come_first(tmp_path: Path) -> None:
    (got,) = ask(counter(tmp_path, statistics="true", dims={"COUNTS": [13]}), as_bytes(TEXTS))
    assert got[:, :7].tolist() == [[4, 2, 2, 1, 4, 2, 2], [2, 2, 0, 1, 2, 1, 1], [0] * 7, [0] * 7]
    assert np.array_equal(got[:, 7:], ask(counter(tmp_path), as_bytes(TEXTS))[0])


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("lists"), words=WORDS, stop_words=STOP_WORDS)


@pytest.fixture(scope="module", params=[False, True], ids=["host", "gpu"])
def count(request: pytest.FixtureRequest, lists: Path) -> Callable[..., Array]:
    """Asks pieces of each setting, started once."""
    device = PretendGpu() if request.param else None
    known: dict[str, Component] = {}

    def run(texts: list[str], **settings: Any) -> Array:
        key = str(settings)
        piece = known[key] = known.get(key) or start("word_counts", lists, device=device, **settings)
        return np.asarray(ask(piece, as_bytes(texts))[0])

    return run


@examples
@given(st.lists(nasty_text, min_size=1, max_size=6))
def test_counts_are_scikit_learns(count: Callable[..., Array], texts: list[str]) -> None:
    texts = [text.encode(errors="replace").decode() for text in texts]
    for value in ("count", "presence"):
        vectorizer = CountVectorizer(
            vocabulary=WORDS, tokenizer=BasicTokenizer(), token_pattern=None, lowercase=False, binary=value != "count"
        )
        assert np.array_equal(count(texts, value=value), vectorizer.transform(texts).toarray())


@examples
@given(st.lists(nasty_text, min_size=1, max_size=6))
def test_shares_and_statistics_are_the_definitions(count: Callable[..., Array], texts: list[str]) -> None:
    texts = [text.encode(errors="replace").decode() for text in texts]
    statistics = np.array([raw_features(BasicTokenizer()(text), STOP_WORDS, []) for text in texts])
    words = statistics[:, :1]
    shares = np.where(words > 0, count(texts, value="count") / np.maximum(words, 1), 0)
    expected = np.concatenate([statistics, shares], axis=1)
    np.testing.assert_allclose(count(texts, value="share", statistics="true"), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["tokenizer", "word_counts"])
def test_a_gpu_gets_one_upload_a_batch(name: str, tmp_path: Path) -> None:
    write(tmp_path, vocab=TOY, words=WORDS)
    device = PretendGpu()
    here, there = start(name, tmp_path), start(name, tmp_path, device=device)
    device.ledger.end_setup()
    before = dict(device.ledger.traffic)
    for expected, got in zip(ask(here, as_bytes(TEXTS)), ask(there, as_bytes(TEXTS)), strict=True):
        assert device.owns(got)
        assert np.array_equal(got, expected)
    moved = {edge: traffic.copies for edge, traffic in device.ledger.traffic.items() if edge not in before}
    assert moved == {CopyEdge("TEXT", UP): 1}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["dog", "Don't"], "is not a list of words: line 2 is \"Don't\", which becomes ['don', \"'\", 't'] in texts."),
        (["café"], "line 1 is 'café', which becomes ['cafe'] in texts. Write one word per line, one basic token each"),
        (["two words"], "line 1 is 'two words', which becomes ['two', 'words'] in texts."),
        (["dog", "", "cat"], "line 2 is blank."),
        (["dog", "cat", "dog"], "it holds 'dog' twice."),
    ],
)  # fmt: skip
def test_words_that_no_text_can_hold(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as refused:
        start("word_counts", write(tmp_path, words=lines))
    assert message in str(refused.value)
    with pytest.raises(ArtifactError, match=r"stop_words\.txt is not a list of words"):
        start("word_counts", write(tmp_path, words=["dog"], stop_words=lines))


def test_settings_of_counts(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"misses its artifact words\.txt in .*\. Write one word per line"):
        start("word_counts", tmp_path)
    with pytest.raises(ArtifactError, match=r"value of .* is 'shares'; expected count or share or presence\."):
        counter(tmp_path, value="shares")
    with pytest.raises(ArtifactError, match=r"statistics of .* is 'yes'; expected false or true\."):
        counter(tmp_path, statistics="yes")
    with pytest.raises(ArtifactError, match=r"dims: \[ 6 \]; the columns of words\.txt and statistics are 13\."):
        counter(tmp_path, statistics="true", dims={"COUNTS": [6]})


@pytest.mark.parametrize("name", ["checked_text", "tokenizer", "word_counts"])
def test_texts_that_are_refused(name: str, tmp_path: Path) -> None:
    piece = start(name, write(tmp_path, vocab=TOY, words=WORDS), max_text_bytes="5")
    with pytest.raises(InputError, match=r"^TEXT\[1\] has 6 bytes; at most 5 are allowed\."):
        ask(piece, as_bytes(["short", "longer"]))
    bad = np.array([[b"a\xff"]], np.object_)
    with pytest.raises(InputError, match=r"^TEXT\[0\] is not valid UTF-8: byte 0xff at position 1\."):
        ask(piece, bad)


def test_valid_texts_are_passed_on_unchanged() -> None:
    texts = as_bytes(["", "A text.", "caf\u00e9 \U0001f642", "a\0b"])
    (checked,) = ask(start("checked_text"), texts)
    assert checked.tolist() == texts.tolist()

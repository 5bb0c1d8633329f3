"""Detokenizers: the pieces of any division are the text of a whole decode, as early as it is certain."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from shoal.errors import InputError
from shoal.kit.generation.detokenizer import Detokenizer, find_specials, spell
from tests.conftest import Scale
from tests.support.tokenizers import FAMILIES, OTHERS, TEXTS, token_id, trained

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def whole(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def draw_ids(tokenizer: Tokenizer, draw: random.Random) -> list[int]:
    """Ids of texts, of cut texts, random ones, runs of one, special ones and some beyond the vocabulary."""
    size = tokenizer.get_vocab_size()
    ids: list[int] = []
    for _ in range(draw.randrange(5)):
        text = draw.choice(TEXTS)
        start = draw.randrange(len(text))
        found = tokenizer.encode(text[start : start + 20], add_special_tokens=False).ids
        match draw.randrange(4):
            case 0:
                ids += found
            case 1:
                ids += draw.sample(found, draw.randrange(len(found) + 1))
            case 2:
                ids += draw.choices(range(size + 3), k=draw.randrange(8))
            case 3:
                ids += [draw.randrange(size)] * draw.randrange(6)
    return ids


def divide(ids: list[int], draw: random.Random) -> Iterator[tuple[list[int], bool]]:
    """Divide ids into pieces of none, one or several; the last one may be empty."""
    most = draw.choice((1, 3, 50))
    while ids:
        size = draw.randint(most == 3, most) if most > 1 else 1
        yield ids[:size], False
        ids = ids[size:]
    yield [], True


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pieces_are_the_whole(name: str, scale: Scale) -> None:
    tokenizer, draw = trained(name), random.Random(name)
    for _ in range(scale(400, 20_000)):
        ids = draw_ids(tokenizer, draw)
        expected = whole(tokenizer, ids)
        detokenizer, given = Detokenizer(tokenizer), ""
        for piece, last in divide(ids, draw):
            given += detokenizer.step(piece, last=last)
            assert expected.startswith(given), (ids, given)
        assert given == expected, ids
        assert Detokenizer(tokenizer).step(ids, last=True) == expected


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_texts_are_the_whole(name: str) -> None:
    """Decoders of other families too, for what a tokenizer makes of texts."""
    tokenizer = trained(name)
    for text in [*TEXTS, " ".join(TEXTS), "a  b", "x" * 200]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.step([token]) for token in ids]
        assert "".join([*pieces, detokenizer.step([], last=True)]) == whole(tokenizer, ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_sent_as_soon_as_it_is_certain(name: str) -> None:
    """All but a character without its last byte; with byte tokens, all but their run."""
    tokenizer, has_byte_tokens = trained(name), name in ("sentencepiece", "gemma", "bytes-first", "bytes-metaspace")
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        detokenizer, given = Detokenizer(tokenizer), ""
        for end in range(1, len(ids) + 1):
            given += detokenizer.step([ids[end - 1]])
            certain = ids[:end]
            while has_byte_tokens and certain and str(tokenizer.id_to_token(certain[-1])).startswith("<0x"):
                certain = certain[:-1]
            assert given == whole(tokenizer, certain).rstrip(UNKNOWN)


def byte_tokens(*values: int) -> list[int]:
    return [token_id(trained("sentencepiece"), f"<0x{value:02X}>") for value in values]


def test_a_run_of_bytes_is_given_out_when_it_ends() -> None:
    tokenizer = trained("sentencepiece")
    a = token_id(tokenizer, "a")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.step([token]) for token in [*byte_tokens(0xC3, 0xA9, 0x0A), a]] == ["", "", "", "é\na"]
    # A whole decode replaces every byte of a run with a fault, the é as well.
    assert detokenizer.step([*byte_tokens(0xC3, 0xA9, 0xC3), a]) == 3 * UNKNOWN + "a"
    assert detokenizer.step(byte_tokens(0x41)) == ""
    assert detokenizer.step([], last=True) == "A"


def test_half_a_character_waits_for_the_other() -> None:
    tokenizer = trained("byte-level")
    first, second, third = (token_id(tokenizer, sign) for sign in "âĤ¬")  # the bytes of €
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.step([token]) for token in (first, second, third)] == ["", "", "€"]
    assert detokenizer.step([first, second]) == ""
    assert detokenizer.step([], last=True) == UNKNOWN
    assert Detokenizer(tokenizer).step([first, token_id(tokenizer, "a")]) == UNKNOWN + "a"


def test_special_tokens_and_unknown_ids_are_skipped() -> None:
    tokenizer = trained("byte-level")
    ids = [token_id(tokenizer, token) for token in ("<s>", "a", "<think>", "<|end|>", "two words", "</s>")]
    assert Detokenizer(tokenizer).step([*ids, 100_000], last=True) == "a<think>two words"
    assert Detokenizer(tokenizer).step(np.array(ids, np.int32), last=True) == "a<think>two words"  # type: ignore[arg-type]


def test_negative_ids_are_refused_and_change_nothing() -> None:
    tokenizer = trained("byte-level")
    a = token_id(tokenizer, "a")
    detokenizer = Detokenizer(tokenizer)
    with pytest.raises(InputError, match=r"^A token id is -1\. Send ids from 0, without padding\.$"):
        detokenizer.step([a, -1])
    assert detokenizer.step([a], last=True) == "a"


def test_a_decoder_of_no_family_gives_its_text_at_the_end() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<pad>": 2}, unk_token="a"))
    tokenizer.decoder = decoders.CTC()
    detokenizer = Detokenizer(tokenizer)
    ids = [0, *[2] * 500, 0, 0, 1]
    assert {detokenizer.step([token]) for token in ids} == {""}
    assert detokenizer.step([], last=True) == whole(tokenizer, ids) == "aab"


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "wordpiece"])
def test_the_cost_of_a_token_does_not_grow(name: str, scale: Scale) -> None:
    """The first 40 tokens of a stream beside its last 40; the least of 30 rounds: other work uses these cores too."""
    tokenizer = trained(name)
    ids = tokenizer.encode(2 * TEXTS[0], add_special_tokens=False).ids[:40]
    assert len(ids) == 40
    limit = 1.5 if scale.is_full else 4
    rounds = []
    for _ in range(30):
        detokenizer, seconds = Detokenizer(tokenizer), []
        for _ in range(100):
            start = time.perf_counter()
            for token in ids:
                detokenizer.step([token])
            seconds.append(time.perf_counter() - start)
        rounds.append(seconds)
    assert min(seconds[-1] for seconds in rounds) <= limit * min(seconds[0] for seconds in rounds)


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_of_tokens_are_those_of_the_text(name: str) -> None:
    """Also of parts of characters, and of words that their tokens write with a space before them."""
    tokenizer = trained(name)
    specials = find_specials(tokenizer).values()
    for text in TEXTS:
        ids = [token for token in tokenizer.encode(text, add_special_tokens=False).ids if token not in specials]
        spelled = [spell(tokenizer, token, is_first=not at) for at, token in enumerate(ids)]
        assert b"".join(spelled) == whole(tokenizer, ids).encode()
        assert all(spelled[1:])
    assert spell(tokenizer, token_id(tokenizer, "<|end|>"), is_first=True) == b"<|end|>"


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_may_be_kept(name: str) -> None:
    tokenizer = trained(name)
    end = token_id(tokenizer, "<|end|>")
    for text in TEXTS:
        ids = [end, *tokenizer.encode(text, add_special_tokens=False).ids, end]
        found = Detokenizer(tokenizer, keeps_specials=True).step(ids, last=True)
        assert found == tokenizer.decode(ids, skip_special_tokens=False)
    with pytest.raises(InputError, match="The tokenizer has no token 99999"):
        Detokenizer(tokenizer, keeps_specials=True).step([end, 99999])

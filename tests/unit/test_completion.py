"""The component completion, and the streams behind it: many streams of token ids in, each one's text out."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shorten
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from shoal.authoring.check.families import check
from shoal.errors import ArtifactError, InputError, ShoalError
from shoal.kit.component.base import Component
from shoal.kit.component.spec import Arrays
from shoal.kit.generation.completions import Completions, TextStream
from shoal.kit.generation.pieces import Piece, join_pieces
from tests.conftest import Scale
from tests.support.llm import cut
from tests.support.pieces import leaf, start
from tests.support.tokenizers import FAMILIES, OTHERS, TEXTS, token_id, trained

BPE = trained("byte-level")
TEXT = "The cat sat on the mat. 😀 They do not sit."


def encode(text: str) -> list[int]:
    return list(BPE.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    BPE.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def component(model: Path) -> Component:
    return start("completion", model=str(model))


def answer(ids: Sequence[int], stream: int | None = None, *, last: bool = False, **texts: str) -> dict[str, Any]:
    """One answer of an engine; without a stream, a whole one."""
    inputs: dict[str, Any] = {
        "output_ids": np.array(ids, np.int32).reshape(1, 1, len(ids)),
        "sequence_length": np.array([[len(ids)]], np.int32),
    }
    if stream is not None:
        inputs |= {"stream_id": np.array([[stream]], np.int64), "is_last": np.array([[last]], np.bool_)}
    return inputs | {name: np.array([[text.encode()]], np.object_) for name, text in texts.items()}


def as_int32(values: Any) -> Any:
    return np.array(values, np.int32)


def carry(*stops: str, prompt: int = 5) -> str:
    return json.dumps({"stops": stops, "num_input_tokens": prompt}, ensure_ascii=False)


def read(outputs: Arrays | ShoalError) -> Piece:
    if isinstance(outputs, ShoalError):
        raise outputs
    kinds = {"text_output": "O", "finish_reason": "O", "num_input_tokens": "uint32", "num_output_tokens": "uint32"}
    assert {name: array.dtype for name, array in outputs.items() if name != "batch_index"} == kinds
    assert all(array.shape == (1, 1) for array in outputs.values())
    text, reason, num_input, num_output = (outputs[name][0, 0] for name in kinds)
    return Piece(text.decode(), reason.decode(), int(num_input), int(num_output))


def ask(component: Component, *requests: Mapping[str, Any]) -> list[Piece]:
    """The answers to requests that come together."""
    return [read(outputs) for outputs in component.process(requests)]


def test_rows_are_those_asked_alone(component: Component) -> None:
    """Rows of a request may be streams at different places, or whole answers; the message has the row that fails."""

    def stack(*rows: Mapping[str, Any]) -> dict[str, Any]:
        width = max(row["output_ids"].shape[2] for row in rows)
        padded = [{**row, "output_ids": np.pad(row["output_ids"], ((0, 0), (0, 0), (0, width)))} for row in rows]
        cut = [{**row, "output_ids": row["output_ids"][:, :, :width]} for row in padded]
        return {name: np.concatenate([row[name] for row in cut]) for name in rows[0]}

    cat, dog = (
        [answer(encode(part), stream, last=part == parts[-1], carry=carry("mat")) for part in parts]
        for stream, parts in ((1, ["The cat", " sat on the mat"]), (2, ["A dog sat", " here"]))
    )
    (first,) = component.process([stack(cat[0], dog[0])])
    (second,) = component.process([stack(dog[1], cat[1]) | {"batch_index": as_int32([[1], [0]])}])
    assert not isinstance(first, ShoalError)
    assert not isinstance(second, ShoalError)
    assert first["batch_index"].tolist() == [[0], [1]]
    assert second["batch_index"].tolist() == [[1], [0]]
    texts = [first["text_output"][row, 0] + second["text_output"][1 - row, 0] for row in range(2)]
    assert texts == [b"The cat sat on the ", b"A dog sat here"]
    assert second["num_input_tokens"].tolist() == [[5], [5]]
    bad = answer([1], 3) | {"carry": np.array([[b"\xff"]], np.object_)}
    (refused,) = component.process([stack(answer([1], 4, carry=""), bad)])
    assert str(refused).startswith("Row 1: carry is not UTF-8")


# --- one stream --------------------------------------------------------------------------------------------------


def test_counts_of_each_answer() -> None:
    """With the switch of NVIDIA's vLLM backend, the counts of the packed pieces add up to the number of tokens."""
    ids = encode("The cat sat on the mat")
    for stops, expected in (((), len(ids)), (("sat on",), tokens_until(BPE, ids, "sat on"))):
        stream, total = TextStream(BPE, stops, 7, counts_each=True), TextStream(BPE, stops, 7)
        counts: list[Piece] = []
        totals: list[Piece] = []
        for place in range(0, len(ids) + 2, 2):
            for each, found in ((stream, counts), (total, totals)):
                piece = each.step(ids[place : place + 2], last=place >= len(ids), reason="length")
                if piece.text or piece.finish_reason:  # others are not sent by llm_bls
                    found.append(read(each.pack(piece)))
        assert sum(piece.num_output_tokens for piece in counts) == totals[-1].num_output_tokens == expected
        assert [piece.text for piece in counts] == [piece.text for piece in totals]
        assert {piece.num_input_tokens for piece in counts} == {7}


def tokens_until(tokenizer: Tokenizer, ids: Sequence[int], stop: str) -> int:
    """Return the number of ids that complete a stop string."""
    return next(n for n in range(len(ids) + 1) if stop in tokenizer.decode(list(ids[:n])))


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_stops_counts_and_least_lengths_are_those_of_decoded_beginnings(name: str, scale: Scale) -> None:
    """Compare random tokens, stop strings, ``min_tokens`` and divisions with ``decode`` of each beginning."""
    tokenizer = trained(name)
    draw = random.Random(name)
    stopped = 0
    for _ in range(scale(120, 2000)):
        size = draw.randint(1, 24)
        text = draw.choice(TEXTS)
        ids = (
            draw.choices(range(tokenizer.get_vocab_size()), k=size)
            if draw.random() < 0.5
            else tokenizer.encode(text, add_special_tokens=False).ids[:size]
        )
        whole = tokenizer.decode(ids)
        starts = [draw.randrange(len(whole) + 1) for _ in range(2)]
        stops = [found for start in starts if (found := whole[start : start + draw.randint(1, 4)].strip("\ufffd"))]
        least = draw.choice([0, 0, draw.randint(0, size)])
        expected = cut(tokenizer, ids, [*stops, "never"], least)
        stopped += expected[1] == "stop"
        stream, pieces, rest = TextStream(tokenizer, [*stops, "never"], min_tokens=least), [], list(ids)
        while rest:
            count = draw.randint(1, 6)
            pieces.append(stream.step(rest[:count], last=count >= len(rest), reason="length"))
            rest = rest[count:]
        joined = join_pieces(pieces)
        assert (joined.text, joined.finish_reason, joined.num_output_tokens) == expected, (ids, stops, least)
        one = TextStream(tokenizer, [*stops, "never"], min_tokens=least).step(ids, last=True, reason="length")
        assert (one.text, one.finish_reason, one.num_output_tokens) == expected
    assert stopped > 20


def test_special_tokens_in_stop_strings() -> None:
    """They have no text, and end an answer all the same, with the text before them that belongs to the stop."""
    end, (line, *_) = token_id(BPE, "<|end|>"), encode("\n")
    for stop, ids, text in (
        ("<|end|>", [*encode("cat"), end, *encode("mat")], "cat"),
        ("\n<|end|>", [*encode("a\ncat"), line, end, *encode("mat")], "a\ncat"),
        ("<|end|>\n", [*encode("cat"), end, line], "cat"),
    ):
        stream = TextStream(BPE, [stop, "never"])
        pieces = [stream.step([token]) for token in ids]
        assert "".join(piece.text for piece in pieces) == text
        assert (pieces[-1].finish_reason, pieces[-1].num_output_tokens) == (
            "stop", len(ids) - len(encode("mat")) * ("mat" in BPE.decode(ids)),
        )  # fmt: skip
    plain = TextStream(BPE, ["<|end|>x"]).step([*encode("cat"), end, *encode("mat")], last=True, reason="length")
    assert plain[:2] == ("catmat", "length")


@pytest.mark.parametrize("name", ["sentencepiece", "gemma", "bytes-first", "bytes-metaspace", "suffixed"])
def test_a_special_token_ends_what_is_held_back(name: str) -> None:
    """Byte tokens, or with ``suffixed`` all tokens, whose text comes before the special token."""
    tokenizer = trained(name)
    before = [token_id(tokenizer, f"<0x{byte:02X}>") for byte in "😀".encode()] if name != "suffixed" else [5, 6]
    text, end = tokenizer.decode(before).strip(), token_id(tokenizer, "<|end|>")
    for stop, kept in (("<|end|>", text), (f"{text}<|end|>", "")):
        found = TextStream(tokenizer, [stop]).step([*before, end, *before], last=True, reason="length")
        assert (found.text.strip(), found.finish_reason, found.num_output_tokens) == (kept, "stop", len(before) + 1)


def test_time_is_linear_in_bytes_that_are_held_back() -> None:
    """Each byte could complete a stop string, but only short runs are decoded again for each byte."""
    tokenizer = trained("sentencepiece")
    stream, byte = TextStream(tokenizer, ["never"]), token_id(tokenizer, "<0xE2>")
    start = time.process_time()
    assert stream.step([byte] * 100_000, last=True, reason="length").num_output_tokens == 100_000
    assert time.process_time() - start < 20


def test_the_end_gives_out_what_was_held_back() -> None:
    stream = TextStream(BPE, ["The cat sat down"])
    half = [token_id(BPE, "â"), token_id(BPE, "Ĥ")]  # of €
    assert stream.step([*encode("The cat sat "), *half]) == Piece("", "", 0, len(encode("The cat sat ")) + len(half))
    assert stream.step([], last=True, reason="cancelled")[:2] == ("The cat sat \N{REPLACEMENT CHARACTER}", "cancelled")


def test_a_reason_counts_at_the_end_alone() -> None:
    stream = TextStream(BPE)
    assert stream.step([], reason="length").finish_reason == ""
    assert stream.step([], last=True).finish_reason == ""


# --- the component -----------------------------------------------------------------------------------------------


def test_a_stream_in_pieces(component: Component) -> None:
    ids = encode(TEXT)
    requests = [answer([token], 7, carry=carry() if not place else "") for place, token in enumerate(ids)]
    requests.append(answer([], 7, last=True, finish_reason="stop", carry=""))
    pieces = ask(component, *requests)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert {piece.num_input_tokens for piece in pieces} == {5}
    assert [piece.num_output_tokens for piece in pieces] == [*range(1, len(ids) + 1), len(ids)]
    assert [piece.finish_reason for piece in pieces] == [*[""] * len(ids), "stop"]


def test_whole_answers_need_no_stream(component: Component) -> None:
    ids = encode(TEXT)
    assert ask(component, answer(ids)) == [Piece(TEXT, "", 0, len(ids))]
    whole = answer(ids, carry=carry(" on", prompt=3), finish_reason="length")
    number = tokens_until(BPE, ids, " on")
    assert number < len(ids)
    assert ask(component, whole, whole) == 2 * [Piece("The cat sat", "stop", 3, number)]
    assert ask(component, answer(ids, finish_reason="length"))[0].finish_reason == "length"
    assert component.completions._streams == {}  # type: ignore[attr-defined]


def test_only_the_first_tokens_of_a_row_count(component: Component) -> None:
    padded = answer([*encode(TEXT), -1, -1])
    padded["sequence_length"] -= 2
    assert ask(component, padded)[0].text == TEXT
    assert ask(component, answer([]))[0] == Piece("", "", 0, 0)


def test_answers_after_a_stop_string_are_empty(component: Component) -> None:
    ids = encode(TEXT)
    first, *rest = ask(
        component,
        answer(ids, 1, carry=carry("sat")),
        answer(ids, 1, carry=""),
        answer(ids, 1, last=True, finish_reason="length"),
    )
    number = tokens_until(BPE, ids, "sat")
    assert first == Piece("The cat ", "stop", 5, number)
    assert rest == 2 * [Piece("", "stop", 5, number)]


def test_stop_strings_within_min_tokens_are_text(component: Component) -> None:
    ids = encode("cat cat cat")
    stops = json.dumps({"stops": ["cat"], "num_input_tokens": 3, "min_tokens": tokens_until(BPE, ids, "cat")})
    assert ask(component, answer(ids, carry=stops)) == [Piece("cat ", "stop", 3, tokens_until(BPE, ids, "cat cat"))]


def test_streams_never_mix(component: Component, scale: Scale) -> None:
    draw = random.Random(3)
    for _ in range(scale(20, 1000)):
        waiting: dict[int, list[dict[str, Any]]] = {}
        expected, got = {}, {}
        for stream in draw.sample(range(2**40), 8):
            text, stops = draw.choice(TEXTS), draw.sample(["a", "t on", "。", "!", "nothing"], draw.randrange(3))
            ids, texts = encode(text), {"carry": carry(*stops, prompt=stream % 100)}
            expected[stream] = text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
            got[stream], waiting[stream] = "", []
            while ids:
                size = draw.randint(1, 4)
                waiting[stream].append(answer(ids[:size], stream, last=size >= len(ids), **texts))
                ids, texts = ids[size:], {"carry": ""}
        while waiting:
            stream = draw.choice(list(waiting))
            (piece,) = ask(component, waiting[stream].pop(0))
            assert piece.num_input_tokens == stream % 100
            got[stream] += piece.text
            if not waiting[stream]:
                del waiting[stream]
        assert got == expected
        assert component.completions._streams == {}  # type: ignore[attr-defined]


def make_places(ids: Sequence[int]) -> dict[str, Any]:
    """Log probabilities of an answer: the token itself is the second most probable one, with a tenth of its place."""
    chosen = np.array([-place / 10 for place in range(len(ids))], np.float32)
    return {
        "output_log_probs": chosen.reshape(1, 1, -1),
        "top_log_probs": np.array([[[-0.05, value] for value in chosen]], np.float32).reshape(1, -1, 2),
        "top_token_ids": np.array([[[7, token] for token in ids]], np.int32).reshape(1, -1, 2),
    }


@pytest.mark.parametrize("stops", [(), ("sat",)])
@pytest.mark.parametrize("returns", [["logprobs"], ["cumulative_logprob"], ["cumulative_logprob", "logprobs"]])
def test_log_probabilities_are_of_the_tokens_that_count(
    stops: tuple[str, ...], returns: list[str], component: Component
) -> None:
    ids = encode(TEXT)
    text = json.dumps({"stops": stops, "num_input_tokens": 3, "returns": returns})
    made = {**answer(ids, carry=text, finish_reason="length"), **make_places(ids)}
    (outputs,) = component.process([made])
    assert not isinstance(outputs, ShoalError)
    number = outputs["num_output_tokens"].item()
    assert (number < len(ids)) == bool(stops)
    assert sorted(outputs.keys() & {"logprobs", "cumulative_logprob"}) == returns
    if "cumulative_logprob" in returns:
        total = -0.1 * sum(range(number))
        assert outputs["cumulative_logprob"].item() == pytest.approx(total, rel=1e-5)
    if "logprobs" in returns:
        places = json.loads(outputs["logprobs"].item())
        assert [int(next(iter(place))) for place in places] == ids[:number]
        assert places[1] == {
            str(ids[1]): {"logprob": -0.1, "rank": 2, "decoded_token": BPE.decode([ids[1]])},
            "7": {"logprob": -0.05, "rank": 1, "decoded_token": BPE.decode([7])},
        }


def test_padding_of_log_probabilities_is_left_out(component: Component) -> None:
    """A row of a whole answer, beside longer rows with more of the most probable tokens."""
    ids = encode("The cat")
    text = json.dumps({"stops": [], "num_input_tokens": 3, "returns": ["logprobs"]})
    plain, padded = ({**answer(ids, carry=text), **make_places(ids)} for _ in range(2))
    for name, sizes, pad in (
        ("output_log_probs", ((0, 0), (0, 0), (0, 2)), 0),
        ("top_log_probs", ((0, 0), (0, 2), (0, 3)), 0),
        ("top_token_ids", ((0, 0), (0, 2), (0, 3)), -1),
        ("output_ids", ((0, 0), (0, 0), (0, 2)), 9),
    ):
        padded[name] = np.pad(padded[name], sizes, constant_values=pad)
    one, other = component.process([plain, padded])
    assert not isinstance(one, ShoalError)
    assert not isinstance(other, ShoalError)
    assert one["logprobs"].item() == other["logprobs"].item()


def test_log_probabilities_come_with_the_next_piece_that_is_packed() -> None:
    """As ``llm_bls`` does it, which sends no piece without text."""
    ids = encode("\u1234")
    assert len(ids) > 1
    stream = TextStream(BPE, returns=["logprobs"])
    for token in ids:
        made = {**answer([token], 1, last=False, finish_reason=""), "output_log_probs": np.array([[[-np.inf]]])}
        piece = stream.take(made)
    places = json.loads(stream.pack(piece)["logprobs"].item())
    assert [[*place] for place in places] == [[str(token)] for token in ids]
    assert places[0][str(ids[0])]["logprob"] == -9999.0  # JSON has no infinity
    assert places[0][str(ids[0])]["rank"] is None
    assert json.loads(stream.pack(stream.step([], last=True))["logprobs"].item()) == []


def test_answers_that_are_taken_together_make_one_piece() -> None:
    """Text, reason, counts and log probabilities of that piece are those of the pieces it stands for."""
    text = json.dumps({"stops": ["on"], "num_input_tokens": 3, "returns": ["logprobs", "cumulative_logprob"]})
    answers = [
        {**answer([token], 1, last=False, finish_reason=""), "output_log_probs": np.array([[[-1.0 - at]]])}
        for at, token in enumerate(encode("The cat sat on the mat"))
    ]
    outputs = ("text_output", "finish_reason", "num_output_tokens", "cumulative_logprob", "logprobs")
    passed = {"carry": np.array([[text.encode()]], np.object_)}

    def take(*groups: Sequence[Any]) -> list[dict[str, Any]]:
        rows = Completions(BPE).open_rows(passed, is_streaming=True, outputs=outputs)
        found = [each for group in groups for each in rows.take(group)]
        assert rows.is_complete
        return found

    alone, (joined,) = take(*([each] for each in answers)), take(answers)
    assert len(alone) > 2
    assert joined["text_output"].item() == b"".join(each["text_output"].item() for each in alone) == b"The cat sat "
    for name in ("finish_reason", "num_output_tokens", "cumulative_logprob"):
        assert joined[name].item() == alone[-1][name].item()
    assert json.loads(joined["logprobs"].item()) == [p for each in alone for p in json.loads(each["logprobs"].item())]


def test_the_stream_that_is_idle_longest_is_dropped() -> None:
    completions = Completions(BPE, most_streams=3)
    a = encode("a")
    for stream in (1, 2, 3):
        completions.answer(answer(a, stream, carry=carry(prompt=stream)))
    completions.answer(answer(a, 1))  # 2 is idle longest now
    completions.answer(answer(a, 4, carry=carry(prompt=4)))
    assert [read(completions.answer(answer(a, stream)))[2:4] for stream in (1, 3, 4)] == [(1, 3), (3, 2), (4, 2)]
    assert read(completions.answer(answer(a, 2)))[2:4] == (0, 1)


def test_ten_thousand_streams_are_kept(component: Component) -> None:
    for stream in range(10_001):
        ask(component, answer([], stream, carry=carry(prompt=9)))
    assert [piece.num_input_tokens for piece in ask(component, answer([], 1), answer([], 0))] == [9, 0]
    assert len(component.completions._streams) == 10_000  # type: ignore[attr-defined]


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "{", "[" * 100_000, "[1]", "{}", '{"stops": []}',
        '{"stops": "a", "num_input_tokens": 1}',
        '{"stops": ["a", 1], "num_input_tokens": 1}',
        '{"stops": [""], "num_input_tokens": 1}',
        '{"stops": [], "num_input_tokens": true}',
        '{"stops": [], "num_input_tokens": 1.5}',
        '{"stops": [], "num_input_tokens": 1, "returns": "logprobs"}',
        '{"stops": [], "num_input_tokens": 1, "returns": ["texts"]}',
        '{"stops": [], "num_input_tokens": 1, "returns": [["logprobs"]]}',
        '{"stops": [], "num_input_tokens": 1, "min_tokens": -1}',
        '{"stops": [], "num_input_tokens": 1, "min_tokens": "2"}',
        carry(*["a"] * 65), carry(prompt=-1), carry(prompt=2**32),
    ],
)  # fmt: skip
def test_a_malformed_carry_is_refused(text: str, component: Component) -> None:
    for request in (answer([1], carry=text), answer([1], 3, carry=text)):
        with pytest.raises(InputError) as refused:
            ask(component, request)
        assert str(refused.value).startswith(f"carry is {shorten(text)}; expected JSON with at most 64 stops and n")


def test_tensors_that_do_not_fit_are_refused(component: Component) -> None:
    def refuse(message: str, **changes: Any) -> None:
        request = {name: array for name, array in (answer([1], 3) | changes).items() if array is not None}
        with pytest.raises(InputError) as refused:
            ask(component, request)
        assert str(refused.value).startswith(message)

    refuse(
        "output_ids has shape [1, 2, 3] and sequence_length [1, 2]. Send one row with one beam",
        output_ids=np.zeros((1, 2, 3), np.int32),
        sequence_length=as_int32([[3, 3]]),
    )
    two = {"output_ids": np.zeros((2, 1, 3), np.int32), "stream_id": np.array([[8]])}
    refuse("Row 1: output_ids has shape [1, 1, 3] and seq", **two)
    refuse("output_ids has shape [1, 1, 1] and seq", sequence_length=np.zeros((1, 0), np.int32))
    refuse("sequence_length is 2, and output_ids has 1 tokens.", sequence_length=as_int32([[2]]))
    refuse("sequence_length is -1, and output_ids has 1 tokens.", sequence_length=as_int32([[-1]]))
    refuse("The request has stream_id but no is_last. Send both, or neither for a whole answer.", is_last=None)
    refuse("The request has is_last but no stream_id.", stream_id=None)
    refuse("A token id is -7. Send ids from 0, without padding.", output_ids=as_int32([[[-7]]]))
    refuse("carry is not UTF-8: b'\\xff'. Send UTF-8.", carry=np.array([[b"\xff"]], np.object_))
    refuse("finish_reason is not UTF-8", finish_reason=np.array([[b"\xff"]], np.object_))


def test_a_refused_answer_leaves_its_stream_and_others_as_they_were(component: Component) -> None:
    first, second = encode("The cat sa"), encode("t on the mat")
    bad = answer([*second, -1], 1)
    answers = component.process(
        [answer(first, 1, carry=carry("sat")), answer(first, 2, carry=carry()), bad, answer(second, 1), answer([], 2)]
    )
    assert isinstance(answers[2], InputError)
    assert [read(found).text for place, found in enumerate(answers) if place != 2] == [
        "The cat ", "The cat sa", "", "",
    ]  # fmt: skip
    assert read(answers[3]).finish_reason == "stop"


@pytest.mark.parametrize(
    ("place", "content", "message"),
    [
        ("", "", "Parameter model of model completion is ''; expected the absolute path of a folder with weights."),
        ("model", "", "is 'model'; expected the absolute path of a folder with weights."),
        ("{}/nowhere", "", "/nowhere'; expected the absolute path of a folder with weights."),
        ("{}", None, "is not a fast tokenizer of Hugging Face's: it is missing. Let the parameter model"),
        ("{}", "", "tokenizer.json is not a fast tokenizer of Hugging Face's: it is empty. Let the"),
        ("{}", "{}", "tokenizer.json is not a fast tokenizer of Hugging Face's: "),
    ],
)  # fmt: skip
def test_a_folder_without_a_tokenizer(place: str, content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ArtifactError) as refused:
        start("completion", model=place.format(tmp_path))
    assert message in str(refused.value)


def test_the_model_folder_is_without_findings() -> None:
    assert check(leaf("completion").folder) == []

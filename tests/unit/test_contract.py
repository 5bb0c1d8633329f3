"""Token requests: what is read and refused; their answers: stops and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError, ServerError
from shoal.kit.component.base import check_outputs
from shoal.kit.component.context import Context
from shoal.kit.component.stream import QueueStream
from shoal.kit.component.streaming import StreamingComponent
from shoal.kit.generation.answering import MANY, Answering, RunningSequence, step
from shoal.kit.generation.answers import pack_answer, read_log_probs
from shoal.kit.generation.contract import (
    FOREIGN,
    INPUTS,
    LOG_PROB_OUTPUTS,
    LOG_PROBS,
    NEUTRAL,
    REFUSED,
    Limits,
    LogProbs,
    TokenRequest,
    pack_words,
)
from shoal.kit.generation.sampling import Sampling
from tests.support.llm import ENGINE, engine_spec, token_inputs

LIMITS = Limits(vocabulary=100, context=20, slots=4, end_ids=(2, 3))


def read(ids: Sequence[int] = (5, 6), new: int = 4, **more: Any) -> TokenRequest:
    return TokenRequest.read(token_inputs(list(ids), new, **more), LIMITS)


def test_defaults() -> None:
    plain = read(temperature=None, end_id=None)
    assert plain == TokenRequest((5, 6), 4, (2, 3), Sampling(top_k=1))


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        ({"runtime_top_k": 0}, Sampling(top_k=1)),
        ({"runtime_top_k": 0, "runtime_top_p": 0.0}, Sampling(top_k=1)),
        ({"runtime_top_p": 0.0, "temperature": 1.0, "seed": 5}, Sampling(top_k=1, seed=5)),
        ({"runtime_top_k": 3}, Sampling(top_k=3)),
        ({"runtime_top_k": 3, "runtime_top_p": 0.0}, Sampling(top_k=3)),
        ({"runtime_top_p": 1.0}, Sampling()),
        ({"runtime_top_k": 0, "runtime_top_p": 0.5}, Sampling(top_p=0.5)),
    ],
)
def test_without_top_k_and_top_p_it_is_greedy(given: dict[str, Any], sampling: Sampling) -> None:
    """As in FasterTransformer and TensorRT-LLM, also beside a temperature."""
    assert read(**{"temperature": None, **given}).sampling == sampling


@pytest.mark.parametrize("name", NEUTRAL)
def test_inputs_of_other_clients_are_taken_at_their_neutral_values(name: str) -> None:
    neutral, why = NEUTRAL[name]
    for value in neutral:
        assert read((5, 6), 4, **{name: value}) == read()
    with pytest.raises(InputError, match=f"{name} is 2, and {why}. Send {neutral[0]}"):
        read((5, 6), 4, **{name: 2})


def test_other_names_of_settings() -> None:
    assert read(random_seed=5).sampling.seed == 5
    assert read(min_length=2).sampling.min_tokens == 2
    with pytest.raises(InputError, match="The request has seed and random_seed, which are the same setting"):
        read(seed=5, random_seed=5)


# The tensors in NVIDIA's published configurations: fastertransformer_backend (all_models/*/fastertransformer),
# tensorrtllm_backend 0.19 (all_models/inflight_batcher_llm, five models), and vllm_backend's model.py.
FASTERTRANSFORMER = """
    beam_search_diversity_rate beam_width bad_words_list end_id ia3_tasks input_hidden_state input_ids input_lengths
    is_return_attentions is_return_context_embeddings is_return_log_probs len_penalty max_output_len memory_len
    prompt_learning_task_name_ids random_seed repetition_penalty request_output_len request_prompt_embedding
    request_prompt_lengths request_prompt_type runtime_top_k runtime_top_p sequence_length sequence_lengths session_len
    start_id stop_words_list temperature top_p_decay top_p_min top_p_reset_ids
"""
TENSORRT_LLM = """
    bad_words_list beam_search_diversity_rate beam_width context_phase_params cross_attention_mask decoder_input_ids
    decoder_input_lengths draft_acceptance_threshold draft_input_ids draft_logits early_stopping embedding_bias
    encoder_input_features encoder_output_lengths end_id exclude_input_in_output frequency_penalty guided_decoding_guide
    guided_decoding_guide_type input_ids input_lengths len_penalty lookahead_ngram_size lookahead_verification_set_size
    lookahead_window_size lora_config lora_task_id lora_weights min_length mrope_position_deltas mrope_rotary_cos_sin
    num_return_sequences pad_id presence_penalty prompt_embedding_table prompt_table_extra_ids prompt_vocab_size
    random_seed repetition_penalty request_output_len retention_decode_duration_ms retention_decode_priority
    retention_token_range_durations_ms retention_token_range_ends retention_token_range_priorities
    retention_token_range_starts return_context_logits return_generation_logits return_log_probs return_perf_metrics
    runtime_top_k runtime_top_p runtime_top_p_decay runtime_top_p_min runtime_top_p_reset_ids skip_cross_attn_blocks
    stop stop_words_list streaming temperature
"""
AROUND_TENSORRT_LLM = """
    QUERY DECODER_QUERY IMAGE_BYTES IMAGE_URL VIDEO_BYTES REQUEST_OUTPUT_LEN BAD_WORDS_DICT STOP_WORDS_DICT
    EMBEDDING_BIAS_WORDS EMBEDDING_BIAS_WEIGHTS END_ID PAD_ID PROMPT_TABLE_EXTRA_ID TOKENS_BATCH SEQUENCE_LENGTH
    text_input decoder_text_input image_input image_bytes_input image_url_input video_bytes_input max_tokens
    num_return_sequences bad_words stop_words exclude_input_in_output end_id pad_id top_k top_p temperature
    length_penalty repetition_penalty min_length presence_penalty frequency_penalty random_seed return_log_probs
    return_context_logits return_generation_logits return_perf_metrics beam_width stream prompt_embedding_table
    prompt_table_extra_id prompt_vocab_size embedding_bias_words embedding_bias_weights lora_task_id lora_weights
    lora_config guided_decoding_guide_type guided_decoding_guide num_draft_tokens use_draft_logits
"""
VLLM = """
    text_input image stream sampling_parameters exclude_input_in_output return_finish_reason return_cumulative_logprob
    return_logprobs return_num_input_tokens return_num_output_tokens embedding_request
"""
OUTPUTS = """
    output_hidden_state output_ids sequence_length cum_log_probs output_log_probs response_input_lengths
    context_embeddings output_attentions
    INPUT_ID REQUEST_INPUT_LEN DECODER_INPUT_ID REQUEST_DECODER_INPUT_LEN BAD_WORDS_IDS STOP_WORDS_IDS EMBEDDING_BIAS
    REQUEST_OUTPUT_LEN OUT_END_ID OUT_PAD_ID OUT_PROMPT_TABLE_EXTRA_IDS PIXEL_VALUES ASPECT_RATIO_IDS ASPECT_RATIO_MASK
    CROSS_ATTENTION_MASK IMAGE_SIZES IS_VIDEO_INPUT ATTENTION_MASK IMAGE_GRID_THW VISION_INPUT_ID context_logits
    generation_logits batch_index sequence_index context_phase_params kv_cache_alloc_new_blocks kv_cache_reused_blocks
    kv_cache_alloc_total_blocks arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns
    acceptance_rate total_accepted_draft_tokens total_draft_tokens OUTPUT text_output finish_reason cumulative_logprob
    logprobs num_input_tokens num_output_tokens
"""
CHANGE_NOTHING = {
    "start_id",
    *(f"{begin}{name}" for begin in ("", "runtime_") for name in ("top_p_min", "top_p_reset_ids")),
}


def test_every_tensor_of_nvidias_configurations_is_known() -> None:
    """Engines' own inputs can be declared; the tensors around engines cannot, and have a reason."""
    engines = {*FASTERTRANSFORMER.split(), *TENSORRT_LLM.split()}
    encoders = {name for name in engines if "encoders" in FOREIGN.get(name, "")}
    assert encoders == {
        "ia3_tasks", "input_hidden_state", "is_return_attentions", "max_output_len", "sequence_length",
        "sequence_lengths",
    }  # fmt: skip
    assert engines - encoders <= INPUTS
    assert {*AROUND_TENSORRT_LLM.split(), *VLLM.split()} <= INPUTS | FOREIGN.keys()
    declared = {tensor.name for tensor in engine_spec("/model").outputs}
    assert {*OUTPUTS.split()} <= declared | FOREIGN.keys()


@pytest.mark.parametrize(
    "name", sorted(INPUTS - NEUTRAL.keys() - LOG_PROBS.keys() - {"carry", "input_ids", "stop", "streaming"})
)
def test_each_input_is_obeyed_or_refused(name: str) -> None:
    """Or known to change nothing: another value gives another request, or an error that names the input."""
    others: dict[str, Any] = {"temperature": 0.5, "runtime_top_p": 0.5, "runtime_top_k": 9, "repetition_penalty": 1.5}
    others |= {"end_id": 9, "guide": b'{"regex": "a"}'}
    words: Any = pack_words([[8]]) if name.endswith("_words_list") else others.get(name, 1)
    if name in REFUSED:
        with pytest.raises(InputError, match=f"The request has {name}, and {REFUSED[name]}. Leave it out."):
            read(**{name: words})
        return
    plain: dict[str, Any] = {"temperature": 0.7, "runtime_top_k": 5}
    is_alike = name in CHANGE_NOTHING or name in ("pad_id", "exclude_input_in_output")  # these are for whole answers
    assert (read(**{**plain, name: words}) == read(**plain)) == is_alike


def test_everything() -> None:
    request = read(
        (5, 6, 99, -7, 1000),  # padding may be anything
        input_lengths=3,
        end_id=7,
        temperature=0.7,
        runtime_top_p=0.9,
        runtime_top_k=40,
        repetition_penalty=1.1,
        seed=2**64 - 1,
        min_tokens=2,
        stop_words_list=pack_words([[8], [9, 10]]),
        bad_words_list=pack_words([[11, 12, 13]]),
        carry='{"stops": ["é"]}'.encode(),
        streaming=False,
        pad_id=-5,
    )
    assert request == TokenRequest(
        ids=(5, 6, 99),
        max_tokens=4,
        end_ids=(7,),
        sampling=Sampling(0.7, 40, 0.9, 1.1, 2**64 - 1, 2),
        stops=((8,), (9, 10)),
        bans=((11, 12, 13),),
        passthrough='{"stops": ["é"]}',
        is_streaming=False,
    )


def test_an_empty_word_list_has_no_words() -> None:
    assert read(stop_words_list=np.array([[0], [-1]])).stops == ()


def test_no_end_token() -> None:
    assert read(end_id=-1).end_ids == ()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"ids": (5, 100)}, "input_ids has 100 at place 1, and the model's vocabulary has 100 tokens."),
        ({"ids": (5, 100)}, "Send ids from 0 to 99:"),
        ({"ids": (-1,)}, "input_ids has -1 at place 0"),
        ({"input_lengths": 0}, "The prompt has no tokens: input_lengths is 0."),
        ({"input_lengths": -3}, "input_lengths is -3."),
        ({"input_lengths": 3}, "input_lengths is 3, and input_ids has 2 tokens."),
        ({"new": 0}, "request_output_len is 0."),
        ({"new": -4}, "request_output_len is -4."),
        ({"new": 19}, "The prompt has 2 tokens and request_output_len is 19: 21 together, and the context has 20."),
        ({"new": 19}, "Ask for at most 18 new tokens."),
        ({"ids": (1,) * 20, "new": 1}, "Shorten the prompt."),
        ({"end_id": 100}, "end_id has 100"),
        ({"end_id": -2}, "end_id has -2"),
        ({"min_tokens": 5}, "min_tokens is 5, and request_output_len is 4."),
        ({"runtime_top_p": 1.25}, "runtime_top_p is 1.25."),
        ({"temperature": float("nan")}, "temperature is nan."),
        ({"temperature": -0.1}, "temperature is -0.1."),  # not -0.10000000149
        ({"stop_words_list": pack_words([[1], [100]])}, "stop_words_list has 100"),
        ({"bad_words_list": np.array([[1, 2], [3, -1]])}, "bad_words_list has"),
        ({"carry": b"\xff"}, "carry is not UTF-8."),
        ({"carry": b"x" * 4097}, "carry has 4097 bytes."),
    ],
)
def test_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        read(**more)
    assert words in str(error.value)


def test_answers_are_as_the_engine_declares() -> None:
    for ids in ([], [1], [1, 2, 3]):
        answer = pack_answer(ids, stream_id=2**62, passthrough="é", is_last=True, reason="stop")
        check_outputs(ONE_ROW, answer, 1, LOG_PROB_OUTPUTS)
        assert answer["output_ids"].shape == (1, 1, len(ids))


ONE_ROW = engine_spec("/model")  # as the engines' own answers are, which name no row
ONE_ROW = replace(ONE_ROW, outputs=tuple(tensor for tensor in ONE_ROW.outputs if tensor.name != "batch_index"))


class Given(StreamingComponent):
    """Answers with the tokens that it is given, by way of ``Answering``."""

    optional_outputs = LOG_PROB_OUTPUTS
    tokens: Sequence[int]
    request: TokenRequest
    taken, beside = 0, 1

    def open(self, inputs: Any, stream: Any) -> None:  # noqa: ARG002
        answering = Answering(self.request, stream)
        for token in self.tokens:
            self.taken += 1
            log_probs = LogProbs(-token / 10, (token, 0), (-token / 10, -7.5)) if self.request.returns else None
            if not answering.add(token, log_probs, beside=self.beside):
                break


def answers(tokens: Sequence[int], request: TokenRequest, beside: int = 1) -> tuple[list[list[int]], str, int]:
    """The tokens of each answer, the reason, and how many tokens were taken."""
    component = Given(Context(ONE_ROW, ENGINE))
    component.tokens, component.request, component.beside = tokens, request, beside
    found = list(component.stream(token_inputs([5], 4)))
    assert [each["is_last"].item() for each in found] == [False] * (len(found) - 1) + [True]
    assert [each["carry"].item() for each in found] == [request.passthrough.encode(), *[b""] * (len(found) - 1)]
    assert len({each["stream_id"].item() for each in found}) == 1
    assert all(not each["finish_reason"].item() for each in found[:-1])
    return (
        [each["output_ids"].ravel().tolist() for each in found],
        found[-1]["finish_reason"].item().decode(),
        (component.taken),
    )


def test_logits_that_are_not_finite_end_one_answer() -> None:
    component = Given(Context(ONE_ROW, ENGINE))
    streams = [QueueStream(component, 1) for _ in range(2)]
    sequences = [RunningSequence(TokenRequest((5,), 1, (), Sampling(0.0)), stream) for stream in streams]
    logits = np.zeros((2, 20), np.float32)
    logits[0, 3], logits[1, 7] = np.nan, 1
    assert step(logits, sequences) == [0, 7]
    assert all(sequence.is_done for sequence in sequences)
    with pytest.raises(ServerError, match=r"logits are not finite, .* parameter dtype to bfloat16 or float32"):
        list(streams[0])
    assert [answer["output_ids"].tolist() for answer in streams[1]] == [[[[7]]]]


@pytest.mark.parametrize(
    ("tokens", "more", "expected"),
    [
        ([11, 12, 13], {}, ([[11], [12], [13]], "length", 3)),
        ([11, 2, 13], {"end_ids": (2, 3)}, ([[11], []], "stop", 2)),
        ([11, 12, 13], {"stops": ((12,),)}, ([[11], [12]], "stop", 2)),
        ([11, 2, 13], {"end_ids": (2,), "sampling": Sampling(min_tokens=2)}, ([[11], [2], [13]], "length", 3)),
        ([11, 12, 13], {"is_streaming": False}, ([[11, 12, 13]], "length", 3)),
        ([11, 12, 13], {"ids": (5, 6), "sampling": Sampling(echo=True)}, ([[5, 6, 11], [12], [13]], "length", 3)),
        ([11, 12, 13], {"is_streaming": False, "stops": ((13,),), "passthrough": "{}"}, ([[11, 12, 13]], "stop", 3)),
    ],
)
def test_answers(tokens: list[int], more: dict[str, Any], expected: Any) -> None:
    request = TokenRequest(**{"ids": (5,), "max_tokens": 3, "passthrough": "{}", **more})
    assert answers(tokens, request) == expected


@pytest.mark.parametrize(
    ("new", "more", "expected"),
    [
        (5, {}, ([[11], [12, 13], [14, 15]], "length", 5)),
        (4, {}, ([[11], [12, 13], [14]], "length", 4)),
        (5, {"end_ids": (13,)}, ([[11], [12]], "stop", 3)),
        (5, {"stops": ((12,),)}, ([[11], [12]], "stop", 2)),
    ],
)
def test_beside_many_others_every_second_token_comes_with_the_next(new: int, more: Any, expected: Any) -> None:
    request = TokenRequest((5,), new, passthrough="{}", **more)
    assert answers([11, 12, 13, 14, 15], request, beside=MANY) == expected
    alone = answers([11, 12, 13, 14, 15], request, beside=MANY - 1)
    assert [len(ids) for ids in alone[0]] == [1] * (len(alone[0]) - 1) + [len(alone[0][-1])]


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    stops=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=3).map(tuple),
    least=st.integers(0, 4),
)
def test_stops_end_an_answer_where_they_are_complete(
    tokens: list[int], stops: tuple[tuple[int, ...], ...], least: int
) -> None:
    sampling = Sampling(min_tokens=min(least, len(tokens)))
    found, reason, taken = answers(tokens, TokenRequest((5,), len(tokens), stops=stops, sampling=sampling))
    ends = [
        end
        for end in range(sampling.min_tokens + 1, len(tokens) + 1)
        if any(tuple(tokens[max(0, end - len(stop)) : end]) == stop for stop in stops)
    ]
    end = min(ends, default=len(tokens))
    assert [token for ids in found for token in ids] == tokens[:end]
    assert (taken, reason) == (end, "stop" if ends else "length")


ALL = {"output_log_probs", "cum_log_probs", "top_log_probs", "top_token_ids"}


@pytest.mark.parametrize(
    ("given", "outputs", "returns"),
    [
        ({}, ALL, ()),
        ({"return_log_probs": False, "top_logprobs": 0}, set(), ()),
        ({"is_return_log_probs": False}, set(), ()),
        ({"return_log_probs": True}, ALL, ("output_log_probs", "cum_log_probs")),
        ({"is_return_log_probs": True}, {"cum_log_probs"}, ("cum_log_probs",)),
        ({"is_return_log_probs": True, "return_log_probs": True}, ALL, ("output_log_probs", "cum_log_probs")),
        ({"top_logprobs": 20}, ALL, ("top_log_probs", "top_token_ids")),
    ],
)
def test_log_probabilities_that_are_asked_for(given: dict[str, Any], outputs: set[str], returns: Any) -> None:
    assert TokenRequest.read(token_inputs([5], 4, **given), LIMITS, outputs).returns == returns


@pytest.mark.parametrize(
    ("given", "outputs", "limits", "words"),
    [
        ({"return_log_probs": True}, set(), LIMITS, "return_log_probs is True, and the model declares no output out"),
        (
            {"is_return_log_probs": 1},
            {"top_log_probs"},
            LIMITS,
            "no output output_log_probs or cum_log_probs. Leave is",
        ),
        ({"top_logprobs": 1}, {"cum_log_probs"}, LIMITS, "declares no output top_log_probs or top_token_ids."),
        ({"top_logprobs": 21}, ALL, LIMITS, "top_logprobs is 21. Send from 0 to 20"),
        ({"top_logprobs": -1}, ALL, LIMITS, "top_logprobs is -1. Send from 0 to 20"),
        ({"top_logprobs": 8}, ALL, Limits(7, 20, 4), "top_logprobs is 8, and this model gives at most 7. Send 0 to 7."),
        ({"top_logprobs": 6}, ALL, Limits(100, 20, 4, top_logprobs=5), "this model gives at most 5. Send 0 to 5."),
    ],
)
def test_log_probabilities_that_are_refused(
    given: dict[str, Any], outputs: set[str], limits: Limits, words: str
) -> None:
    with pytest.raises(InputError) as error:
        TokenRequest.read(token_inputs([5], 4, **given), limits, outputs)
    assert words in str(error.value)


@pytest.mark.parametrize("is_streaming", [True, False])
def test_log_probabilities_of_answers(is_streaming: bool) -> None:
    """There is one for each token that is sent, so none for the end token."""
    component = Given(Context(ONE_ROW, ENGINE))
    component.tokens = [11, 12, 2]
    component.request = TokenRequest(
        (5,), 9, (2,), Sampling(top_logprobs=2), is_streaming=is_streaming, returns=tuple(sorted(ALL))
    )
    found = list(component.stream(token_inputs([5], 4)))
    sums = [answer["cum_log_probs"].item() for answer in found]
    np.testing.assert_allclose(sums, [-1.1, -2.3, -2.3] if is_streaming else [-2.3], rtol=1e-6)
    places = [place for answer in found for place in read_log_probs(answer)]
    assert [[*place.top_ids] for place in places] == [[11, 0], [12, 0]]
    np.testing.assert_allclose([place.chosen for place in places], [-1.1, -1.2], rtol=1e-6)
    np.testing.assert_allclose([place.top for place in places], [[-1.1, -7.5], [-1.2, -7.5]], rtol=1e-6)
    assert found[-1]["top_log_probs"].shape == (1, 0 if is_streaming else 2, 2)


def test_stream_ids_differ() -> None:
    component = Given(Context(ONE_ROW, ENGINE))
    component.tokens, component.request = [1], TokenRequest((5,), 1)
    ids = {answer["stream_id"].item() for _ in range(50) for answer in component.stream(token_inputs([5], 1))}
    assert len(ids) == 50
    assert all(0 <= number < 2**63 for number in ids)

"""TensorRT-LLM's five models, with an engine of ours under its name; the oracle is ``llm_bls``.

SHOAL_TENSORRTLLM_BACKEND names a clone of https://github.com/triton-inference-server/tensorrtllm_backend, at a commit
that has inflight_batcher_llm/client, such as c2e65b8.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.grpc as triton
from tokenizers import Tokenizer
from tritonclient.utils import np_to_triton_dtype

import shoal
from shoal import Client
from shoal.authoring.composition.compose import compose
from shoal.clients.llm.client import AsyncLlm, Llm
from shoal.clients.llm.dialects import TensorrtLlm
from shoal.errors import InputError, ShoalError
from shoal.kit.component.spec import TensorSpec
from shoal.kit.generation.pieces import Piece
from shoal.kit.generation.trtllm import REFUSED
from shoal.lab.tiny_llm import make_tiny
from shoal.serving.server.launch import serve
from tests.conftest import Scale
from tests.support.once import ROOT
from tests.support.service import Service
from tests.support.trtllm import FOLDERS, PROMPTS, SWAP

OWN = "SHOAL_TENSORRTLLM_BACKEND"
MODELS = ["ensemble", "tensorrt_llm_bls"]
NEW = 20
REFUSALS: dict[str, Any] = {
    "decoder_text_input": ["A"], "prompt_embedding_table": np.zeros((1, 2, 2), np.float16),
    "prompt_table_extra_id": [1], "prompt_vocab_size": [2], "return_context_logits": [True],
    "return_generation_logits": [True], "return_perf_metrics": [True], "return_kv_cache_reuse_stats": [True],
    "image_url_input": ["file:a.png"], "use_draft_logits": [True],
}  # fmt: skip
EACH_REFUSED = [
    (model, name, value)
    for name, value in REFUSALS.items()
    for model in (MODELS if not name.startswith(("image", "use")) else MODELS[1:])
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for 1,000 new tokens beside a prompt, as the guide's requests ask for."""
    folder = make_tiny(tmp_path_factory.mktemp("weights") / "tiny")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"max_position_embeddings": 2048}
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def service(weights: Path) -> Iterator[Service]:
    """Beside the models, ``accumulating``, which streams the text so far."""
    place = weights.parent
    config = Path(shutil.copytree(ROOT / FOLDERS[1], place / "models" / "accumulating")) / "config.pbtxt"
    text = config.read_text(encoding="utf-8").replace('name: "tensorrt_llm_bls"', 'name: "accumulating"')
    text = text.replace("max_batch_size: 64", "max_batch_size: 1")  # shared memory must hold 64 rows of each model
    for key, value in (("accumulate_tokens", "Yes"), ("tensorrt_llm_model_name", "${tensorrt_llm_model_name}")):
        begin, end = text.split(f'key: "{key}"')
        end = end.replace('string_value: ""', f'string_value: "{value}"', 1)
        text = f'{begin}key: "{key}"{end}'
    config.write_text(text, encoding="utf-8")
    names = [*MODELS, "accumulating", "llm_bls"]
    repository = compose(names, place / "repository", weights=weights, swap=SWAP, projects=[place])
    with Service(repository, place / "log") as running:
        yield running


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    with Client(service.grpc) as found:
        yield found


@pytest.fixture(scope="module")
def texts(client: Client, scale: Scale) -> dict[str, str]:
    """What ``shoal generate`` answers to each prompt."""
    return {prompt: answer(client, prompt) for prompt in PROMPTS[: scale(16, 48)]}


def answer(client: Client, prompt: str, **settings: Any) -> str:
    return Llm(client, "llm_bls").generate(prompt, **{"max_tokens": NEW, "temperature": 0.0, **settings}).text


def answer_biased(client: Client, prompt: str, bias: dict[str, list[Any]]) -> str:
    given = {name: [values] for name, values in bias.items()} | {"max_tokens": [NEW], "stream": [False]}
    (found,) = client.stream("llm_bls", {"text_input": [prompt], **given})
    return str(found["text_output"].item().decode())


def ask(client: Client, model: str, prompts: list[str], **more: Any) -> list[list[str]]:
    """The pieces of each prompt's text; whole, exactly one for each."""
    pieces = defaultdict(list)
    rows = len(prompts)
    given = {name: [value] * rows for name, value in more.items()}
    inputs = {"text_input": [[prompt] for prompt in prompts], "max_tokens": [[NEW]] * rows, **given}
    for each in client.stream(model, inputs):
        assert each["text_output"].shape == (1,)
        pieces[each["batch_index"].item()].append(each["text_output"].item().decode())
    assert pieces.keys() == set(range(rows))
    return [pieces[row] for row in range(rows)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("is_streaming", [True, False, None])
def test_texts_are_those_of_generate(
    model: str, is_streaming: bool | None, client: Client, texts: dict[str, str]
) -> None:
    """16 prompts at a time, alone and several in one request."""
    more, asked = {} if is_streaming is None else {"stream": [is_streaming]}, [*texts]
    with ThreadPoolExecutor(16) as pool:
        alone = list(pool.map(lambda prompt: ask(client, model, [prompt], **more)[0], asked))
    starts = range(0, len(asked), 16)
    together = [pieces for start in starts for pieces in ask(client, model, asked[start : start + 16], **more)]
    for found in (alone, together):
        assert ["".join(pieces) for pieces in found] == list(texts.values())
        assert all(len(pieces) == 1 for pieces in found) == (not is_streaming)


@pytest.mark.verify
@pytest.mark.parametrize("model", MODELS)
def test_curl_lines_of_a_guide(model: str, client: Client, service: Service, scale: Scale) -> None:
    """As in guides to TensorRT-LLM, without ``stream`` and with an empty text for no words."""
    line = (
        'curl -X POST %s/v2/models/%s/generate -d \'{"text_input": "你是什么语言模型?", "max_tokens": %d,'
        ' "bad_words": "", "stop_words": "<|eot_id|>"}\''
    )
    found = subprocess.run(
        ["bash", "-c", line % (service.http, model, scale(100, 1000))], capture_output=True, text=True, check=True
    ).stdout
    expected = answer(client, "你是什么语言模型?", max_tokens=scale(100, 1000), stop_words=["<|eot_id|>"])
    assert json.loads(found)["text_output"] == expected


@pytest.mark.verify
@pytest.mark.parametrize("model", MODELS)
def test_shoals_client_asks_these_models(model: str, client: Client, service: Service, texts: dict[str, str]) -> None:
    """Their answers say no reason, and the prompt is not in the text."""
    llm, prompt = Llm(client, model), PROMPTS[0]
    settings: dict[str, Any] = {"max_tokens": NEW, "min_tokens": 3, "seed": 5}
    expected = Llm(client, "llm_bls").generate(prompt, **settings)
    whole, *pieces = llm.generate(prompt, **settings), *llm.stream(prompt, **settings)
    assert (whole.text, whole.finish_reason) == (texts[prompt], "")
    assert (whole.num_input_tokens, whole.num_output_tokens) == expected[2:4]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].num_output_tokens == whole.num_output_tokens
    assert len(pieces) > 1
    assert llm.generate_all(PROMPTS[:4], max_tokens=NEW)[3].text == texts[PROMPTS[3]]

    async def ask_async() -> Piece:
        async with shoal.AsyncClient(service.http, protocol="http") as other:
            return await AsyncLlm(other, model).generate(prompt, **settings)

    assert asyncio.run(ask_async()) == whole
    with pytest.raises(InputError, match="The model has no setting top_logprobs"):
        llm.generate(prompt, max_tokens=NEW, top_logprobs=2)
    with pytest.raises(InputError, match="no default for max_tokens"):
        llm.generate(prompt)
    with pytest.raises(InputError, match="take texts alone"):
        llm.generate([{"role": "user", "content": "A"}], max_tokens=NEW)


def test_each_input_that_is_refused_is_asked_for() -> None:
    assert REFUSALS.keys() == REFUSED.keys()


@pytest.mark.parametrize("model", MODELS)
def test_settings_under_the_names_of_older_releases(model: str, client: Client) -> None:
    """As the clients of releases up to 0.19 send them, with the flags that they leave at false."""
    prompt, drawn = PROMPTS[0], {"temperature": 0.9, "top_k": 7}
    flags = {name: [False] for name in REFUSALS if name.startswith("return")}
    given = {name: [value] for name, value in drawn.items()}
    for more in ({"seed": 3}, {"seed": 4, "min_tokens": NEW}):
        older = {{"seed": "random_seed", "min_tokens": "min_length"}[name]: [value] for name, value in more.items()}
        assert ask(client, model, [prompt], **given, **older, **flags) == [[answer(client, prompt, **drawn, **more)]]
    with pytest.raises(InputError, match=f"min_tokens is {NEW + 1}"):
        ask(client, model, [prompt], min_length=[NEW + 1])


@pytest.mark.parametrize("model", MODELS)
def test_openais_completions(model: str, service: Service, client: Client, texts: dict[str, str]) -> None:
    with openai.OpenAI(base_url=f"http://{service.http}/v1", api_key="none") as asking:
        served = {each.id: each.to_dict()["serves"] for each in asking.models.list()}[model]
        assert served == ["/v1/completions"]
        prompt = PROMPTS[0]
        whole = asking.completions.create(model=model, prompt=[prompt, PROMPTS[1]], max_tokens=NEW)
        assert [choice.text for choice in whole.choices] == [texts[prompt], texts[PROMPTS[1]]]
        expected = Llm(client, "llm_bls").generate(prompt, max_tokens=NEW, temperature=0)
        assert whole.choices[0].finish_reason == expected.finish_reason
        pieces = list(asking.completions.create(model=model, prompt=prompt, max_tokens=NEW, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == texts[prompt]
        assert len(pieces) > 2
        stop = texts[prompt][8:10]
        stopped = asking.completions.create(model=model, prompt=prompt, max_tokens=NEW, stop=stop, seed=3)
        assert stopped.choices[0].text == texts[prompt][: texts[prompt].index(stop)]
        assert stopped.choices[0].finish_reason == "stop"
        assert stopped.usage is not None
        assert stopped.usage.prompt_tokens == expected.num_input_tokens
        with pytest.raises(openai.BadRequestError, match=f"{model} does not serve /v1/chat/completions. It serves /v1"):
            asking.chat.completions.create(model=model, messages=[{"role": "user", "content": "A"}])
        with pytest.raises(openai.BadRequestError, match=r"no default for max_tokens\. Send max_tokens"):
            asking.completions.create(model=model, prompt=prompt)


def test_names_of_settings_in_older_releases() -> None:
    names = ("text_input", "max_tokens", "beam_width", "random_seed", "min_length")
    dialect = TensorrtLlm([TensorSpec(name, "TYPE_INT32", (1,)) for name in names])
    inputs = dialect.to_inputs("A", {"max_tokens": 3, "seed": 1, "min_tokens": 2}, is_streaming=True)
    assert inputs == {
        "text_input": ["A"], "stream": [True], "max_tokens": [3], "random_seed": [1], "min_length": [2]
    }  # fmt: skip


@pytest.mark.verify
@pytest.mark.parametrize("model", MODELS)
def test_words_settings_and_the_prompt(model: str, client: Client, texts: dict[str, str]) -> None:
    prompt, text = PROMPTS[0], texts[PROMPTS[0]]
    stop = text[8:10]
    cut = text[: text.index(stop)]
    for is_streaming in (True, False):
        found = ask(client, model, [prompt], stop_words=[stop, ""], stream=[is_streaming])
        assert "".join(*found) == cut
    whole = ask(client, model, [prompt], exclude_input_in_output=[False], stop_words=[prompt[:3]])
    assert whole == [[prompt + answer(client, prompt, stop_words=[prompt[:3]])]]
    given = {"text_input": [prompt], "max_tokens": [NEW], "exclude_input_in_output": [False]}
    (counted,) = client.stream(model, given)
    expected = Llm(client, "llm_bls").generate(prompt, max_tokens=NEW, temperature=0)
    counts = expected.num_input_tokens, expected.num_output_tokens
    assert (counted["num_input_tokens"].item(), counted["num_output_tokens"].item()) == counts
    assert "".join(*ask(client, model, [prompt], exclude_input_in_output=[False], stream=[True])) == text
    drawn = {"temperature": 0.9, "top_k": 7, "seed": 3}
    assert ask(client, model, [prompt], **{name: [value] for name, value in drawn.items()}) == [
        [answer(client, prompt, **drawn)]
    ]
    bias: dict[str, list[Any]] = {"embedding_bias_words": ["river", " the"], "embedding_bias_weights": [30.0, 25.0]}
    biased = answer_biased(client, prompt, bias)
    assert biased != text
    assert ask(client, model, [prompt] * 2, num_return_sequences=[1], **bias) == [[biased]] * 2


@pytest.mark.usefixtures("service")
def test_a_bias_has_a_number_for_each_token(weights: Path) -> None:
    """As TensorRT-LLM's engines expect it; without words it is empty."""
    given = {"QUERY": ["A cat", "A"], "REQUEST_OUTPUT_LEN": [NEW, NEW]}
    words = {"EMBEDDING_BIAS_WORDS": [["a"], ["b"]], "EMBEDDING_BIAS_WEIGHTS": [[2.0], [3.0]]}
    tokens = Tokenizer.from_file(str(weights / "tokenizer.json"))
    with shoal.load(weights.parent / "repository" / "preprocessing") as pipeline:
        bias = pipeline(**given, **words)["EMBEDDING_BIAS"]
        assert bias.shape == (2, json.loads((weights / "config.json").read_text(encoding="utf-8"))["vocab_size"])
        assert [(row, token, bias[row, token]) for row, token in np.argwhere(bias).tolist()] == [
            (0, tokens.token_to_id("a"), 2.0),
            (1, tokens.token_to_id("b"), 3.0),
        ]
        assert pipeline(**given)["EMBEDDING_BIAS"].shape == (2, 0)


@pytest.mark.verify
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("is_streaming", [True, False])
def test_log_probabilities(model: str, is_streaming: bool, client: Client) -> None:
    given = {"text_input": ["A cat"], "max_tokens": [NEW], "return_log_probs": [True], "stream": [is_streaming]}
    answers = list(client.stream(model, given))
    each = np.concatenate([found["output_log_probs"].ravel() for found in answers])
    assert len(each) == NEW
    np.testing.assert_allclose(each.sum(), answers[-1]["cum_log_probs"].item(), rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("ensemble", {"beam_width": [2]}, "beam_width is 2, and answers have one beam"),
        ("tensorrt_llm_bls", {"beam_width": [2]}, "beam_width is 2, and answers have one beam"),
        ("ensemble", {"num_return_sequences": [2]}, "num_return_sequences is 2, and answers have one"),
        ("ensemble", {"lora_task_id": [1]}, "the weights are those of the model's folder, without LoRA"),
        *((model, {name: value}, f"The request has {name}, and ") for model, name, value in EACH_REFUSED),
        *((model, {"seed": [1], "random_seed": [1]}, "has seed and random_seed, which are the s") for model in MODELS),
        ("tensorrt_llm_bls", {"num_draft_tokens": [2]}, "cannot perform speculative decoding without draft model"),
        ("tensorrt_llm_bls", {"image_input": np.zeros((1, 1, 3, 2, 2), np.float16)}, "no multimodal encoder"),
        (
            "tensorrt_llm_bls",
            {"image_input": np.zeros((1, 1, 3, 2, 2), np.float16), "num_draft_tokens": [2]},
            "Multimodal and speculative decoding is not currently supported",
        ),
    ],
)
def test_errors_come_before_the_final_answer(
    model: str, given: dict[str, Any], message: str, service: Service, client: Client
) -> None:
    """The final answer is of models; Triton ends an ensemble's request with the error."""
    with pytest.raises(InputError, match=message):
        list(client.stream(model, {"text_input": ["A cat"], "max_tokens": [NEW], **given}))
    if model == "ensemble":
        return
    tensors = {each.name: each for each in client.describe(model).inputs}
    arrays: dict[str, Any] = {
        "text_input": np.array([[b"A cat"]], object),
        "max_tokens": np.array([[NEW]], np.int32),
        **{
            name: np.array([value], tensors[name].numpy_dtype) if isinstance(value, list) else value
            for name, value in given.items()
        },
    }
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(service.grpc.split("//")[-1]) as raw:
        raw.start_stream(callback=partial(lambda found, result, error: found.put((result, error)), answers))
        inputs = [triton.InferInput(n, [*array.shape], np_to_triton_dtype(array.dtype)) for n, array in arrays.items()]
        for one, array in zip(inputs, arrays.values(), strict=True):
            one.set_data_from_numpy(array)
        raw.async_stream_infer(model, inputs, enable_empty_final_response=True)
        result, error = answers.get(timeout=60)
        assert result is None
        assert message in str(error)
        result, error = answers.get(timeout=60)
        assert error is None
        assert result.get_response().parameters["triton_final_response"].bool_param


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of the engine and the BLS model that are not decoupled."""
    folder = tmp_path_factory.mktemp("project")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name)
        path = folder / name / "config.pbtxt"
        text = path.read_text(encoding="utf-8").replace("decoupled: true", "decoupled: false")
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.verify
def test_models_that_are_not_decoupled(project: Path, weights: Path, texts: dict[str, str], tmp_path: Path) -> None:
    """One answer with all rows, and streaming is refused; NVIDIA's client gets one answer, and stops it."""
    repository = compose(MODELS, tmp_path / "r", weights=weights, swap=SWAP, projects=[project])
    with serve(repository) as server, Client(server.grpc_url) as client:
        for model in MODELS:
            inputs = {"text_input": [[each] for each in PROMPTS[:3]], "max_tokens": [[NEW]] * 3}
            found = client.infer(model, inputs)
            assert [text.decode() for text in found["text_output"]] == [texts[each] for each in PROMPTS[:3]]
            with pytest.raises(ShoalError, match="Streaming is only supported in decoupled mode"):
                client.infer(model, {"text_input": ["A cat"], "max_tokens": [NEW], "stream": [True]})
        if OWN in os.environ:
            url = server.grpc_url
            assert texts[PROMPTS[0]] in run_theirs(url, ENGINE, ["--text", PROMPTS[0], *of(weights)])
            stopped = run_theirs(url, ENGINE, ["--text", "A cat", *of(weights, 900), "--stop-after-ms", "300"])
            assert "Output sequence" in stopped


@pytest.mark.verify
def test_accumulated_tokens(client: Client, texts: dict[str, str]) -> None:
    for prompt in PROMPTS[:3]:
        (pieces,) = ask(client, "accumulating", [prompt], stream=[True])
        assert pieces[-1] == texts[prompt]
        assert all(later.startswith(earlier) for earlier, later in pairwise(pieces))


ENGINE, END_TO_END = "inflight_batcher_llm_client.py", "end_to_end_grpc_client.py"


def of(weights: Path, new: int = NEW) -> list[str]:
    return ["--tokenizer-dir", str(weights), "--request-output-len", str(new), "--request-id", "7"]


def run_theirs(url: str, script: str, arguments: list[str]) -> str:
    path = Path(os.environ[OWN]) / "inflight_batcher_llm" / "client" / script
    command = [sys.executable, str(path), "--url", url.split("//")[-1], *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.verify
@pytest.mark.skipif(OWN not in os.environ, reason=f"{OWN} names no clone of NVIDIA's tensorrtllm_backend")
def test_nvidias_own_clients(service: Service, client: Client, weights: Path, texts: dict[str, str]) -> None:
    url = service.grpc
    for model in MODELS:
        for more in ([], ["--batch-inputs"]):
            for way in ([], ["--streaming"]):
                given = [
                    "--prompt",
                    json.dumps(PROMPTS[:5]),
                    "--output-len",
                    str(NEW),
                    "--model-name",
                    model,
                    "--verbose",
                ]
                found = run_theirs(url, END_TO_END, [*given, *more, *way, "--exclude-input-in-output"])
                assert all(texts[prompt] in found for prompt in PROMPTS[:5]), found
        biased = answer_biased(
            client, PROMPTS[0], {"embedding_bias_words": ["river"], "embedding_bias_weights": [30.0]}
        )
        bias = ["--embedding-bias-words", "river", "--embedding-bias-weights", "30", "--num-return-sequences", "1"]
        shown = ["--prompt", PROMPTS[0], "--output-len", str(NEW), "--model-name", model, "--verbose", *bias]
        assert f"0: {PROMPTS[0]}{biased}" in run_theirs(url, END_TO_END, shown)
    found = run_theirs(url, ENGINE, ["--text", PROMPTS[0], *of(weights), "--streaming", "--num-return-sequences", "1"])
    assert f"Output beam 0: {texts[PROMPTS[0]]}" in found
    stopped = run_theirs(url, ENGINE, ["--text", "A cat", *of(weights, 900), "--streaming", "--stop-after-ms", "300"])
    assert "Output sequence" in stopped  # the script raises an error if there are 900 tokens

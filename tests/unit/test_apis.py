"""Services of models in OpenAI's API: found from the tensors, or said by the parameter ``api``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.authoring.composition.labels import find_labels
from shoal.authoring.repository.apis import Api, find_served, make_body, read_labels
from shoal.authoring.repository.config import ModelConfig, read_config
from shoal.errors import ArtifactError
from tests.support.configs import make_configs, parameter
from tests.support.once import ROOT

TEXT = "text_input:STRING"
CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions")


def make(inputs: str, outputs: str, api: str = "", rows: int = 4) -> ModelConfig:
    """Configuration of a model with tensors such as ``TEXT:STRING`` and ``WEIGHT?:FP32:-1``; ``?`` marks optional."""

    def tensor(text: str) -> str:
        name, kind, *dims = text.split(":")
        more = " optional: true" if name.endswith("?") else ""
        return f'{{ name: "{name.rstrip("?")}" data_type: TYPE_{kind} dims: [ {", ".join(dims or ["1"])} ]{more} }}'

    text = f'backend: "python" max_batch_size: {rows}\n' + (parameter("api", api) if api else "")
    for kind, names in (("input", inputs), ("output", outputs)):
        text += "".join(f"{kind} {tensor(each)}\n" for each in names.split())
    return make_configs(a=text)["a"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "api", "served", "paths"),
    [
        ("TEXT:STRING", "EMBEDDING:FP32:384", "", "embeddings=EMBEDDING", ("/v1/embeddings",)),
        ("TEXT:STRING", "embeds:FP32:-1 LENGTH:INT32", "", "embeddings=embeds", ("/v1/embeddings",)),
        ("TEXT:STRING", "Y:FP32:384", "embeddings", "embeddings=Y", ("/v1/embeddings",)),
        ("TEXT:STRING", "PROBS:FP32:3", "", "classify=PROBS", ("/v1/classify",)),
        ("TEXT:STRING WEIGHT?:FP32", "SCORE:FP32", "", "classify=SCORE", ("/v1/classify",)),
        ("TEXT:STRING", "A:FP32 B:FP32", "", "none", ()),
        ("TEXT:STRING", "A:FP32 B:FP32", "classify=B", "classify=B", ("/v1/classify",)),
        ("Q:STRING D:STRING", "S:FP32", "", "rerank=S", ("/v1/rerank", "/v1/score", "/v2/rerank", "/rerank")),
        ("Q:STRING D:STRING", "S:FP32:2", "", "none", ()),
        ("TEXT:STRING", "PROBS:FP32:3", "none", "none", ()),
        ("TEXT:STRING WEIGHT:FP32", "SCORE:FP32", "", "none", ()),
        ("X:FP32:4", "Y:FP32", "", "none", ()),
        ("TEXT:STRING", "Y:FP64 Z:FP32:2:2", "", "none", ()),
        ("prompt:STRING", "generated_text:STRING", "", "language", CHATS),
        (
            "text_input:STRING messages?:STRING stream?:BOOL",
            "text_output:STRING finish_reason:STRING",
            "",
            "language",
            CHATS,
        ),
        (TEXT, "text_output:STRING finish_reason:STRING", "", "none", ()),
        ("text_input:STRING sampling_parameters:STRING", "text_output:STRING", "", "language", ("/v1/completions",)),
        (
            "text_input:STRING max_tokens:INT32 beam_width?:INT32",
            "text_output:STRING:-1",
            "",
            "language",
            ("/v1/completions",),
        ),
        ("text_input:STRING", "text_output:STRING", "", "none", ()),
    ],
)
def test_what_tensors_serve(inputs: str, outputs: str, api: str, served: str, paths: tuple[str, ...]) -> None:
    found = find_served(make(inputs, outputs, api))
    assert (str(found), found.paths) == (served, paths)


def test_an_example_has_what_the_model_needs() -> None:
    spec = make("text_input:STRING max_tokens:INT32 beam_width?:INT32", "text_output:STRING").spec
    wanted = {"model": "a", "prompt": "Once upon a time"}
    assert make_body("/v1/completions", "a", spec) == {**wanted, "max_tokens": 20}
    assert make_body("/v1/completions", "a", make("text_input:STRING max_tokens?:INT32", "Y:FP32").spec) == wanted
    assert make_body("/v1/completions", "a", None) == wanted


@pytest.mark.parametrize(
    ("api", "words"),
    [
        ("clasify", "'clasify', which is none of language, embeddings, classify, rerank, none. Did you mean classify?"),
        ("=A", "'=A', whose kind has no output to name. Write classify."),
        ("none=A", "'none=A', whose kind has no output to name. Write none."),
        ("classify=SCORE", "'classify=SCORE', and no output SCORE. Known: A, B, N."),
        ("classify=N", "'classify=N', and N is not an output of TYPE_FP32 with one dimension"),
        ("embeddings", "'embeddings', and several outputs of TYPE_FP32: A, B. Name one: embeddings=A"),
        ("rerank=A", "'rerank=A', but not two inputs of TYPE_STRING [1] for an output of [1]. Give it a query"),
        (
            "language",
            "'language', and not the tensors of a language model. Give it those of one: stream and text_input -> ",
        ),
    ],
)
def test_an_api_that_does_not_fit(api: str, words: str) -> None:
    with pytest.raises(ArtifactError) as refused:
        find_served(make("TEXT:STRING", "A:FP32:2 B:FP32 N:STRING", api))
    assert f"a has the parameter api {words}" in str(refused.value)


STEP = 'backend: "python" max_batch_size: 4 '
TENSORS = [  # kinds of the last step and of the one before it, name of the output, and what the ensemble serves
    ("embeddings", "", "OUTPUT__0", "embeddings=OUTPUT__0"),
    ("embeddings=Y", "", "VECTOR", "embeddings=VECTOR"),
    ("embeddings=Y", "classify", "VECTOR", "embeddings=VECTOR"),
    ("classify", "", "embedded_classes", "classify=embedded_classes"),
    ("", "embeddings", "SCORE", "classify=SCORE"),
    ("none", "", "TOP_SCORES", "none"),
    ("none", "classify", "TOP_SCORES", "none"),
]


@pytest.mark.parametrize(("last", "first", "name", "served"), TENSORS)
@pytest.mark.parametrize("depth", [0, 2])
def test_an_ensemble_serves_what_its_steps_say(last: str, first: str, name: str, served: str, depth: int) -> None:
    """Whatever its output's name is; also through ensembles within each other."""

    def ensemble(steps: str, output: str) -> str:
        return f"""
            platform: "ensemble" max_batch_size: 4
            input {{ name: "TEXT" data_type: TYPE_STRING dims: 1 }}
            output {{ name: "{output}" data_type: TYPE_FP32 dims: 3 }}
            ensemble_scheduling {{ {steps} }}
        """

    def step(model: str, inputs: str, outputs: str) -> str:
        maps = (f'{kind}_map {{ key: "{each.split(":")[0]}" value: "{each.split(":")[1]}" }}' for kind, each in (
            ("input", inputs), ("output", outputs),
        ))  # fmt: skip
        return f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'

    numbers = 'input { name: "X" data_type: TYPE_FP32 dims: 3 } output { name: "Y" data_type: TYPE_FP32 dims: 3 }'
    texts = numbers.replace("TYPE_FP32", "TYPE_STRING", 1).replace("dims: 3", "dims: 1", 1)
    found = make_configs(
        first=STEP + texts + (parameter("api", first) if first else ""),
        last=STEP + numbers + (parameter("api", last) if last else ""),
        outer0=ensemble(step("first", "X:TEXT", "Y:t") + step("last", "X:t", f"Y:{name}"), name),
        outer1=ensemble(step("outer0", "TEXT:TEXT", f"{name}:M"), "M"),
        outer2=ensemble(step("outer1", "TEXT:TEXT", f"M:{name}"), name),
    )
    assert str(find_served(found[f"outer{depth}"], found)) == served
    assert str(find_served(found["last"], found)) == "none"


@pytest.mark.parametrize(("more", "served"), [("", "none"), (parameter("api", "classify"), "classify=Logits")])
def test_logits_are_no_probabilities(more: str, served: str) -> None:
    """A softmax after them makes some: `shoal new pipeline ... --step softmax`."""
    texts = (
        'input { name: "TEXT" data_type: TYPE_STRING dims: 1 } output { name: "Logits" data_type: TYPE_FP32 dims: 3 }'
    )
    found = make_configs(a=STEP + texts + more)
    assert str(find_served(found["a"], found)) == served


def test_sorted_scores_do_not_hide_the_scores_of_all_classes() -> None:
    model = STEP + "".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: 3 }} '
        for kind, name in (("input", "X"), ("output", "PROBS"), ("output", "TOP"))
    )
    maps = 'input_map { key: "X" value: "TEXT" } output_map { key: "NAME" value: "NAME" }'
    found = make_configs(
        a=model,
        b=model + parameter("api", "none"),
        both=f"""
            platform: "ensemble" max_batch_size: 4
            input {{ name: "TEXT" data_type: TYPE_STRING dims: 1 }}
            output {{ name: "PROBS" data_type: TYPE_FP32 dims: 3 }}
            output {{ name: "TOP" data_type: TYPE_FP32 dims: 3 }}
            ensemble_scheduling {{
              step {{ model_name: "a" model_version: -1 {maps.replace("NAME", "PROBS")} }}
              step {{ model_name: "b" model_version: -1 {maps.replace("NAME", "TOP")} }}
            }}
        """,
    )
    assert str(find_served(found["both"], found)) == "classify=PROBS"


@pytest.mark.parametrize(("name", "kind"), [("top_k", "none"), ("label", "none"), ("l2_normalise", "embeddings")])
def test_what_components_of_the_library_say(name: str, kind: str) -> None:
    config = read_config(ROOT / "postprocess" / name)
    assert config.api == kind
    assert str(find_served(config)) == "none"


def test_numbers_need_one_answer_for_each_row() -> None:
    assert find_served(make("TEXT:STRING", "A:FP32", rows=0)).api is Api.NONE
    with pytest.raises(ArtifactError, match="and its max_batch_size is 0"):
        find_served(make("TEXT:STRING", "A:FP32", "classify", rows=0))
    with pytest.raises(ArtifactError, match="and needs the inputs TEXT, WEIGHT"):
        find_served(make("TEXT:STRING WEIGHT:FP32", "A:FP32", "classify"))


def test_labels(tmp_path: Path) -> None:
    config = replace(make("TEXT:STRING", "A:FP32:2"), folder=tmp_path / "a")
    config.message.output[0].label_filename = "some.txt"
    served = find_served(config)
    (tmp_path / "a").mkdir()
    with pytest.raises(ArtifactError, match=r"a: its label_filename some\.txt cannot be read: No such file"):
        read_labels(config, served)
    for content, found in ((b"calm\r\nglad\r\n", ("calm", "glad")), ("für\nwider".encode(), ("für", "wider"))):
        (tmp_path / "a" / "some.txt").write_bytes(content)
        assert read_labels(config, served) == found
    (tmp_path / "a" / "some.txt").write_bytes(b"calm\n")
    with pytest.raises(ArtifactError, match=r"a: A has 2 classes, and some\.txt 1 labels"):
        read_labels(config, served)
    assert read_labels(config, served._replace(api=Api.EMBEDDINGS)) == ()


def test_an_ensemble_has_the_labels_of_its_steps(tmp_path: Path) -> None:
    """Its own file comes first; a file outside of the model's folder, or one that is missing, is not copied."""

    def ensemble(step: str, name: str) -> str:
        return f"""
            platform: "ensemble" max_batch_size: 4
            input {{ name: "TEXT" data_type: TYPE_STRING dims: 1 }}
            output {{ name: "Y" data_type: TYPE_FP32 dims: 2 {name} }}
            ensemble_scheduling {{ step {{ model_name: "{step}" model_version: -1
              input_map {{ key: "TEXT" value: "TEXT" }} output_map {{ key: "Y" value: "Y" }} }} }}
        """

    model = 'backend: "python" max_batch_size: 4 output { name: "Y" data_type: TYPE_FP32 dims: 2 label_filename: "%s" }'
    found = make_configs(
        a=model % "some.txt", inner=ensemble("a", ""), outer=ensemble("inner", ""), b=model % "../a/some.txt",
        own=ensemble("a", 'label_filename: "own.txt"'), c=model % "none.txt",
    )  # fmt: skip
    configs = {name: replace(config, folder=tmp_path / name) for name, config in found.items()}
    for file in ("a/some.txt", "own/own.txt", "b/x", "c/x"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("calm\nglad\n", encoding="utf-8")
    labels = {name: find_labels(config, configs) for name, config in configs.items()}
    inherited = {"Y": ("labels-0.txt", tmp_path / "a" / "some.txt")}
    assert labels == {
        "a": {"Y": ("some.txt", tmp_path / "a" / "some.txt")}, "inner": inherited, "outer": inherited, "b": {}, "c": {},
        "own": {"Y": ("own.txt", tmp_path / "own" / "own.txt")},
    }  # fmt: skip

"""``shoal serve MODEL`` in an empty folder: the answers are those of the model's own library."""

from __future__ import annotations

import json
import shlex
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, save
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForSequenceClassification
from xgboost import XGBClassifier

import shoal
from shoal.clients.client.operators import read_states
from shoal.kit.encoders.encoder import _locate
from shoal.kit.encoders.packaged import SMALL_ENCODER
from shoal.lab.tiny_llm import make_tiny
from tests.support.encoders import embed
from tests.support.gguf_files import write_gguf
from tests.support.service import Service

TEXTS = ["The cat sat on the mat.", "A red fish swims below the quiet sea."]
ROWS = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def post(service: Service, path: str, **body: Any) -> Any:
    url, content = f"http://{service.http}{path}", json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, content, {"Content-Type": "application/json"})) as reply:
        return json.load(reply)


def type_printed(service: Service, word: str) -> Any:
    """Type the first command with ``word`` that the service prints; its answer, as JSON."""
    assert service.process.stdout is not None
    line = next(line for line in service.process.stdout if word in line)
    run = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_a_file_in_onnx_twice() -> None:
    weights = helper.make_tensor("w", TensorProto.FLOAT, [4, 3], np.arange(12, dtype=np.float32).tolist())
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", n]) for name, n in (("x", 4), ("y", 3))]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "net", tensors[:1], tensors[1:], [weights]
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "net.onnx")
    logs = [Path("first"), Path("second")]
    for log in logs:
        with Service(Path("net.onnx"), log) as service, shoal.Client(service.grpc) as client:
            answer = client.infer("net", {"x": ROWS})["y"]
            assert read_states(service.metrics) == [("net", "ready", 0)]
        np.testing.assert_allclose(answer, ROWS @ np.arange(12, dtype=np.float32).reshape(4, 3), rtol=1e-6)
    lines = [line.strip() for line in logs[0].read_text(encoding="utf-8").splitlines() if line.startswith("  shoal ")]
    assert lines == [
        "shoal add-model net.onnx net --project build/net",
        "shoal compose net build/net/repository --project build/net",
        "shoal serve build/net/repository",
    ]
    assert "made by these commands" not in logs[1].read_text(encoding="utf-8")


def test_a_forest() -> None:
    model = XGBClassifier(n_estimators=5, max_depth=3).fit(ROWS, [0, 1, 2, 0, 1])
    model.save_model("trees.json")
    with Service(Path("trees.json"), Path("log")) as service, shoal.Client(service.grpc) as client:
        answer = client.infer("trees", {"input__0": ROWS})["output__0"]
        for body in ({"instances": ROWS.tolist()}, {"inputs": {"input__0": ROWS.tolist()}}):  # of KServe's own examples
            predictions = post(service, "/v1/models/trees:predict", **body)["predictions"]
            np.testing.assert_allclose([row["output__0"] for row in predictions], answer, rtol=1e-6)
    np.testing.assert_allclose(answer, model.predict_proba(ROWS), atol=1e-6)


def test_an_encoder_of_sentence_transformers() -> None:
    place = _locate(SMALL_ENCODER, None)[0]
    with Service(Path(place), Path("log"), "--name", "minilm") as service:
        answer = post(service, "/v1/embeddings", model="minilm", input=TEXTS, truncate="NONE")
        many = post(service, "/v1/embeddings", model="minilm", input=["A cat.", *["a " * 300] * 600])
        assert len(type_printed(service, "curl")["data"][0]["embedding"]) == 384
    tokens = AutoTokenizer.from_pretrained(place)(TEXTS, padding=True, return_tensors="pt")
    number = int(tokens["attention_mask"].sum())
    assert answer["usage"] == {"prompt_tokens": number, "total_tokens": number}
    assert "warnings" not in answer
    assert many["usage"]["prompt_tokens"] == 5 + 600 * 256
    assert many["warnings"] == [
        "The model reads at most 256 tokens of a row, and these have as many or more: "
        "input[1], input[2], input[3] and 597 more."
    ]
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(place)(**tokens).last_hidden_state
    wanted = embed(hidden, tokens["attention_mask"].numpy(), "mean", is_normalised=True)
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], wanted, atol=1e-5)


def test_a_classifier_with_its_labels() -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(_locate(SMALL_ENCODER, None)[0])
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    names = {0: "sea", 1: "sky", 2: "land"}
    config = BertConfig(**sizes, id2label=names, label2id={name: number for number, name in names.items()})
    model = BertForSequenceClassification(config).eval()
    for each in (model, tokenizer):
        each.save_pretrained("topics")
    with Service(Path("topics"), Path("log")) as service:
        answer = post(service, "/v1/classify", model="topics", input=TEXTS)
        assert len(type_printed(service, "curl")["data"][0]["probs"]) == 3
    with torch.inference_mode():
        wanted = model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits.softmax(-1).numpy()
    np.testing.assert_allclose([each["probs"] for each in answer["data"]], wanted, atol=1e-5)
    assert [each["label"] for each in answer["data"]] == [names[row.argmax()] for row in wanted]


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
def test_a_cross_encoder(activation: str) -> None:
    """As CrossEncoder of sentence-transformers scores: pairs with their segments, and the activation of its files."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(_locate(SMALL_ENCODER, None)[0])
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 1}
    config = BertConfig(**sizes, intermediate_size=64, initializer_range=0.5)
    model = BertForSequenceClassification(config).eval()
    for each in (model, tokenizer):
        each.save_pretrained("ranker")
    path = Path("ranker/config.json")
    more = {"version": "5.0.0", "activation_fn": f"torch.nn.modules.linear.{activation}"}
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "sentence_transformers": more}), "utf-8")
    documents = [*TEXTS, "A cat. " * 600, ""]
    with Service(Path("ranker"), Path("log")) as service:
        asked = {"model": "ranker", "query": "a cat", "documents": documents}
        answer = post(service, "/v1/rerank", **asked, max_tokens_per_doc=4096, truncate="END")
        refusals: list[tuple[str, dict[str, Any]]] = [
            ("documents[2]", {"truncate": "NONE"}), ("max_tokens_per_doc", {"max_tokens_per_doc": 100}),
        ]  # fmt: skip
        for place, wrong in refusals:
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(service, "/v1/rerank", **asked, **wrong)
            assert json.loads(refused.value.read())["error"]["param"] == place
        assert len(type_printed(service, "curl")["results"]) == 2
    pairs = tokenizer(["a cat"] * 4, documents, padding=True, truncation=True, return_tensors="pt", max_length=512)
    with torch.inference_mode():
        wanted = model(**pairs).logits[:, 0]
    wanted = wanted.sigmoid() if activation == "Sigmoid" else wanted
    assert answer["usage"]["prompt_tokens"] == int(pairs["attention_mask"].sum())
    assert answer["warnings"][0].endswith(" have as many or more: documents[2].")
    scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
    np.testing.assert_allclose([scores[index] for index in range(4)], wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_language_model_under_its_own_name(kind: str) -> None:
    make_tiny(Path("tiny"), steps=20)
    typed = Path("tiny")
    if kind == "gguf":
        for library in ("gguf", "accelerate"):
            pytest.importorskip(library, reason="transformers reads GGUF with it")
        typed = write_gguf(typed, Path("tiny.gguf"))
    with Service(typed, Path("log")) as service:
        answer = post(service, "/v1/completions", model="tiny", prompt=TEXTS[0], max_tokens=8, temperature=0)
        assert type_printed(service, "curl")["choices"][0]["message"]["role"] == "assistant"
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model: Any = AutoModelForCausalLM.from_pretrained("tiny")
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    made = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert answer["choices"][0]["text"] == tokenizer.decode(made, skip_special_tokens=True)

"""Repositories typed by hand as articles about Triton have them: served as they are, and their mistakes found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import shoal
from shoal.authoring.check.families import check
from shoal.authoring.repository.manifest import MANIFEST
from shoal.clients.client.client import Client
from shoal.lab.tiny_llm import make_tiny
from tests.support.service import Service

TEXTS = ["The cat sat.", "It is nonetheless imperative that epistemology be considered."]
# --- an ensemble of a tokenizer, BERT, a forest and their average ---------------------------------------------------

HOST_INPUTS = """parameters: {
 key: "FORCE_CPU_ONLY_INPUT_TENSORS"
 value: {
   string_value:"no"
 }
}
"""
READABILITY = {
    "preprocess": f"""name: "preprocess"
backend: "python"
max_batch_size: 512
input [ {{ name: "INPUT0" data_type: TYPE_STRING dims: [ -1 ] }} ]
output [
  {{ name: "BERT_IDS" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "BERT_AM" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "TREE_FEATS" data_type: TYPE_FP32 dims: [ 207 ] }}
]
instance_group[{{kind:KIND_CPU}}]
{HOST_INPUTS}""",
    "bert-large": """backend: "pytorch"
max_batch_size: 512
input [
  { name: "INPUT__0" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "INPUT__1" data_type: TYPE_INT64 dims: [ -1 ] }
]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group[{kind:KIND_CPU}]
""",
    "cuml": """backend: "fil"
max_batch_size: 512
input [ { name: "input__0" data_type: TYPE_FP32 dims: [ 207 ] } ]
output [ { name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group[{kind:KIND_CPU}]
parameters {
    key: "model_type"
    value: { string_value: "treelite_checkpoint" }
}
parameters {
    key: "output_class"
    value: { string_value: "false" }
}
""",
    "postprocess": f"""name: "postprocess"
backend: "python"
max_batch_size: 512
input [
  {{ name: "BERT_WEIGHT_INPUT" data_type: TYPE_FP32 dims: [ -1 ] }},
  {{ name: "BERT_LARGE_SCORE" data_type: TYPE_FP32 dims: [ 1 ] }},
  {{ name: "CUML_SCORE" data_type: TYPE_FP32 dims: [ 1 ] }}
]
output [
  {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }},
  {{ name: "BERT_SCORE" data_type: TYPE_FP32 dims: [ 1 ] }},
  {{ name: "FOREST_SCORE" data_type: TYPE_FP32 dims: [ 1 ] }}
]
instance_group[{{kind:KIND_CPU}}]
{HOST_INPUTS}""",
    "ensemble_all": """name: "ensemble_all"
platform: "ensemble"
max_batch_size: 512
input [
  {
    name: "excerpt"
    data_type: TYPE_STRING
    dims: [ -1 ]
  },
  {
    name: "BERT_WEIGHT"
    data_type: TYPE_FP32
    dims: [ -1 ]
  }
]
output {
    name: "SCORE"
    data_type: TYPE_FP32
    dims: [ 1 ]
  }
ensemble_scheduling {
  step [
    {
      model_name: "preprocess"
      model_version: 1
      input_map {
        key: "INPUT0"
        value: "excerpt"
      }
      output_map {
        key: "BERT_IDS"
        value: "bert_input_ids",
      }
      output_map {
        key: "BERT_AM"
        value: "bert_attention_masks",
      }
      output_map {
        key: "TREE_FEATS"
        value: "tree_feats",
      }
    },
    {
      model_name: "bert-large"
      model_version: 1
      input_map { key: "INPUT__0" value: "bert_input_ids" }
      input_map { key: "INPUT__1" value: "bert_attention_masks" }
      output_map { key: "OUTPUT__0" value: "bert_large_score" }
    },
    {
      model_name: "cuml"
      model_version: 1
      input_map { key: "input__0" value: "tree_feats" }
      output_map { key: "output__0" value: "cuml_score" }
    },
    {
      model_name: "postprocess"
      model_version: 1
      input_map { key: "BERT_WEIGHT_INPUT" value: "BERT_WEIGHT" }
      input_map { key: "BERT_LARGE_SCORE" value: "bert_large_score" }
      input_map { key: "CUML_SCORE" value: "cuml_score" }
      output_map { key: "OUTPUT0" value: "SCORE" }
    }
  ]
}
""",
}


def test_the_readability_article(repository: Path, tmp_path: Path) -> None:
    """Its four configurations and the ensemble give the scores of the composed repository."""
    hand = shutil.copytree(repository, tmp_path / "r", ignore=shutil.ignore_patterns(MANIFEST, "warmup"))
    for name, text in READABILITY.items():
        (hand / name / "config.pbtxt").write_text(text, encoding="utf-8")
    (hand / "ensemble_all" / "1" / "empty").touch()
    assert [finding for finding in check(hand, target="embedded") if finding.severity == "error"] == []
    weights = [0.5, 0.9]
    with shoal.load(repository / "ensemble_all") as composed, shoal.load(hand / "ensemble_all") as here:
        expected = composed(excerpt=TEXTS, BERT_WEIGHT=weights)["SCORE"]
        mine = here(excerpt=[[t] for t in TEXTS], BERT_WEIGHT=[[w] for w in weights])["SCORE"]
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)  # rows of all lengths together
    with Service(hand, tmp_path / "log") as service, Client(service.grpc) as client:
        answer = client.infer("ensemble_all", excerpt=[[t] for t in TEXTS], BERT_WEIGHT=[[w] for w in weights])
    assert np.array_equal(answer["SCORE"], mine)
    config = hand / "ensemble_all" / "config.pbtxt"  # the article's own line, which no release of today loads
    config.write_text(READABILITY["ensemble_all"].replace('platform: "ensemble"', 'backend: "ensemble"'), "utf-8")
    assert "ensemble-backend" in {finding.rule.id for finding in check(hand)}


# --- a language model in Python, and a tokenizer before an ONNX model ------------------------------------------------

LLAMA = """import json
import triton_python_backend_utils as pb_utils
import numpy as np
import torch
from transformers import AutoTokenizer, AutoModelForCausalLM


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = AutoTokenizer.from_pretrained("{weights}")
        self.model = AutoModelForCausalLM.from_pretrained("{weights}", dtype=torch.float32)
        self.model.resize_token_embeddings(len(self.tokenizer))

    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = pb_utils.get_input_tensor_by_name(request, "prompt")
            inputs = inputs.as_numpy()
            prompts = [i.decode() for i in inputs.reshape(-1)]
            self.tokenizer.padding_side = "left"
            inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to("cpu")
            output_sequences = self.model.generate(**inputs, do_sample=False, max_length=40)
            output = self.tokenizer.batch_decode(output_sequences, skip_special_tokens=True)
            responses.append(
                pb_utils.InferenceResponse(
                    output_tensors=[
                        pb_utils.Tensor("generated_text", np.array([o.encode() for o in output], np.object_))
                    ]
                )
            )
        return responses

    def finalize(self):
        self.generator = None
"""
TOKENIZER = """import os
from typing import Dict, List

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer, PreTrainedTokenizer, TensorType


class TritonPythonModel:
    tokenizer: PreTrainedTokenizer

    def initialize(self, args: Dict[str, str]) -> None:
        path: str = os.path.join(args["model_repository"], args["model_version"])
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def execute(self, requests) -> "List[List[pb_utils.Tensor]]":
        responses = []
        for request in requests:
            query = [
                t.decode("UTF-8")
                for t in pb_utils.get_input_tensor_by_name(request, "prompt").as_numpy().tolist()
            ]
            tokens: Dict[str, np.ndarray] = self.tokenizer(text=query, return_tensors=TensorType.NUMPY)
            tokens = {k: v.astype(np.int64) for k, v in tokens.items()}
            outputs = list()
            for input_name in ("input_ids", "attention_mask"):
                tensor_input = pb_utils.Tensor(input_name, tokens[input_name])
                outputs.append(tensor_input)
            inference_response = pb_utils.InferenceResponse(output_tensors=outputs)
            responses.append(inference_response)
        return responses
"""
IDS = (
    '{ name: "input_ids" data_type: TYPE_INT64 dims: [-1, -1] },'
    ' { name: "attention_mask" data_type: TYPE_INT64 dims: [-1, -1] }'
)
CHAT = {
    "llamav2": """name: "llamav2"
backend: "python"
input [ { name: "prompt" data_type: TYPE_STRING dims: [1] } ]
output [ { name: "generated_text" data_type: TYPE_STRING dims: [1] } ]
instance_group [ { kind: KIND_CPU } ]
""",
    "ensemble_model": """name: "ensemble_model"
max_batch_size: 0
platform: "ensemble"
input [ { name: "prompt" data_type: TYPE_STRING dims: [-1] } ]
output [ { name: "output_0" data_type: TYPE_FP32 dims: [-1, 2] } ]
ensemble_scheduling { step [
  { model_name: "tokenizer" model_version: -1
    input_map { key: "prompt" value: "prompt" }
    output_map [ { key: "input_ids" value: "input_ids" }, { key: "attention_mask" value: "attention_mask" } ] },
  { model_name: "model" model_version: -1
    input_map [ { key: "input_ids" value: "input_ids" }, { key: "attention_mask" value: "attention_mask" } ]
    output_map { key: "output_0" value: "output_0" } }
] }
""",
    "model": f"""name: "model"
platform: "onnxruntime_onnx"
backend: "onnxruntime"
default_model_filename: "llamav2.onnx"
max_batch_size: 0
input [ {IDS} ]
output [ {{ name: "output_0" data_type: TYPE_FP32 dims: [-1, 2] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
""",
    "tokenizer": f"""name: "tokenizer"
max_batch_size: 0
backend: "python"
input [ {{ name: "prompt" data_type: TYPE_STRING dims: [-1] }} ]
output [ {IDS} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
""",
}


def save_counts(path: Path) -> None:
    """Two numbers for each text: its tokens, and the sum of their ids."""
    made = onnx.helper.make_tensor_value_info
    ids, mask = (made(name, onnx.TensorProto.INT64, ["n", "m"]) for name in ("input_ids", "attention_mask"))
    out = made("output_0", onnx.TensorProto.FLOAT, ["n", 2])
    nodes = [
        onnx.helper.make_node("ReduceSum", [name, "axis"], [f"{name}_sum"], keepdims=1)
        for name in ("attention_mask", "input_ids")
    ]
    nodes += [
        onnx.helper.make_node("Concat", ["attention_mask_sum", "input_ids_sum"], ["both"], axis=1),
        onnx.helper.make_node("Cast", ["both"], ["output_0"], to=onnx.TensorProto.FLOAT),
    ]
    axis = onnx.helper.make_tensor("axis", onnx.TensorProto.INT64, [1], [1])
    graph = onnx.helper.make_graph(nodes, "g", [ids, mask], [out], [axis])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9), str(path))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("weights") / "llama", hidden=32, layers=1)


@pytest.fixture
def chat(weights: Path, tmp_path: Path) -> Path:
    root = tmp_path / "model_repository"
    for name, text in CHAT.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(text, encoding="utf-8")
    (root / "llamav2" / "1" / "model.py").write_text(LLAMA.replace("{weights}", str(weights)), encoding="utf-8")
    (root / "tokenizer" / "1" / "model.py").write_text(TOKENIZER, encoding="utf-8")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(weights / name, root / "tokenizer" / "1" / name)
    save_counts(root / "model" / "1" / "llamav2.onnx")
    return root


def test_the_language_model_article(chat: Path, weights: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    assert [finding for finding in check(chat, target="embedded") if finding.severity == "error"] == []
    tokenizer, text = AutoTokenizer.from_pretrained(weights), "Onde fica o Uruguai?"
    ids = tokenizer(text).input_ids
    with Service(chat, tmp_path / "log", "--expose", "llamav2") as service, Client(service.grpc) as client:
        answer = client.infer("ensemble_model", prompt=[text])
        assert answer["output_0"].tolist() == [[len(ids), sum(ids)]]
        said = client.infer("llamav2", prompt=[text])["generated_text"]
    assert said.shape == (1,)
    assert said[0].decode().startswith(text)
    assert np.array_equal(
        shoal.load(chat / "model")(input_ids=[ids], attention_mask=[[1] * len(ids)])["output_0"], answer["output_0"]
    )


def test_the_article_s_own_mistakes(chat: Path) -> None:
    code = chat / "tokenizer" / "1" / "model.py"
    code.write_text(TOKENIZER.replace('request, "prompt"', 'request, "TEXT"'), encoding="utf-8")
    ensemble = chat / "ensemble_model" / "config.pbtxt"
    ensemble.write_text(CHAT["ensemble_model"].replace('"output_0" value: "output_0"', '"output_0"'), encoding="utf-8")
    (chat / "vllm" / "1").mkdir(parents=True)
    (chat / "vllm" / "1" / "model.py").write_text(LLAMA, encoding="utf-8")
    (chat / "vllm" / "config.pbtxt").write_text(
        'name: "vllm"\nbackend: "python"\nmax_batch_size: 0\nmodel_transaction_policy { decoupled: True }\n'
        'input [ { name: "PROMPT" data_type: TYPE_STRING dims: [-1] } ]\n'
        'output [ { name: "generated_text" data_type: TYPE_STRING dims: [-1] } ]\n'
        "instance_group [ { count: 1 kind: KIND_MODEL } ]\n",
        encoding="utf-8",
    )
    arguments = {"model": "meta-llama/llama-2-7b-chat-hf", "disable_log_requests": "true"}
    (chat / "vllm" / "vllm_engine_args.json").write_text(json.dumps(arguments), encoding="utf-8")
    found = {(finding.rule.id, finding.place.path) for finding in check(chat)}
    assert ("reads-unknown-input", code) in found
    assert ("ensemble-output-unwritten", ensemble) in found
    assert ("engine-args-removed", chat / "vllm" / "vllm_engine_args.json") in found

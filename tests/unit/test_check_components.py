"""Refusals of shoal's components at their start are found offline, by the components' own code."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from google.protobuf import text_format

import shoal
from shoal.authoring.check.findings import Finding
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.loading import component_class
from shoal.errors import ShoalError
from shoal.kit.component.context import Context
from shoal.lab.tiny_llm import make_tiny
from tests.support.once import ROOT, once

VOCABULARY = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 17209920\n"
ZSCORE = {"mean": [1.0, 2.0], "std": [0.5, 1.0]}
# Component: artifacts that it needs, and parameters that are valid.
VALID: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "preprocess/checked_text": ({}, {"max_text_bytes": "9", "threads": "2", "hang_seconds": "3"}),
    "preprocess/image": ({}, {"mean": "[0, 0.5, 1]", "std": "[1, 2, 3]", "interpolation": "bicubic", "resize": "0"}),
    "preprocess/prompt": (
        {},
        {"template": "llama2", "tool_form": "hermes", "max_tokens": "9", "context": "64", "chat_template_kwargs": "{}"},
    ),
    "preprocess/preprocessing": ({}, {"template": "llama2", "exclude_input_in_output": "false"}),
    "preprocess/tokenizer": ({"vocab.txt": VOCABULARY}, {"max_length": "16", "lowercase": "false"}),
    "preprocess/word_counts": (
        {"words.txt": "mean\n.\n", "stop_words.txt": "a\n"},
        {"value": "share", "statistics": "true", "max_text_bytes": "100"},
    ),
    "preprocess/zscore": ({"zscore.json": json.dumps(ZSCORE)}, {}),
    "postprocess/blend": ({}, {"weights": "[1, 0.5]"}),
    "postprocess/completion": ({}, {}),
    "postprocess/l2_normalise": ({}, {}),
    "postprocess/label": ({}, {"labels": '["low", "high"]', "least": "-1.5", "otherwise": "none"}),
    "postprocess/postprocessing": ({}, {}),
    "postprocess/readability": ({"postprocess.json": '{"bert_weight": 0.5}'}, {}),
    "postprocess/softmax": ({}, {}),
    "postprocess/threshold": ({}, {"threshold": "0.25"}),
    "postprocess/top_k": ({}, {"k": "2", "labels": '["a", "b", "c"]'}),
    "models/llamav2": ({}, {"temperature": "0.5", "top_k": "0", "dtype": "bfloat16", "quantize": "none", "seed": "3"}),
    "models/llm-hf": (
        {},
        {"slots": "2", "context": "64", "batching": "static", "dtype": "float16", "quantize": "none", "threads": "1"},
    ),
    "models/llm-onnx": ({}, {"slots": "4"}),
    "models/llm-openvino": ({}, {"dtype": "auto", "cache_tokens": "4096"}),
    "models/llm-vllm": ({}, {"dtype": "auto", "engine_args": '{"gpu_memory_utilization": 0.5}'}),
    "models/llm_bls": ({}, {"calls": "prompt engine"}),
    "models/tensorrt_llm_bls": ({}, {"calls": "preprocessing tensorrt_llm", "accumulate_tokens": "true"}),
}
SERVICES = {"threads", "hang_seconds", "public", "slots"}  # read by others than the component
# Component, what is planted (a parameter or a file), its value, words of the finding, and the line of it in a file.
PARAMETERS = [
    ("preprocess/checked_text", "max_text_bytes", "-1", "expected a whole number from 1"),
    ("preprocess/checked_text", "threads", "two", "expected a whole number from 1"),
    ("preprocess/checked_text", "hang_seconds", "-3", "expected a number of seconds"),
    ("preprocess/checked_text", "hang_seconds", "nan", "expected a number of seconds"),
    ("preprocess/checked_text", "public", "maybe", "expected false or true"),
    ("preprocess/checked_text", "slots", "x", "expected a whole number"),
    ("preprocess/image", "mean", "[1, 2]", "expected three numbers"),
    ("preprocess/image", "std", "[1, 0, 1]", "nothing can be divided by 0"),
    ("preprocess/image", "std", "high", "expected a JSON list of numbers"),
    ("preprocess/image", "interpolation", "nearest", "expected bilinear or bicubic"),
    ("preprocess/image", "resize", "8", "cannot be cut out of it"),
    ("preprocess/image", "max_pixels", "all", "expected a whole number"),
    ("preprocess/tokenizer", "max_length", "2", "expected a whole number from 3 to 65,536"),
    ("preprocess/tokenizer", "max_length", "1e3", "expected a whole number"),
    ("preprocess/tokenizer", "lowercase", "yes", "expected true or false"),
    ("preprocess/word_counts", "value", "tf-idf", "expected count or share or presence"),
    ("preprocess/word_counts", "statistics", "1", "expected false or true"),
    ("postprocess/label", "labels", "low high", "expected a JSON list of texts"),
    ("postprocess/label", "labels", '["low"]', "its parameter labels has 1"),
    ("postprocess/label", "least", "high", "expected a number"),
    ("postprocess/blend", "weights", "[1]", "expected 2 weights"),
    ("postprocess/blend", "weights", "[-1, 1]", "none negative"),
    ("postprocess/threshold", "threshold", "nan", "expected a number that FP32 can hold"),
    ("postprocess/top_k", "k", "0", "expected a whole number"),
    ("preprocess/prompt", "template", "mistral", "expected one of llama2, default"),
    ("preprocess/prompt", "tool_form", "xml", "expected one of hermes"),
    ("preprocess/prompt", "chat_template_kwargs", "thinking", "expected a JSON object"),
    ("preprocess/prompt", "chat_template_kwargs", '{"thinking": true}', "chat template does not read"),
    ("preprocess/prompt", "max_tokens", "0", "expected a whole number"),
    ("preprocess/prompt", "context", "-4", "expected a whole number from 0"),
    ("preprocess/prompt", "max_text_bytes", "1 MB", "expected a whole number"),
    ("preprocess/preprocessing", "exclude_input_in_output", "no", "expected true or false"),
    ("models/llamav2", "temperature", "warm", "expected a number that FP32 can hold"),
    ("models/llamav2", "top_p", "2", "top_p is 2.0"),
    ("models/llamav2", "dtype", "int8", "expected float32 or bfloat16 or float16"),
    ("models/llm-hf", "context", "-4", "expected a whole number from 1"),
    ("models/llm-hf", "context", "100000", "expected a whole number from 1 to"),
    ("models/llm-hf", "slots", "0.5", "expected a whole number"),
    ("models/llm-hf", "batching", "dynamic", "expected auto or continuous or static or single"),
    ("models/llm-hf", "dtype", "fp8", "expected auto or float32"),
    ("models/llm-hf", "quantize", "int3", "expected none or int8 or int4"),
    ("models/llm-hf", "cache_tokens", "all", "expected a whole number"),
    ("models/llm-openvino", "dtype", "int8", "expected auto or float32"),
    ("models/llm-vllm", "dtype", "int8", "expected auto or float32"),
    ("models/llm-vllm", "engine_args", "[]", "expected a JSON object of vLLM's arguments"),
    ("models/llm-vllm", "engine_args", '{"dtype": "half"}', "dtype is set by the parameter dtype"),
    ("models/llm_bls", "calls", "prompt engine completion", "expected 2 names"),
    ("models/tensorrt_llm_bls", "calls", "preprocessing", "expected 2 to 99 names"),
    ("models/tensorrt_llm_bls", "tensorrt_llm_model_name", "engine", "expected a model that calls names"),
    ("models/tensorrt_llm_bls", "tensorrt_llm_draft_model_name", "draft", "has one engine"),
]
FILES = [
    ("preprocess/tokenizer", "vocab.txt", VOCABULARY.replace("[UNK]\n", ""), "lacks [UNK]", 0),
    ("preprocess/tokenizer", "vocab.txt", VOCABULARY.replace("a\n", "\n"), "has a blank line", 6),
    ("preprocess/tokenizer", "vocab.txt", POINTER, "a pointer of Git LFS", 0),
    ("preprocess/word_counts", "words.txt", "mean\n\n.\n", "line 2 is blank", 2),
    ("preprocess/word_counts", "words.txt", "mean\nMean\n", "line 2 is 'Mean'", 2),
    ("preprocess/word_counts", "words.txt", "mean\nmean\n", "'mean' twice", 0),
    ("preprocess/word_counts", "stop_words.txt", "of the\n", "line 1 is 'of the'", 1),
    ("preprocess/zscore", "zscore.json", '{"mean": [1, 2], "std": [1, 0]}', "std of column 1 is 0", 0),
    ("preprocess/zscore", "zscore.json", '{"mean": [1, 2]}', "lacks std", 0),
    ("preprocess/zscore", "zscore.json", '{"mean": [1, 2], "std": [1]}', "mean has 2 entries and std 1", 0),
    ("postprocess/readability", "postprocess.json", '{"bert_weight": 1.5}', "1.5", 0),
]

CUT = chr(50) + "\0" * 7 + json.dumps({"a": {"dtype": "F32", "data_offsets": [0, 10]}}).ljust(50) + "7 bytes"
LAYERS = json.dumps({f"model.layers.{n}.w": {"dtype": "F32", "data_offsets": [0, 0]} for n in (0, 2)})
TWO = chr(len(LAYERS)) + "\0" * 7 + LAYERS
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
# Component; files of the weights folder, None if removed; the file of the finding; words of it; the line.
WEIGHTS: list[tuple[str, Mapping[str, str | None], str, str, int]] = [
    ("models/llm-hf", {"config.json": None}, "", "has no config.json", 0),
    ("models/llm-hf", {"config.json": '{\n "vocab_size": }'}, "config.json", "Expecting value", 2),
    ("models/llm-hf", {"config.json": '{"vocab_size": "many"}'}, "config.json", "vocab_size 'many'", 0),
    ("models/llm-hf", {"tokenizer.json": POINTER}, "tokenizer.json", "a pointer of Git LFS", 0),
    ("models/llm-hf", {"model.safetensors": POINTER}, "model.safetensors", "a pointer of Git LFS", 0),
    ("models/llm-hf", {"model.safetensors": "none"}, "model.safetensors", "does not begin as safetensors", 0),
    ("models/llm-hf", {"model.safetensors": CUT}, "model.safetensors", "it has 65 of its 68 bytes", 0),
    ("models/llm-hf", {"model.safetensors": "\2\0\0\0\0\0\0\0{x"}, "model.safetensors", "tensors is cut or damaged", 0),
    ("models/llm-hf", {"model.safetensors": TWO, "config.json": '{"vocab_size": 9, "n_layer": 3}'}, "",
     "lacks the weights of layer 1", 0),
    ("models/llm-hf", {"model.safetensors": None, "model.bin": "x"}, "", "weights only as pickles", 0),
    ("models/llm-hf", {"model-1.safetensors": "12345678{", "model.safetensors.index.json": INDEX}, "",
     "misses model-2.safetensors", 0),
    ("models/llm-openvino", {"generation_config.json": '{"eos_token_id": 99999}'}, "", "eos_token_id 99999", 0),
    ("models/llamav2", {"tokenizer.json": "{}"}, "tokenizer.json", "it has no vocabulary", 0),
    ("models/llm_bls", {"tokenizer.json": POINTER}, "tokenizer.json", "a pointer of Git LFS", 0),
    ("postprocess/completion", {"tokenizer.json": None}, "", "tokenizer of Hugging Face's: it is missing", 0),
    ("postprocess/postprocessing", {"tokenizer_config.json": "[]"}, "tokenizer_config.json", "expected an object", 0),
    ("preprocess/prompt", {"config.json": None}, "", "config.json is not a model configuration: it is missing", 0),
    ("preprocess/prompt", {"chat_template.jinja": "{% if %}"}, "chat_template.jinja", "chat template is not valid", 1),
    ("preprocess/preprocessing", {"chat_template.jinja": "{{ x | none }}"}, "chat_template.jinja", "is not valid", 1),
]  # fmt: skip


def weights() -> Path:
    return once("untrained-llm", make_tiny, depends_on=[ROOT / "src" / "shoal" / "lab" / "tiny_llm.py"])


def make(place: Path, name: str, parameters: Mapping[str, str] = {}, files: Mapping[str, str] = {}) -> Path:
    """Write a repository with one component, whose parameters and files are valid but for those given."""
    source, (needed, valid) = ROOT / name, VALID[name]
    folder = place / source.name
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    message = read_config(source).message
    given = {**({"model": str(weights())} if "model" in message.parameters else {}), **valid, **(parameters or {})}
    for key, value in given.items():
        message.parameters[key].string_value = value
    for tensor in [*message.input, *message.output]:
        if source.name in ("zscore", "label") and [*tensor.dims] == [-1]:
            tensor.dims[:] = [2]
    message.name = source.name
    (folder / "config.pbtxt").write_text(text_format.MessageToString(message), encoding="utf-8")
    for file, text in {**needed, **(files or {})}.items():
        (folder / "1" / file).write_text(text, encoding="utf-8")
    return place


def find(root: Path) -> list[Finding]:
    """Return the findings that are neither advice nor about the models that this one calls."""
    found = [finding for finding in shoal.check(root) if finding.severity != "advice"]
    return [finding for finding in found if finding.rule.id not in ("member-missing", "calls-unknown")]


def refuse(root: Path, name: str) -> ShoalError:
    """Return the error with which the component itself does not start."""
    config = read_config(root / Path(name).name)
    kind, folder = component_class(ROOT / name / "1" / "model.py"), config.folder / "1"
    with pytest.raises(ShoalError) as raised:
        kind(Context(config.spec, folder))
    return raised.value


@pytest.mark.usefixtures("may_start_processes")
@pytest.mark.parametrize("name", VALID)
def test_valid_values_and_files_give_no_finding(name: str, tmp_path: Path) -> None:
    assert not find(make(tmp_path, name))


@pytest.mark.usefixtures("may_start_processes")
@pytest.mark.parametrize(("name", "parameter", "value", "words"), PARAMETERS)
def test_a_wrong_value_is_found_in_its_line(name: str, parameter: str, value: str, words: str, tmp_path: Path) -> None:
    root = make(tmp_path, name, {parameter: value, **({"template": ""} if parameter == "chat_template_kwargs" else {})})
    (finding,) = find(root)
    assert (finding.rule.id, finding.severity) == ("parameter-unusable", "error")
    assert words in finding.what
    assert "Error" not in finding.what
    lines = finding.place.path.read_text(encoding="utf-8").splitlines()
    assert value in lines[finding.place.line - 1].replace('\\"', '"')
    assert f'key: "{parameter}"' in lines[finding.place.line - 3] + lines[finding.place.line - 2]
    if parameter not in SERVICES:
        assert refuse(root, name).what == finding.what


@pytest.mark.parametrize(("name", "file", "text", "words", "line"), FILES)
def test_a_wrong_file_is_found(name: str, file: str, text: str, words: str, line: int, tmp_path: Path) -> None:
    root = make(tmp_path, name, files={file: text})
    (finding,) = find(root)
    assert (finding.rule.id, finding.severity, finding.place.line) == ("artifact-unreadable", "error", line)
    assert finding.place.path == root / Path(name).name / "1" / file
    assert words in finding.what
    assert refuse(root, name).what == finding.what


@pytest.mark.usefixtures("may_start_processes")
@pytest.mark.parametrize(("name", "files", "file", "words", "line"), WEIGHTS)
def test_a_wrong_file_of_weights_is_found(
    name: str, files: Mapping[str, str | None], file: str, words: str, line: int, tmp_path: Path
) -> None:
    folder = shutil.copytree(weights(), tmp_path / "weights")
    for each, text in files.items():
        (folder / each).unlink(missing_ok=True)
        if text is not None:
            (folder / each).write_text(text, encoding="utf-8")
    root = make(tmp_path / "repository", name, {"model": str(folder), "template": ""})
    (finding,) = find(root)
    assert (finding.rule.id, finding.severity) == ("artifact-unreadable", "error")
    assert (finding.place.path, finding.place.line) == (folder / file, line)
    assert words in finding.what
    assert "ValueError" not in finding.what
    assert refuse(root, name).what == finding.what


def test_a_file_that_several_components_read_is_found_once(tmp_path: Path) -> None:
    folder = shutil.copytree(weights(), tmp_path / "weights")
    (folder / "tokenizer.json").write_text(POINTER, encoding="utf-8")
    for name in ("models/llm_bls", "postprocess/completion", "postprocess/postprocessing"):
        make(tmp_path / "repository", name, {"model": str(folder)})
    (finding,) = find(tmp_path / "repository")
    assert finding.place.path == folder / "tokenizer.json"


def test_weights_of_another_machine_are_a_warning_and_no_path_is_an_error(tmp_path: Path) -> None:
    rules = {
        "/nowhere/llama": ("weights-missing", "warning"),
        "llama": ("parameter-unusable", "error"),
        "": ("parameter-unusable", "error"),
    }
    for number, (path, expected) in enumerate(rules.items()):
        (finding,) = find(make(tmp_path / str(number), "models/llm-hf", {"model": path}))
        assert (finding.rule.id, finding.severity) == expected
        assert "expected the absolute path of a folder with weights" in finding.what


def test_tensors_and_sizes_that_a_component_refuses_are_found(tmp_path: Path) -> None:
    """The size is found at its dims, a tensor that is not the component's at the first one."""
    for number, (name, old, new, words, line) in enumerate((
        ("preprocess/zscore", "dims: 2", "dims: 3", "the columns of zscore.json are 2", "dims: 3"),
        ("preprocess/tokenizer", "TYPE_INT64", "TYPE_INT32", "it needs STRING[1] -> INT64[t], INT64[t]", "input"),
        ("models/llm_bls", 'value: "prompt engine"', 'string_value: ""', "expected 2 names", ""),
    )):  # fmt: skip
        root = make(tmp_path / str(number), name)
        rule = "component-refused" if line else "parameter-unusable"
        path = root / Path(name).name / "config.pbtxt"
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        findings = [finding for finding in find(root) if words in finding.what]
        assert [f.rule.id for f in findings] == [rule], (name, findings)
        assert line in path.read_text(encoding="utf-8").splitlines()[findings[0].place.line - 1]


def test_all_wrong_parameters_of_a_component_are_found_at_once(tmp_path: Path) -> None:
    wrong = {"slots": "0", "dtype": "int", "batching": "no", "context": "-1", "quantize": "2", "cache_tokens": "a"}
    found = find(make(tmp_path, "models/llm-hf", wrong))
    assert {re.findall(r"arameter (\w+)", finding.what)[0] for finding in found} == {*wrong}
    assert len(found) == len(wrong)


def test_a_model_folder_lacks_only_what_compose_adds(tmp_path: Path) -> None:
    (tmp_path / "postprocess").mkdir()
    make(tmp_path / "preprocess", "preprocess/tokenizer", {"max_length": "one"}, {})
    (tmp_path / "preprocess" / "tokenizer" / "1" / "vocab.txt").unlink()
    make(tmp_path / "models", "models/llm-hf", {"model": "", "slots": "none"})
    make(tmp_path / "postprocess", "postprocess/label", {})
    found = {re.findall(r"arameter (\w+)", finding.what)[0] for finding in find(tmp_path)}
    assert found == {"max_length", "slots"}


def test_values_of_another_models_parameters_are_its_own(tmp_path: Path) -> None:
    """The names are those of shoal's components, the code is the user's: only what every component has is read."""
    wrong = {"max_length": "x", "labels": "a b", "slots": "2", "engine_args": "[]", "quantize": "3", "model": "here"}
    for code, expected in (("", []), ("from shoal import Component\n", ["threads"])):
        root = make(tmp_path / str(len(code)), "preprocess/checked_text", {**wrong, "threads": "two"})
        path = root / "checked_text" / "1" / "model.py"
        text = path.read_text(encoding="utf-8")
        path.write_text(f"{text}\nX = 1\n" if code else text.replace("from shoal", "from other"), encoding="utf-8")
        found = [re.findall(r"arameter (\w+)", finding.what)[0] for finding in find(root)]
        assert found == expected, code


def test_no_library_of_weights_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a component refused whose libraries are not there."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "shoal" and ".engines" in name]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("torch", "transformers", "onnxruntime", "openvino_genai", "openvino", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("llm-hf", "llm-onnx", "llm-openvino", "llm-vllm", "llamav2"):
        (finding,) = find(
            make(
                tmp_path / name,
                f"models/{name}",
                {"model": str(weights()), "threads": "1", "dtype": "x"} if name != "llm-onnx" else {"slots": "0"},
            )
        )
        assert finding.rule.id == "parameter-unusable"
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "shoal.kit.images", raising=False)
    assert not find(make(tmp_path / "image", "preprocess/image", {"resize": "none"}))


NATIVE = """backend: "{backend}"
max_batch_size: 8
input {{ name: "input__0" data_type: TYPE_FP32 dims: [ 4 ] }}
output {{ name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] }}
instance_group {{ kind: KIND_CPU }}
parameters {{ key: "model_type" value {{ string_value: "treelite_checkpoint" }} }}
parameters {{ key: "output_class" value {{ string_value: "false" }} }}
parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}
"""


@pytest.mark.parametrize(
    ("backend", "name", "right", "wrong", "rule"),
    [
        ("fil", "threshold", "0.25", "half", "fil-task"),
        ("fil", "threshold", "1e-3", "inf", "fil-task"),
        ("onnxruntime", "intra_op_thread_count", "0", "all", "parameter-unusable"),
        ("openvino", "INFERENCE_NUM_THREADS", "2", "0.5", "parameter-unusable"),
        ("pytorch", "INTRA_OP_THREAD_COUNT", "1", "-1", "parameter-unusable"),
        ("pytorch", "attention_mask", "input__0", "mask", "not-in-own-backend"),
        ("tensorrt_llm", "slots", "2", "0.5", "parameter-unusable"),
    ],
)
def test_parameters_of_backends_are_read_by_their_own_readers(
    backend: str, name: str, right: str, wrong: str, rule: str, tmp_path: Path
) -> None:
    rules = {rule, "parameter-unusable"}
    for value, expected in ((right, []), (wrong, [rule])):
        folder = tmp_path / value / "model"
        (folder / "1").mkdir(parents=True)
        text = NATIVE.format(backend=backend, name=name, value=value)
        (folder / "config.pbtxt").write_text(text, encoding="utf-8")
        found = [finding for finding in shoal.check(tmp_path / value, target="embedded") if finding.rule.id in rules]
        assert [finding.rule.id for finding in found] == expected
        assert all(name in finding.place.path.read_text().splitlines()[finding.place.line - 1] for finding in found)

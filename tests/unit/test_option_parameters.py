"""Parameters of ``config.pbtxt``: two values of each give two results. The table of the command line's options has a
file of its own.

To add a parameter, add it to ``authoring/repository/parameters.py``, and here a line for each model folder that reads
it: the folder and the parameter, and how to look at two values of it. ``Piece`` starts the component and asks it;
``Config`` reads a configuration that has the parameter. Engines are in ``tests/slow/test_option_engines.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shoal.authoring.check.families import check
from shoal.authoring.composition.artifacts import check_present
from shoal.authoring.composition.weights import write_engine_args
from shoal.authoring.draw.boxes import legible
from shoal.authoring.repository.apis import find_served
from shoal.authoring.repository.call_graph import find_below
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.describe import describe
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.loading import component_class
from shoal.authoring.repository.parameters import ANY, COMPONENT, TABLE
from shoal.authoring.repository.placement import place
from shoal.authoring.repository.plan import Plan
from shoal.errors import ShoalError
from shoal.kit.backends import BACKENDS
from shoal.kit.component.context import Context
from shoal.kit.component.triton import _refuse_foreign_repository, _threads
from shoal.kit.forests.treelite import FilSettings
from shoal.serving.gateway.control.canary import make_canaries
from shoal.serving.gateway.core.models import find_exposed, find_load_seconds, find_slots, read_hang_seconds
from tests.conftest import as_bytes
from tests.support.configs import DECOUPLED, PYTHON, chain, make_configs, parameter
from tests.support.forests import CHANCES, declare
from tests.support.imports import script
from tests.support.options import Elsewhere, Net
from tests.support.pictures import draw, save
from tests.support.pieces import start
from tests.support.planted_environments import environment
from tests.support.tokenizers import byte_level, wordpiece

SCORES = np.array([[0.2, 0.5, 0.3]], np.float32)
TEXT = as_bytes(["The cat sat."])
PICTURE = np.array([[save(draw(230, 240))]], np.object_)
CHAT = as_bytes(['[{"role": "user", "content": "Hello"}]'])


class Piece(NamedTuple):
    """Two values of a component's parameter, the first inputs of a request or all by name, and other parameters."""

    one: str
    two: str
    inputs: Any = ()
    beside: Mapping[str, str] = {}


class Config(NamedTuple):
    """Two values of a parameter of a model ``a``, and what is made of its configuration."""

    one: str
    two: str
    look: Callable[[dict[str, ModelConfig], Path], Any]
    text: str = PYTHON


def look_at_ensemble(configs: dict[str, ModelConfig], _: Path) -> Any:
    return legible(json.dumps(describe(Graph.build(configs["both"], configs))))


def look_at_check(configs: dict[str, ModelConfig], folder: Path) -> Any:
    (folder / "a" / "1").mkdir()
    (folder / "a" / "config.pbtxt").write_text(str(configs["a"].message))
    (folder / "a" / "1" / "model.py").touch()
    (folder / "a" / "custom_env.tar.gz").write_bytes(environment())
    return [f"{finding.rule.id} {finding.what}".replace(str(folder), "") for finding in check(folder)]


def look_at_vllm(configs: dict[str, ModelConfig], folder: Path) -> Any:
    (folder / "model.json").write_text("{}")
    write_engine_args(configs["a"], folder)
    return (folder / "model.json").read_text()


def look_at_forest(configs: dict[str, ModelConfig], _: Path) -> Any:
    spec = declare(2, dict(configs["a"].spec.parameters))
    return FilSettings.read(spec).answer(CHANCES, 2 if spec.parameters.get("predict_proba") == "true" else 1).tolist()


def look_at_torch(configs: dict[str, ModelConfig], folder: Path) -> Any:
    torch.manual_seed(0)
    script(Net(), folder / "model.pt")
    backend = component_class(BACKENDS / "pytorch" / "model.py")(Context(configs["a"].spec, folder))
    return backend.run({"X": np.ones((1, 3), np.float32)})["Y"].tolist()


def look_at_request(configs: dict[str, ModelConfig], _: Path) -> Any:
    return _refuse_foreign_repository({"shoal_repository": "0123"}, configs["a"].spec)


IN_FOLDER = parameter("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/custom_env.tar.gz")
FOREST, GPU = PYTHON.replace("python", "fil"), PYTHON + "instance_group [ { kind: KIND_GPU } ]"
TORCH = PYTHON.replace("python", "pytorch").replace("dims: [ 1 ]", "dims: [ -1 ]")
ENGINE_TEST = "test_an_engine_of_tensorrt_llm_is_composed_for_releases_that_have_it"
TENSORRT = PYTHON.replace("python", "tensorrtllm") + parameter("gpt_model_type", "V1")
ENTRIES: dict[tuple[str, str], Piece | Config | Elsewhere] = {
    (ANY, "api"): Config("", "none", lambda c, _: find_served(c["a"]), PYTHON.replace("FP32", "STRING", 1)),
    (ANY, "artifacts"): Config("", "words.txt", lambda c, _: check_present([*c.values()], None)),
    (ANY, "attention_mask"): Config("", "X", lambda c, _: str(place(c["a"], Plan()).input), TORCH),
    (ANY, "calls"): Config("", "b", lambda c, _: find_below(c)),
    (ANY, "together"): Elsewhere("unit/test_together.py::test_the_same_texts"),
    (ANY, "canary"): Config(
        '{\\"X\\": [[1]]}', '{\\"X\\": [[2]]}', lambda c, _: str(make_canaries(c)), PYTHON + DECOUPLED
    ),
    (ANY, "content"): Config("one", "two", look_at_ensemble),
    (ANY, "dimensions"): Config("", "64 128", lambda c, _: c["a"].dimensions),
    (ANY, "EXECUTION_ENV_PATH"): Config("/nowhere/one", "/nowhere/two", look_at_check),
    (ANY, "FORCE_CPU_ONLY_INPUT_TENSORS"): Config("yes", "no", look_at_ensemble, GPU),
    (ANY, "hang_seconds"): Config("1", "2", lambda c, _: read_hang_seconds(c)),
    (ANY, "load_seconds"): Config("1", "700", lambda c, _: find_load_seconds(c)),
    (ANY, "public"): Config("false", "true", lambda c, _: find_exposed(c, ())),
    (ANY, "shoal_repository"): Config("0123", "4567", look_at_request),
    (ANY, "shoal_files"): Elsewhere("slow/test_versions.py::test_only_the_models_on_the_server"),
    (ANY, "slots"): Config("1", "2", lambda c, _: find_slots(c)),
    ("pytorch", "dtype"): Config("fp32", "bf16", look_at_torch),
    ("fil", "is_classifier"): Config("false", "true", look_at_forest),
    ("fil", "model_type"): Config("treelite_checkpoint", "xgboost", look_at_check, FOREST),
    ("fil", "output_class"): Config("false", "true", look_at_forest),
    ("fil", "predict_proba"): Config("false", "true", look_at_forest),
    ("fil", "threshold"): Config("0.3", "0.7", look_at_forest, FOREST + parameter("output_class", "true")),
    ("llmapi", "model"): Elsewhere(f"unit/test_composed_weights.py::{ENGINE_TEST}"),
    ("vllm", "model"): Config("/one", "/two", look_at_vllm, PYTHON.replace("python", "vllm")),
    ("python", "requires"): Config("numpy", "nowhere", look_at_check, PYTHON + IN_FOLDER),
    ("pytorch", "INTRA_OP_THREAD_COUNT"): Config("1", "2", lambda c, _: _threads(c["a"].spec)),
    ("onnxruntime", "intra_op_thread_count"): Config("1", "2", lambda c, _: _threads(c["a"].spec)),
    ("openvino", "INFERENCE_NUM_THREADS"): Config("1", "2", lambda c, _: _threads(c["a"].spec)),
    ("openvino", "HINT_BF16"): Elsewhere("unit/test_openvino.py::test_bf16_only_where_it_is_asked_for"),
    (COMPONENT, "threads"): Config("1", "2", lambda c, _: _threads(c["a"].spec)),
    ("label", "labels"): Piece('["a", "b", "c"]', '["d", "e", "f"]', (SCORES,)),
    ("label", "least"): Piece("0.4", "0.6", (SCORES,)),
    ("label", "otherwise"): Piece("none", "other", (SCORES,), {"least": "0.6"}),
    ("top_k", "k"): Piece("1", "2", (SCORES,)),
    ("top_k", "labels"): Piece('["a", "b", "c"]', '["d", "e", "f"]', (SCORES,)),
    ("threshold", "threshold"): Piece("0.4", "0.6", (SCORES,)),
    ("blend", "weights"): Piece("[1, 2]", "[2, 1]", (SCORES, 2 * SCORES)),
    ("image", "interpolation"): Piece("bilinear", "bicubic", (PICTURE,)),
    ("image", "max_pixels"): Piece("100", "100000", (PICTURE,)),
    ("image", "mean"): Piece("[0, 0, 0]", "[0.5, 0.5, 0.5]", (PICTURE,)),
    ("image", "resize"): Piece("224", "256", (PICTURE,)),
    ("image", "std"): Piece("[1, 1, 1]", "[0.5, 0.5, 0.5]", (PICTURE,)),
    ("pair_tokenizer", "max_length"): Elsewhere("unit/test_text_pieces.py::test_pairs_as_transformers_joins_them"),
    ("pair_tokenizer", "max_text_bytes"): Elsewhere("unit/test_text_pieces.py::test_pairs_that_are_refused"),
    ("tokenizer", "lowercase"): Piece("true", "false", (TEXT,)),
    ("tokenizer", "max_length"): Piece("3", "9", (TEXT,)),
    ("tokenizer", "max_text_bytes"): Piece("3", "99", (TEXT,)),
    ("checked_text", "max_text_bytes"): Piece("3", "99", (TEXT,)),
    ("word_counts", "max_text_bytes"): Piece("3", "99", (TEXT,)),
    ("word_counts", "statistics"): Piece("false", "true", (TEXT,)),
    ("word_counts", "value"): Piece("count", "share", (TEXT,)),
    ("preprocess", "max_text_bytes"): Piece("3", "99", (TEXT,)),
    ("prompt", "context"): Piece("4", "99", (TEXT,)),
    ("prompt", "max_text_bytes"): Piece("3", "99", (TEXT,)),
    ("prompt", "max_tokens"): Piece("2", "3", (TEXT,)),
    ("prompt", "model"): Piece("one", "two", (TEXT,)),
    ("prompt", "chat_template_kwargs"): Elsewhere("unit/test_template_choice.py::test_a_model_has_its_own"),
    ("prompt", "template"): Piece("", "llama2", {"messages": CHAT}),
    ("prompt", "tool_form"): Elsewhere("unit/test_template_choice.py::test_the_form_of_calls"),
    ("completion", "model"): Piece(
        "one", "two", {"output_ids": np.array([[[70, 71, 72]]], np.int32), "sequence_length": np.array([[3]], np.int32)}
    ),
    ("llm_bls", "model"): Piece("one", "nowhere"),
    ("postprocessing", "model"): Piece(
        "one", "two",
        {"TOKENS_BATCH": np.array([[[70, 71, 72]]], np.int32), "SEQUENCE_LENGTH": np.array([[3]], np.int32)},
    ),
    ("llamav2", "quantize"): Elsewhere("slow/test_quantised.py::test_llamav2_in_eight_bits"),
    ("llm-hf", "quantize"): Elsewhere("slow/test_quantised.py::test_tokens_are_those_of_the_same_models_generate"),
    ("tensorrt_llm_bls", "accumulate_tokens"): Elsewhere("slow/test_tensorrt_llm.py::test_accumulated_tokens"),
    ("tensorrt_llm_bls", "model"): Piece("one", "nowhere"),
    ("tensorrt_llm_bls", "multimodal_encoders_name"): Piece("", "encoders"),
    ("tensorrt_llm_bls", "tensorrt_llm_draft_model_name"): Piece("", "draft"),
    ("tensorrt_llm_bls", "tensorrt_llm_model_name"): Piece("tensorrt_llm", "other"),
    ("tensorrtllm", "exclude_input_in_output"): Config("false", "never", look_at_check, TENSORRT),
    ("tensorrtllm", "gpt_model_path"): Config("/elsewhere", "/models/a/1", look_at_check, TENSORRT),
    ("tensorrtllm", "gpt_model_type"): Config("V1", "batching", look_at_check, PYTHON.replace("python", "tensorrtllm")),
}  # fmt: skip


READERS = {"preprocess": "preprocess", "every component": COMPONENT}


def find_parameters() -> set[tuple[str, str]]:
    """Return every parameter that shoal reads, with the folder that reads it, or else its scope."""
    found = set()
    for row in TABLE:
        if row.scope != COMPONENT:
            found |= {(row.scope, row.name)} if not row.readers.endswith("of NVIDIA") else set()
        else:
            found |= {(READERS.get(reader, reader), row.name) for reader in row.readers.split(", ")}
    return found


@pytest.fixture(scope="module")
def files(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What components load: the files of the readability pipeline, words, and two language models without weights."""
    folder = tmp_path_factory.mktemp("files")
    for path in artifacts.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "words.txt").write_text("the\ncat\n")
    for name, tokenizer in (("one", byte_level()), ("two", wordpiece())):
        (folder / name).mkdir()
        tokenizer.save(str(folder / name / "tokenizer.json"))
        (folder / name / "config.json").write_text('{"max_position_embeddings": 100}')
        settings = {"chat_template": "{{ messages[0]['content'] }}", "pad_token": None}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def see(folder: str, name: str, entry: Piece | Config, value: str, files: Path) -> str:
    """Return what a value of a parameter gives, as text."""
    if isinstance(entry, Config):
        text = entry.text + parameter(name, value)
        (files / "a").mkdir()
        configs = make_configs(files, a=text, b=entry.text, both=chain("b", "a"))
        return repr(entry.look(configs, files))
    more = {"model": str(files / "one")} if (folder, "model") in ENTRIES else {}
    given: dict[str, Any] = {**more, **entry.beside, name: str(files / value) if name == "model" else value}
    component = start(folder, files, **given)
    inputs = entry.inputs
    if not isinstance(inputs, Mapping):
        inputs = dict(zip((tensor.name for tensor in component.context.spec.inputs), inputs, strict=False))
    with closing(component):
        (answer,) = component.process([inputs]) if inputs else [{}]
    if isinstance(answer, ShoalError):
        raise answer
    return repr({key: array.tolist() for key, array in answer.items() if key != "seed"})


@pytest.mark.parametrize(
    ("key", "entry"), [pytest.param(k, e, id="-".join(k)) for k, e in ENTRIES.items() if not isinstance(e, Elsewhere)]
)
@pytest.mark.usefixtures("may_start_processes")
def test_two_values_give_two_results(key: tuple[str, str], entry: Piece | Config, files: Path, tmp_path: Path) -> None:
    seen = []
    for number, value in enumerate((entry.one, entry.two, entry.two)):
        place = files if isinstance(entry, Piece) else tmp_path / str(number)
        place.mkdir(exist_ok=True)
        try:
            seen.append(see(*key, entry, value, place).replace(str(place), ""))
        except ShoalError as error:
            seen.append(f"refused: {error}")
    assert seen[0] != seen[1] == seen[2]
    assert not (seen[0].startswith("refused") and seen[1].startswith("refused")), seen

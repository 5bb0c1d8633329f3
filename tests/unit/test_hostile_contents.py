"""Contents of files that grow, nest or print more than they should: each command refuses them or stays fast."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from tokenizers import Tokenizer
from typer.testing import CliRunner

from shoal.authoring.check.families import check
from shoal.authoring.project.importing.add_model import add_model
from shoal.authoring.repository import config as configs
from shoal.authoring.repository.call_graph import MAX_NESTED, collect
from shoal.authoring.repository.config import MAX_ENTRIES, MAX_STEPS, read_config
from shoal.authoring.repository.find_graph import find_graph
from shoal.authoring.repository.graph import Graph, find_rounds
from shoal.authoring.repository.model_folders import read_configs
from shoal.cli import app
from shoal.errors import ArtifactError, ShoalError, printable
from shoal.kit.encoders.export import export_onnx
from shoal.kit.text.tokenizer_files import MAX_PIECES, find_growth, read_tokenizer
from tests.support import tokenizers
from tests.support.hostile_files import limits

MODEL = """backend: "python"
max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
MAX_MODELS = 20  # in place of 5,000, which take a while to write
CODE = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


def write(root: Path, name: str, config: str = MODEL) -> Path:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config, encoding="utf-8")
    if "python" in config:
        (root / name / "1" / "model.py").write_text(CODE, encoding="utf-8")
    return root / name


def ensemble(*steps: tuple[str, str, str]) -> str:
    shown = ",".join(
        f'{{ model_name: "{model}" model_version: -1 input_map {{ key: "A" value: "{reads}" }}'
        f' output_map {{ key: "B" value: "{writes}" }} }}'
        for model, reads, writes in steps
    )
    tensors = MODEL.replace('backend: "python"', 'platform: "ensemble"').partition("instance_group")[0]
    return f"{tensors}ensemble_scheduling {{ step [ {shown} ] }}"


def chain(model: str, number: int) -> str:
    names = ["A", *(f"t{index}" for index in range(1, number)), "B"]
    return ensemble(*((model, reads, writes) for reads, writes in pairwise(names)))


def rules(root: Path) -> set[str]:
    with limits():
        return {finding.rule.id for finding in check(root) if finding.severity == "error"}


# --- many ------------------------------------------------------------------------------------------------------------


def test_a_long_chain_of_steps(tmp_path: Path) -> None:
    write(tmp_path, "m")
    folder = write(tmp_path, "e", chain("m", MAX_STEPS))
    assert rules(tmp_path) == set()
    with limits():
        assert Graph.load(folder).levels() == [*range(1, MAX_STEPS + 1)]
    for number in (MAX_STEPS + 1, 5000):
        (folder / "config.pbtxt").write_text(chain("m", number), encoding="utf-8")
        assert rules(tmp_path) == {"config-unreadable"}
        with limits(), pytest.raises(ArtifactError, match=rf"{number:,} entries, and at most {MAX_STEPS:,} are read"):
            find_graph(tmp_path, "e")


def test_steps_in_any_order_are_sorted_into_rounds() -> None:
    steps = [(["c"], ["d"]), (["b"], ["c"]), (["a"], ["b"]), (["a", "b"], ["e"]), (["f"], ["g"]), (["g"], ["f"])]
    assert list(find_rounds(steps, ["a"])) == [[2], [1, 3], [0]]
    assert list(find_rounds([([], ["a"]), (["a"], ["a"])], [])) == [[0], [1]]


def test_ensembles_in_ensembles(tmp_path: Path) -> None:
    """1,100 deep; and each of 40 calls the two next ones, which are 2 ** 40 paths."""
    write(tmp_path, "m")
    for index in range(1100):
        write(tmp_path, f"e{index}", ensemble((f"e{index + 1}" if index < 1099 else "m", "A", "B")))
    for index in range(40):
        for side in "xy":
            names = [f"{other}{index + 1}" if index < 39 else "m" for other in "xy"]
            write(tmp_path, f"{side}{index}", ensemble((names[0], "A", "t"), (names[1], "t", "B")))
    assert rules(tmp_path) == set()
    found = read_configs(tmp_path)
    with limits():
        assert not Graph.build(found["x0"], found).repeats(0)
        assert len(collect("x0", found)) == 80
        with pytest.raises(ArtifactError, match=f"more than {MAX_NESTED} deep, up to e{MAX_NESTED}"):
            collect("e0", found)


def test_a_circle_of_many_ensembles(tmp_path: Path) -> None:
    for index in range(300):
        write(tmp_path, f"e{index}", ensemble((f"e{(index + 1) % 300}", "A", "B")))
    with limits():
        found = [finding for finding in check(tmp_path) if finding.rule.id == "ensemble-in-itself"]
    assert len(found) == 300
    assert max(len(finding.what) for finding in found) < 400


def test_more_models_than_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "MAX_MODELS", MAX_MODELS)
    for index in range(MAX_MODELS + 1):
        (tmp_path / "models" / f"m{index}").mkdir(parents=True)
        (tmp_path / "models" / f"m{index}" / "config.pbtxt").touch()
    for path, arguments in (("models", ["check"]), ("models", ["describe"]), ("", ["check"])):
        with limits():
            result = CliRunner().invoke(app, [*arguments, str(tmp_path / path)])
        assert f"holds {MAX_MODELS + 1:,} models, and at most {MAX_MODELS:,} are read" in (
            f"{result.output}{result.exception}"
        )


@pytest.mark.parametrize(
    "config",
    [
        MODEL + "".join(f'parameters {{ key: "{index}" value {{ string_value: "v" }} }}' for index in range(1_000_000)),
        MODEL + "instance_group { kind: KIND_CPU }" * (MAX_ENTRIES + 1),
        MODEL.replace("dims: [ 1 ]", f"dims: [ {'1,' * MAX_ENTRIES} 1 ]", 1),
        MODEL + "ensemble_scheduling { step { " * 20_000,
        MODEL + 'parameters { key: "\\355\\240\\200" value { string_value: "v" } }',
    ],
    ids=["parameters", "groups", "dims", "nested", "half a character"],
)  # fmt: skip
def test_configurations_beyond_the_limits(config: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "m", config)
    assert rules(tmp_path) & {"config-unreadable", "config-syntax"}
    with limits(), pytest.raises(ArtifactError, match=r"config\.pbtxt"):
        read_config(folder)


@pytest.mark.usefixtures("may_start_processes")
def test_little_memory_is_used(tmp_path: Path) -> None:
    """Peak memory of a process that reads a manifest and a configuration of 3 GB each."""
    for name in ("m", "n"):
        write(tmp_path, name)
    for path in (tmp_path / "manifest.json", tmp_path / "m" / "config.pbtxt", tmp_path / "n" / "1" / "model.py"):
        with path.open("wb") as file:
            file.truncate(3 * 2**30)
    code = (
        "import re, sys; from shoal import check; found = check(sys.argv[1]);"
        "print(len(found), int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True, timeout=60
    )
    findings, mebibytes = map(int, done.stdout.split())
    assert findings
    assert mebibytes < 400


# --- tokenizers ------------------------------------------------------------------------------------------------------


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def sequence(name: str, *pieces: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: [*pieces]}


A = {"Sequence": {"id": "A", "type_id": 0}}
TWICE = {"type": "TemplateProcessing", "single": [A, A], "pair": [A], "special_tokens": {}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GROWING: dict[str, tuple[str, dict[str, Any]]] = {
    "doubled": ("normalizer", sequence("normalizers", *[replace("a", "aa")] * 30)),
    "two letters": ("normalizer", sequence("normalizers", *[replace("a", "bb"), replace("b", "aa")] * 15)),
    "after one that removes": (
        "normalizer", sequence("normalizers", replace("x", "", "Regex"), *[replace("a", "aa", "Regex")] * 30),
    ),
    "nested": ("normalizer", sequence("normalizers", *[sequence("normalizers", *[replace("a", "aa")] * 6)] * 5)),
    "between all": ("normalizer", sequence("normalizers", *[replace("", "a")] * 30)),
    "one long": ("normalizer", replace("a", "b" * 1000)),
    "expression": ("normalizer", sequence("normalizers", *[replace("(?=a)", "a", "Regex")] * 30)),
    "any character": ("normalizer", sequence("normalizers", *[replace(".", "aa", "Regex")] * 30)),
    "other case": ("normalizer", sequence("normalizers", *[replace("a", "AA"), {"type": "Lowercase"}] * 30)),
    "bytes": ("pre_tokenizer", sequence("pretokenizers", *[BYTES] * 30)),
    "the text twice": ("post_processor", sequence("processors", *[TWICE] * 30)),
    "decoder": ("decoder", sequence("decoders", *[replace("a", "aa")] * 30)),
    "suffix": ("decoder", sequence("decoders", *[{"type": "BPEDecoder", "suffix": ""}] * 30)),
    "pieces": ("normalizer", sequence("normalizers", *[replace("a", "a")] * (MAX_PIECES + 1))),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWING)
def test_tokenizers_that_grow_texts(name: str, tmp_path: Path) -> None:
    part, pieces = GROWING[name]
    path = tmp_path / "tokenizer.json"
    whole = {**json.loads(tokenizers.byte_level().to_str()), part: pieces}
    path.write_text(json.dumps(whole), encoding="utf-8")
    Tokenizer.from_file(str(path))  # the library accepts it
    with limits(), pytest.raises(ArtifactError, match=rf"its {part} (makes texts up to|has 1,001 pieces)"):
        read_tokenizer(path)


@pytest.mark.parametrize("padding", [{"strategy": {"Fixed": 10**12}}, {"pad_to_multiple_of": 10**9}])
def test_tokenizers_that_pad_texts(padding: dict[str, Any]) -> None:
    assert "pads texts to more than" in find_growth({"padding": padding})


@pytest.mark.parametrize(
    "part",
    [
        [1],
        "a",
        7,
        {"type": "Sequence", "normalizers": [1]},
        {"type": "TemplateProcessing", "single": 1, "pair": 2},
        {"type": "Precompiled", "precompiled_charsmap": "?"},
    ],
)
def test_tokenizers_of_wrong_types(part: Any, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(json.dumps({"normalizer": part, "padding": part, "model": {}}), encoding="utf-8")
    with pytest.raises(ArtifactError, match="t is not a fast tokenizer"):
        read_tokenizer(tmp_path / "t")


def test_usual_tokenizers_are_read(tmp_path: Path) -> None:
    """Also one that writes out 30 signs, of which none is made of another."""
    signs = [replace(chr(0x2460 + index), f"({index + 1})") for index in range(30)]
    spaces = [replace(" {2,}", " ", "Regex"), replace(r"\s+", " ", "Regex"), {"type": "NFKC"}, replace(" ", "▁")]
    usual = tokenizers.byte_level()
    for name, found in {
        "bytes": usual.to_str(), "pieces": tokenizers.sentencepiece().to_str(),
        "words": tokenizers.wordpiece().to_str(),
        "signs": json.dumps({**json.loads(usual.to_str()), "normalizer": sequence("normalizers", *signs, *spaces)}),
    }.items():  # fmt: skip
        (tmp_path / name).write_text(found, encoding="utf-8")
        assert read_tokenizer(tmp_path / name).encode("(1) a b").ids


# --- models to add ---------------------------------------------------------------------------------------------------


def save(path: Path, shape: list[Any], *, name: str = "X", **external: str) -> Path:
    """Write an ONNX model; ``external`` are the entries of a weight in another file."""
    weight = TensorProto(name="W", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    for key, value in external.items():
        weight.external_data.add(key=key, value=value)
    node = helper.make_node(*(("Add", [name, "W"]) if external else ("Identity", [name])), ["Y"])
    tensors = [helper.make_tensor_value_info(each, TensorProto.FLOAT, shape) for each in (name, "Y")]
    graph = helper.make_graph([node], "g", tensors[:1], tensors[1:], [weight] if external else [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("shape", [["n", 2**62, 2**62], [2**62], ["n", -5], ["n", *[2] * 10_000], ["n", 10**10]])
def test_shapes_beyond_memory(shape: list[Any], tmp_path: Path) -> None:
    said: list[str] = []
    with limits():
        try:
            add_model(save(tmp_path / "m.onnx", shape), "mine", project=tmp_path / "p", tell=said.append)
        except ShoalError as error:
            said.append(str(error))
    assert any("no row of X" in line or "dims" in line for line in said)


@pytest.mark.parametrize(
    "external",
    [{"location": "a\n\x1b[31mwritten: all"}, {"location": "a\0b"}, {"location": "a" * 5000},
     {"location": "m\u202exnno"},
     {"location": "w", "offset": "9" * 5000}, {"location": "w", "offset": "-8"}, {"location": "/dev/zero"}],
)  # fmt: skip
def test_odd_files_of_weights(external: dict[str, str], tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", ["n", 1], **external)
    with limits(), pytest.raises(ArtifactError, match=r"m\.onnx") as error:
        add_model(path, "mine", project=tmp_path / "p")
    assert str(error.value).isprintable()


def test_names_print_no_lines_of_their_own(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", ["n\x1b[2J", 2], name="X\nwritten: all\x9b31m")
    result = CliRunner().invoke(app, ["add-model", str(path), "mine", "--project", str(tmp_path / "p")])
    assert result.exit_code == 0, result.output
    assert not [
        line for line in result.output.splitlines() if not line.isprintable() or line.startswith("written: all")
    ]
    written = (tmp_path / "p" / "models" / "mine" / "config.pbtxt").read_text(encoding="utf-8")
    assert all(line.isprintable() for line in written.splitlines() if line.startswith("#"))


def test_findings_print_no_lines_of_their_own(tmp_path: Path) -> None:
    config = MODEL.replace('"A"', '"A\\nNo mistakes found.\\033[2J"').replace('"B"', '"B\\xe2\\x80\\xae"')
    write(tmp_path, "m\x1b]0;t\x07", config + 'parameters { key: "calls" value { string_value: "x\\033[31m" } }')
    for form in ("text", "github"):
        with limits():
            result = CliRunner().invoke(app, ["check", str(tmp_path), "--format", form])
        assert result.exit_code == 1
        assert all(line.isprintable() for line in result.output.splitlines())
        assert "No mistakes found." not in result.output.splitlines()
    found = json.loads(CliRunner().invoke(app, ["check", str(tmp_path), "--json"]).stdout)["findings"]
    assert any("\x1b" in finding["file"] for finding in found)  # data stays as it is


def test_printable() -> None:
    assert printable("Größe 日本語\u3000👩‍👩‍👧 a\\n") == "Größe 日本語\u3000👩‍👩‍👧 a\\n"
    assert printable("a\nb\r\x1b[0m\x7f\x9b\u202e\u2028\ud800") == r"a\nb\r\x1b[0m\x7f\x9b\u202e\u2028\ud800"
    error = ShoalError("a\n" * 100_000, "b\x1b")
    assert str(error).isprintable()
    assert len(str(error)) < 2100


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_is_announced(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    torch.jit.script(Net()).save(str(tmp_path / "m.pt"))
    arguments = ["add-model", str(tmp_path / "m.pt"), "mine", "--input", "FP32:2", "--project", str(tmp_path / "p")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("m.pt is a program, and is run now, as you") == 1
    assert "is a program" not in result.stdout
    onnx.save(onnx.load(save(tmp_path / "m.onnx", ["n", 2])), str(tmp_path / "n.onnx"))
    arguments = ["add-model", str(tmp_path / "n.onnx"), "other", "--project", str(tmp_path / "p")]
    assert "is a program" not in CliRunner().invoke(app, arguments).output


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_exporter_says_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(50):
                x = x.relu() + 1
            y: torch.Tensor = torch.linalg.matrix_exp(x)
            return y

    with pytest.raises(ArtifactError, match=r"^A net cannot be exported to ONNX: .*matrix_exp.* Do this\.$") as error:
        export_onnx(Net(), (torch.ones(2, 3, 3),), tmp_path / "m.onnx", "A net", "Do this.")
    assert len(str(error.value)) < 400
    assert "graph(" not in "".join(capfd.readouterr())

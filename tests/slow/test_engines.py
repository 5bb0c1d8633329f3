"""Another engine in the encoder's slot: the same scores, by files and a configuration alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from shoal.authoring.check.families import check
from shoal.authoring.composition.artifacts import read_onnx
from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.manifest import read_manifest
from shoal.authoring.repository.plan import Plan
from shoal.clients.client.client import Client
from shoal.clients.local import load, load_component
from shoal.errors import ArtifactError, InputError
from shoal.kit.component.files import sha256
from shoal.kit.component.provenance import METADATA, dump_ties
from shoal.kit.encoders.export import export_encoder
from shoal.readability.encoder import load_encoder
from shoal.serving.server.launch import serve
from shoal.system.paths import shipped_root

TEXTS = ["The cat sat.", "", "It is nonetheless imperative that epistemology be considered. " * 12]


@pytest.fixture(scope="module")
def leaves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The leaf `bert-large` for Triton's onnxruntime backend: two lines differ."""
    folder = tmp_path_factory.mktemp("leaves") / "models" / "bert-large"
    shutil.copytree(shipped_root() / "models" / "bert-large", folder)
    config = folder / "config.pbtxt"
    text = config.read_text(encoding="utf-8").replace('backend: "pytorch"', 'backend: "onnxruntime"')
    config.write_text(text.replace('"model.pt"', '"model.onnx"'), encoding="utf-8")
    return folder.parents[1]


def test_onnx_runtime_serves_the_slot(leaves: Path, artifacts: Path, tmp_path: Path) -> None:
    from shoal.kit.encoders.packaged import SMALL_ENCODER

    encoder = load_encoder(SMALL_ENCODER, seed=0).candidates.pick("mean")
    own = tmp_path / "artifacts"
    shutil.copytree(artifacts, own)
    (own / "report.json").unlink()  # it speaks of another encoder
    for name in ("model.pt", "model.onnx"):
        export_encoder(encoder, own / name, ties={})
    torchscript = load(compose("ensemble_all", tmp_path / "torch", artifacts=own) / "ensemble_all")
    repository = compose("ensemble_all", tmp_path / "onnx", artifacts=own, projects=[leaves])
    expected = torchscript(excerpt=TEXTS)["BERT_SCORE"]
    np.testing.assert_allclose(
        load(repository / "ensemble_all")(excerpt=TEXTS)["BERT_SCORE"], expected, rtol=0, atol=1e-5
    )
    with serve(repository) as server, Client(server.grpc_url) as client:
        served = client.infer("ensemble_all", excerpt=TEXTS)["BERT_SCORE"]
    np.testing.assert_allclose(served, expected, rtol=0, atol=1e-5)


def save_onnx(path: Path, properties: dict[str, str]) -> None:
    """A model that counts the tokens of each row."""
    shape: tuple[str | int, ...] = ("rows", "width")
    ids, mask = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, shape) for name in ("INPUT__0", "INPUT__1")
    )
    out = onnx.helper.make_tensor_value_info("OUTPUT__0", onnx.TensorProto.FLOAT, ("rows", 1))
    nodes = [
        onnx.helper.make_node("ReduceSum", ["INPUT__1", "axis"], ["sum"], keepdims=1),
        onnx.helper.make_node("Cast", ["sum"], ["OUTPUT__0"], to=onnx.TensorProto.FLOAT),
    ]
    axis = onnx.helper.make_tensor("axis", onnx.TensorProto.INT64, [1], [1])
    graph = onnx.helper.make_graph(nodes, "g", [ids, mask], [out], [axis])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    onnx.helper.set_model_props(model, properties)
    onnx.save(model, str(path))


@pytest.fixture
def own(artifacts: Path, tmp_path: Path) -> Path:
    """An artifact folder without the TorchScript and what is said of it."""
    own = tmp_path / "own"
    shutil.copytree(artifacts, own)
    (own / "report.json").unlink()
    (own / "model.pt").unlink()
    return own


def test_an_encoder_for_another_vocabulary_is_neither_composed_nor_started(
    leaves: Path, own: Path, tmp_path: Path
) -> None:
    ties = {name: sha256(own / name) for name in ("vocab.txt", "preprocess.json")}
    save_onnx(own / "model.onnx", {"author": "us", METADATA: dump_ties(ties)})
    assert read_onnx(own / "model.onnx") == ties
    repository = compose("ensemble_all", tmp_path / "made", artifacts=own, projects=[leaves])
    assert load_component(read_config(repository / "bert-large")).context.spec.name == "bert-large"

    save_onnx(own / "model.onnx", {METADATA: dump_ties({"vocab.txt": "0" * 64})})
    with pytest.raises(ArtifactError, match=r"model\.onnx was made with another vocab\.txt than .*sha256 0000"):
        compose("ensemble_all", tmp_path / "other", artifacts=own, projects=[leaves])
    shutil.copyfile(own / "model.onnx", repository / "bert-large" / "1" / "model.onnx")
    with pytest.raises(ArtifactError, match=r"model\.onnx was made with another vocab\.txt than "):
        load_component(read_config(repository / "bert-large"))


def test_auto_is_not_bf16_for_an_engine_that_runs_fp32(
    leaves: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.authoring.repository.precision.computes_bf16", lambda: True)
    save_onnx(own / "model.onnx", {})
    assert read_onnx(own / "model.onnx") == {}
    repository = compose("ensemble_all", tmp_path / "made", artifacts=own, projects=[leaves])
    assert read_manifest(repository)["dtype"] == "fp32"
    with pytest.raises(InputError, match=r"No model can run in dtype bf16: only models of shoal's pytorch backend can"):
        compose("ensemble_all", tmp_path / "other", artifacts=own, projects=[leaves], plan=Plan(dtype="bf16"))


def write_times(
    folder: Path, path: str, factor: float, more: str = "", *, shape: tuple[int, ...] = (4,), dims: str = "dims: [ 4 ]"
) -> None:
    """A model on ONNX Runtime that multiplies by ``factor``, or by its input K; its file is at ``path`` in ``1/``."""
    file = folder / "1" / path
    file.parent.mkdir(parents=True)
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", *shape]) for name in "XY")
    k = onnx.helper.make_tensor_value_info("K", onnx.TensorProto.FLOAT, ["times"])
    constant = onnx.helper.make_tensor("K", onnx.TensorProto.FLOAT, [1], [factor])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Mul", ["X", "K"], ["Y"])], "g", [x, k], [y], [constant])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9), str(file))
    (folder / "config.pbtxt").write_text(
        f'''name: "{folder.name}"
platform: "onnxruntime_onnx"
backend: "onnxruntime"
max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_FP32 {dims} }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 {dims} }} ]
instance_group [ {{ kind: KIND_CPU }} ]
{more}''',
        encoding="utf-8",
    )


def test_shapes_and_inputs_as_triton_s_backend_has_them(tmp_path: Path) -> None:
    """The field reshape, and an optional input, whose default is in the graph."""
    repository = tmp_path / "r"
    k = 'input [ { name: "K" data_type: TYPE_FP32 dims: [ 1 ] optional: true reshape { shape: [ ] } } ]'
    shapes: dict[str, tuple[tuple[int, ...], str, tuple[int, ...]]] = {
        "column": ((), "dims: [ 1 ] reshape { shape: [ ] }", (1,)),
        "square": ((2, 2), "dims: [ 4 ] reshape { shape: [ 2, 2 ] }", (4,)),
        "open": ((-1,), "dims: [ 1, -1 ] reshape { shape: [ -1 ] }", (1, 6)),
    }
    for name, (shape, dims, _) in shapes.items():
        write_times(repository / name, "model.onnx", 2.0, k if name == "column" else "", shape=shape, dims=dims)
    assert [finding for finding in check(repository, target="embedded") if finding.severity == "error"] == []
    with serve(repository) as server, Client(server.grpc_url) as client:
        for name, (_, _, outer) in shapes.items():
            rows = np.arange(3 * int(np.prod(outer)), dtype=np.float32).reshape(3, *outer)
            for answer in (client.infer(name, X=rows), load(repository / name)(X=rows)):
                assert np.array_equal(answer["Y"], rows * 2), name
        ones, threes = np.ones((2, 1), np.float32), np.full((2, 1), 3, np.float32)
        for answer in (client.infer("column", X=ones, K=threes), load(repository / "column")(X=ones, K=threes)):
            assert np.array_equal(answer["Y"], threes)


def test_the_model_s_file_may_have_another_name(artifacts: Path, tmp_path: Path) -> None:
    """The field default_model_filename, for each backend; and ONNX Runtime's folder with the file in it."""
    repository = tmp_path / "r"
    write_times(repository / "named", "llamav2.onnx", 2.0, 'default_model_filename: "llamav2.onnx"')
    write_times(repository / "folder", "model.onnx/model.onnx", 3.0)
    shapes = {}
    for name, file in (("bert-large", "model.pt"), ("cuml", "checkpoint.tl")):
        shutil.copytree(shipped_root() / "models" / name, repository / name)
        shutil.copyfile(artifacts / file, repository / name / "1" / f"mine_{file}")
        path = repository / name / "config.pbtxt"
        text = f'{path.read_text(encoding="utf-8")}\ndefault_model_filename: "mine_{file}"\n'
        path.write_text(text.replace(f'string_value: "{file}"', 'string_value: ""'), encoding="utf-8")
        shapes[name] = {t.name: t.zeros(2) + 1 for t in read_config(repository / name).spec.inputs}
    errors = [finding for finding in check(repository, target="embedded") if finding.severity == "error"]
    assert errors == []
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    with serve(repository) as server, Client(server.grpc_url) as client:
        for name, factor in (("named", 2), ("folder", 3)):
            for answer in (client.infer(name, X=rows), load(repository / name)(X=rows)):
                assert np.array_equal(answer["Y"], rows * np.float32(factor))
        for name, inputs in shapes.items():
            served, here = client.infer(name, inputs), load(repository / name)(**inputs)
            assert all(np.array_equal(served[output], here[output]) for output in here)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"not a model", "it is cut off, or another kind of file"),
        (b"\xff" * 12, "it is cut off, or another kind of file"),
        (b"\x3a\x7fgraph", "it is cut off, or another kind of file"),
        (b"\x08", "it is cut off, or another kind of file"),
        (b"\x72\x13\x0a\x0ashoal.json\x12\x05[1,2]", "its ties to other files are damaged"),
        (b"\x72\x0f\x0a\x0ashoal.json\x12\x01{", "Expecting property name"),
    ],
)
def test_files_that_are_not_onnx_models(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"model\.onnx is not a valid ONNX model: {why}"):
        read_onnx(tmp_path / "model.onnx")


def test_formats_without_an_engine(tiny_bert: Path, tmp_path: Path) -> None:
    encoder = load_encoder(str(tiny_bert), seed=0).candidates.pick("mean")
    with pytest.raises(InputError, match=r"No engine runs model\.bin\. Name a file that ends in \.pt or \.onnx\."):
        export_encoder(encoder, tmp_path / "model.bin", ties={})


def test_a_damaged_onnx_model_is_refused(leaves: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bert-large"
    shutil.copytree(leaves / "models" / "bert-large", folder)
    (folder / "1" / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(ArtifactError, match=r"model\.onnx is not a valid ONNX model: Protobuf parsing failed\."):
        load_component(read_config(folder))

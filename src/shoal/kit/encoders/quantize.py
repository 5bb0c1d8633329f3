"""INT8 form of a TorchScript encoder: ONNX with nodes that quantise and dequantise, calibrated on texts (NNCF).

The file's metadata has a *record*: the SHA-256 of the TorchScript file that it was made from, the number of calibration
texts, and how far its answers are from the parent's. A file without one is refused.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import needs
from shoal.kit.component.files import refusal, sha256
from shoal.kit.component.provenance import METADATA, dump_ties, parse_ties, read_archive
from shoal.kit.component.spec import ModelSpec
from shoal.system.files import MAX_BINARY, parse_json, read_bytes
from shoal.system.machine import library_versions

INT8_FLAGS = ("amx_int8", "avx512_vnni", "avx_vnni")  # instruction sets that multiply INT8 faster than FP32
FILE = "model.onnx"  # a name that NVIDIA's backend knows
NUM_CALIBRATED = 128  # texts
_ROWS = 8  # of a calibration batch
_KIND = "encoder that `shoal tune` quantised"


@dataclass(frozen=True)
class Record:
    """Origin and error of a quantised encoder; ``error`` is added to its parent's RMSE, or None without labelled texts.

    ``greatest`` and ``mean`` are the differences of its pipeline's scores to those of the FP32 parent.
    """

    parent: str
    calibrated_on: int
    versions: Mapping[str, str]
    greatest: float | None = None
    mean: float | None = None
    error: float | None = None


def quantize(script: Path, spec: ModelSpec, batches: Sequence[Mapping[str, NDArray[Any]]], out: Path) -> Record:
    """Quantise the encoder in the TorchScript file ``script``, and write it to ``out`` as ONNX.

    ``spec`` names the tensors. ``batches`` are calibration inputs by name, ``[rows, width]`` each.

    Raises:
        ArtifactError: the encoder cannot be exported to ONNX.
        SetupError: NNCF is not installed.
    """
    os.environ.setdefault("NNCF_CI", "1")  # or it would report its use over the network
    with needs("int8"):
        import nncf
        import onnx

    ties = read_archive(script)
    for name in ("nncf", "openvino"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with (
        tempfile.TemporaryDirectory(prefix="shoal-") as folder,
        warnings.catch_warnings(),
        redirect_stdout(sys.stderr),  # NNCF's progress bars
    ):
        warnings.simplefilter("ignore")
        path = Path(folder) / FILE
        _export(script, spec, batches[0], path)
        model = onnx.load(str(path))
        quantized = nncf.quantize(
            model,
            nncf.Dataset(list(batches)),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(batches),
            ignored_scope=nncf.IgnoredScope(names=_find_products(model.graph)),
        )
    record = Record(
        parent=sha256(script),
        calibrated_on=sum(len(next(iter(batch.values()))) for batch in batches),
        versions=library_versions("nncf", "openvino"),
    )
    _save(quantized, out, ties, record)
    return record


def _export(script: Path, spec: ModelSpec, batch: Mapping[str, NDArray[Any]], path: Path) -> None:
    import torch

    from shoal.kit.encoders.export import export_onnx

    inputs, outputs = [tensor.name for tensor in spec.inputs], [tensor.name for tensor in spec.outputs]
    axes: dict[str, dict[int, str]] = {
        tensor.name: {0: "rows", **{i + 1: f"{tensor.name}_{i}" for i, size in enumerate(tensor.dims) if size < 0}}
        for tensor in (*spec.inputs, *spec.outputs)
    }
    module = torch.jit.load(str(script), map_location="cpu").eval()
    example = tuple(torch.from_numpy(np.array(batch[name])) for name in inputs)
    with torch.inference_mode():
        names = {"input_names": inputs, "output_names": outputs, "dynamic_axes": axes}
        export_onnx(module, example, path, script.name, "INT8 needs an encoder that has an ONNX form.", **names)


def _find_products(graph: Any) -> list[str]:
    """Return the names of matrix products of two computed tensors: those of attention.

    They stay in BF16 or FP32: in INT8, they made no encoder faster, and most of the error (on CLEAR, RMSE +0.0036
    instead of +0.0010).
    """
    weights = {tensor.name for tensor in graph.initializer}
    return [node.name for node in graph.node if node.op_type == "MatMul" and weights.isdisjoint(node.input)]


def add_errors(path: Path, record: Record) -> None:
    """Write ``record``, which has measured errors now, into the quantised encoder ``path``."""
    import onnx

    ties, _ = _read(path)
    _save(onnx.load(str(path)), path, ties, record)


def _save(model: Any, out: Path, ties: Mapping[str, str], record: Record) -> None:
    import onnx

    text = json.dumps({**json.loads(dump_ties(ties)), "int8": asdict(record)}, sort_keys=True)
    onnx.helper.set_model_props(model, {METADATA: text})
    onnx.save(model, str(out))


def read_record(path: Path) -> Record:
    """Read the record of a quantised encoder.

    Raises:
        ArtifactError: the file is damaged, or has no record.
    """
    return _read(path)[1]


def _read(path: Path) -> tuple[dict[str, str], Record]:
    with needs("serve"):
        import onnx
        from google.protobuf.message import DecodeError
    try:
        entries = onnx.load_model_from_string(read_bytes(path, MAX_BINARY)).metadata_props
        text = next((entry.value for entry in entries if entry.key == METADATA), "{}")
        return parse_ties(text), Record(**parse_json(text)["int8"])
    except OSError as error:
        raise refusal(path, _KIND, f"it cannot be read: {error.strerror}") from error
    except DecodeError as error:
        raise refusal(path, _KIND, "it is cut off, or another kind of file") from error
    except (ValueError, KeyError, TypeError) as error:
        raise refusal(path, _KIND, "it has no record of its calibration") from error


def make_batches(tensors: Sequence[Mapping[str, NDArray[Any]]]) -> list[dict[str, NDArray[Any]]]:
    """Cut the inputs of an encoder, as recorded in a pipeline, to calibration batches of at most 8 rows."""
    return [
        {name: np.ascontiguousarray(array[start : start + _ROWS]) for name, array in given.items()}
        for given in tensors
        for start in range(0, len(next(iter(given.values()))), _ROWS)
    ]

"""A Treelite forest on the host: by ONNX Runtime, or by Treelite's own engine where that cannot be.

ONNX Runtime walks trees several times as fast (``benchmarks/forest.py``). It compares single-precision numbers, so each
threshold becomes the single-precision number that parts them in the same way: every row ends in the same leaves. Leaves
are added up in single precision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.errors import needs

_log = logging.getLogger("shoal")

# Each takes about 40 bytes of a message, which protobuf bounds at 2 GB, and ten times that while it is made.
MOST_NODES = 20_000_000

Predict: TypeAlias = Callable[[NDArray[np.float32]], NDArray[np.float32]]

# Treelite's Operator -> ONNX's node mode, and the side to which a threshold may be rounded without parting rows anew.
_DOWN, _UP = -np.inf, np.inf
_MODES: Mapping[int, tuple[str, float]] = {
    2: ("BRANCH_LT", _UP),
    3: ("BRANCH_LEQ", _DOWN),
    4: ("BRANCH_GT", _DOWN),
    5: ("BRANCH_GTE", _UP),
}
_FIELDS = ("cleft", "cright", "split_index", "default_left", "leaf_value", "threshold", "cmp")


def load_forest(path: Path) -> Predict:
    """The scores FP32 ``[rows, 1]`` of features FP32 ``[rows, features]``, for a regression forest; on one thread.

    Raises:
        SetupError: Treelite is not installed.
    """
    with needs("serve"):
        import treelite

    model = treelite.Model.deserialize(str(path))
    try:
        predict = _onnx(model)
    except Exception as error:  # a library that does not fit, or a message beyond protobuf's 2 GB
        reason = next(iter(str(error).splitlines()), "")
        _log.warning("the forest runs in Treelite; ONNX Runtime cannot take it: %s: %s", type(error).__name__, reason)
        predict = None
    return predict or _gtil(model)


def _gtil(model: Any) -> Predict:
    import treelite

    # At the sizes of a request threads cost more than they bring.
    return lambda rows: treelite.gtil.predict(model, rows, nthread=1).reshape(-1, 1).astype(np.float32)


def _onnx(model: Any) -> Predict | None:
    """None where ONNX Runtime is not installed, or the forest has what its operator lacks."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        return None
    num_nodes = sum(int(model.get_tree_accessor(i).get_field("num_nodes")[0]) for i in range(model.num_tree))
    if num_nodes > MOST_NODES:
        _log.warning(
            "the forest runs in Treelite: it has %s nodes, ONNX Runtime gets at most %s",
            f"{num_nodes:,}", f"{MOST_NODES:,}",
        )  # fmt: skip
        return None
    attributes = describe(model)
    if attributes is None:
        return None
    import onnxruntime
    from onnx import TensorProto, helper

    node = helper.make_node("TreeEnsembleRegressor", ["X"], ["Y"], domain="ai.onnx.ml", **attributes)
    graph = helper.make_graph(
        [node],
        "forest",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [None, model.num_feature])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [None, 1])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    made = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    session = onnxruntime.InferenceSession(made, options, providers=["CPUExecutionProvider"])
    return lambda rows: np.asarray(session.run(None, {"X": np.ascontiguousarray(rows)})[0], np.float32)


def describe(model: Any) -> dict[str, Any] | None:
    """The attributes of ONNX's TreeEnsembleRegressor (ai.onnx.ml 3) for a Treelite model.

    None where it cannot be one: it has several outputs, categories, a postprocessor, or compares for equality.
    """
    header = model.get_header_accessor()
    scalars = [header.get_field(name).tolist() for name in ("num_target", "num_class", "leaf_vector_shape")]
    if scalars != [[1], [1], [1, 1]] or header.get_field("postprocessor") != "identity":
        return None
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_FIELDS, "tree", "node")}
    for index in range(model.num_tree):
        tree = model.get_tree_accessor(index)
        if tree.get_field("has_categorical_split")[0]:
            return None
        for name in _FIELDS:
            columns[name].append(tree.get_field(name))
        size = int(tree.get_field("num_nodes")[0])
        columns["tree"].append(np.full(size, index))
        columns["node"].append(np.arange(size))
    column = {name: np.concatenate(parts) for name, parts in columns.items()}
    is_leaf = column["cleft"] < 0
    used = set(column["cmp"][~is_leaf].tolist())
    if not used <= _MODES.keys():
        return None
    modes = np.array([_MODES[code][0] if code in used else "LEAF" for code in range(max(used, default=0) + 1)])
    leaves = {name: column[name][is_leaf].tolist() for name in ("tree", "node")}
    is_mean = bool(header.get_field("average_tree_output")[0])
    return {
        "n_targets": 1,
        "aggregate_function": "AVERAGE" if is_mean else "SUM",
        "base_values": header.get_field("base_scores").astype(np.float32).tolist(),
        "nodes_treeids": column["tree"].tolist(),
        "nodes_nodeids": column["node"].tolist(),
        "nodes_featureids": np.where(is_leaf, 0, column["split_index"]).tolist(),
        "nodes_modes": np.where(is_leaf, "LEAF", modes[np.where(is_leaf, 0, column["cmp"])]).tolist(),
        "nodes_values": np.where(is_leaf, 0, round_thresholds(column["threshold"], column["cmp"])).tolist(),
        "nodes_truenodeids": np.where(is_leaf, 0, column["cleft"]).tolist(),
        "nodes_falsenodeids": np.where(is_leaf, 0, column["cright"]).tolist(),
        "nodes_missing_value_tracks_true": np.where(is_leaf, 0, column["default_left"]).tolist(),
        "target_treeids": leaves["tree"],
        "target_nodeids": leaves["node"],
        "target_ids": [0] * len(leaves["tree"]),
        "target_weights": column["leaf_value"][is_leaf].astype(np.float32).tolist(),
    }


def round_thresholds(thresholds: NDArray[Any], comparisons: NDArray[Any]) -> NDArray[np.float32]:
    """Thresholds in single precision that part single-precision numbers as ``thresholds`` do.

    ``x <= t`` and ``x > t`` hold for the same numbers with the greatest one not above ``t``, ``x < t`` and ``x >= t``
    with the least one not below it.
    """
    sides = np.array([_MODES[code][1] if code in _MODES else _DOWN for code in range(int(comparisons.max()) + 1)])
    side = sides[comparisons]
    with np.errstate(over="ignore"):  # infinity is a number beyond single precision
        rounded = thresholds.astype(np.float32)
        beyond = np.where(side == _DOWN, rounded > thresholds, rounded < thresholds)
        return np.where(beyond, np.nextafter(rounded, side.astype(np.float32)), rounded)

"""A Treelite forest on the host: by ONNX Runtime, or by Treelite's own engine where that cannot be.

ONNX Runtime walks trees several times as fast (``benchmarks/forest.py``). It compares single-precision numbers, so each
threshold becomes the single-precision number that parts them in the same way: every row ends in the same leaves. Leaves
are added up in single precision, and what a forest makes of the sums is NumPy's.
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
from shoal.forests.postprocessing import POSTPROCESSORS, postprocess

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
_FIELDS = ("cleft", "cright", "split_index", "default_left", "threshold", "cmp")


def load_forest(path: Path) -> Predict:
    """What a forest says of features FP32 ``[rows, features]``: FP32 ``[rows, outputs]``; on one thread.

    A regressor gives one score, a classifier the chances of its classes; one of two classes may give the second's alone
    (``Forest.num_classes`` of `shoal.forests.checkpoints` tells).

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

    num_outputs = _num_outputs(model)

    def predict(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        # At the sizes of a request threads cost more than they bring.
        values = treelite.gtil.predict(model, rows, nthread=1)
        return np.asarray(values.reshape(len(rows), num_outputs), np.float32)

    return predict


def _num_outputs(model: Any) -> int:
    """Treelite gives every target as many values as the one with the most classes has."""
    header = model.get_header_accessor()
    return int(header.get_field("num_target")[0]) * int(header.get_field("num_class").max())


def _onnx(model: Any) -> Predict | None:
    """None where ONNX Runtime is not installed, or the forest has what its operator lacks."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        return None
    trees = [model.get_tree_accessor(i) for i in range(model.num_tree)]
    num_nodes = sum(int(tree.get_field("num_nodes")[0]) + len(tree.get_field("leaf_vector")) for tree in trees)
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
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [None, attributes["n_targets"]])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    made = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    session = onnxruntime.InferenceSession(made, options, providers=["CPUExecutionProvider"])
    finish = _finish(model)
    return lambda rows: finish(np.asarray(session.run(None, {"X": np.ascontiguousarray(rows)})[0], np.float32))


def _finish(model: Any) -> Predict:
    """From the sums of the leaves to what the forest says."""
    header = model.get_header_accessor()
    name, (alpha,) = header.get_field("postprocessor"), header.get_field("sigmoid_alpha").tolist()
    base = header.get_field("base_scores").astype(np.float32)
    classes, num_outputs = header.get_field("class_id"), _num_outputs(model)
    counts = np.full(num_outputs, 1, np.float32)
    if header.get_field("average_tree_output")[0]:  # of the trees that are for all classes, and of a class's own
        own = np.bincount(classes[classes >= 0], minlength=num_outputs)
        counts = np.maximum(own + (classes < 0).sum(), 1).astype(np.float32)
    return lambda sums: postprocess(sums / counts + base, name, alpha=alpha)


def describe(model: Any) -> dict[str, Any] | None:
    """The attributes of ONNX's TreeEnsembleRegressor (ai.onnx.ml 3) that adds up the leaves of a Treelite model.

    None where it cannot be one: it has several targets, categories, leaves of several kinds, a postprocessor that is
    not ours, or compares for equality.
    """
    header = model.get_header_accessor()
    (num_targets,), (num_classes, *_) = header.get_field("num_target"), header.get_field("num_class")
    classes, (_, width) = header.get_field("class_id"), header.get_field("leaf_vector_shape").tolist()
    is_plain = num_targets == 1 and ((classes >= 0).all() if width == 1 else (classes < 0).all())
    if not is_plain or width not in (1, num_classes) or header.get_field("postprocessor") not in POSTPROCESSORS:
        return None
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_FIELDS, "tree", "node", "weight", "output")}
    for index in range(model.num_tree):
        tree = model.get_tree_accessor(index)
        weights = _leaves(tree, width)
        if weights is None or tree.get_field("has_categorical_split")[0]:
            return None
        for name in _FIELDS:
            columns[name].append(tree.get_field(name))
        size = int(tree.get_field("num_nodes")[0])
        columns["tree"].append(np.full(size, index))
        columns["node"].append(np.arange(size))
        columns["weight"].append(weights.astype(np.float32).ravel())
        outputs = np.arange(width) if width > 1 else classes[index : index + 1]
        columns["output"].append(np.tile(outputs, len(weights)))
    column = {name: np.concatenate(parts) for name, parts in columns.items()}
    is_leaf = column["cleft"] < 0
    used = set(column["cmp"][~is_leaf].tolist())
    if not used <= _MODES.keys():
        return None
    modes = np.array([_MODES[code][0] if code in used else "LEAF" for code in range(max(used, default=0) + 1)])
    leaves = {name: np.repeat(column[name][is_leaf], width).tolist() for name in ("tree", "node")}
    return {
        "n_targets": int(num_classes),
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
        "target_ids": column["output"].tolist(),
        "target_weights": column["weight"].tolist(),
    }


def _leaves(tree: Any, width: int) -> NDArray[Any] | None:
    """What each leaf adds, ``[leaves, width]``; None where some hold a list of values and others do not."""
    is_leaf = tree.get_field("cleft") < 0
    begins, ends = (tree.get_field(f"leaf_vector_{side}")[is_leaf].astype(np.int64) for side in ("begin", "end"))
    if width == 1 and (begins == ends).all():
        return np.asarray(tree.get_field("leaf_value")[is_leaf])[:, None]
    if (ends - begins != width).any():
        return None
    return np.asarray(tree.get_field("leaf_vector")[begins[:, None] + np.arange(width)])


def round_forest(model: Any) -> bool:
    """Round every threshold of a Treelite model to single precision; whether that changed any.

    Rows are FP32 and end in the same leaves as before. An engine that computes in single precision, as nvForest does on
    a GPU, would else round to the nearest and send some of them the other way.
    """
    is_changed = False
    for index in range(model.num_tree):
        tree = model.get_tree_accessor(index)
        thresholds = tree.get_field("threshold")
        if thresholds.dtype == np.float32:
            return False
        rounded = round_thresholds(thresholds, tree.get_field("cmp")).astype(thresholds.dtype)
        is_changed = is_changed or not np.array_equal(rounded, thresholds)
        tree.set_field("threshold", rounded)
    return is_changed


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

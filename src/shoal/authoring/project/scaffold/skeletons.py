"""Skeletons in a user's project: a component or a model, a pipeline that uses it, and a test of the pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.authoring.project.draft import Draft
from shoal.authoring.project.scaffold import text
from shoal.authoring.project.scaffold.names import check_distinct, check_name, class_name, find_project_folders
from shoal.authoring.repository.config import CONFIG
from shoal.authoring.repository.sizes import Largest
from shoal.errors import InputError
from shoal.kit.component.spec import STRING, TensorSpec

COMPONENT_CATEGORIES = ("preprocess", "postprocess")
INPUTS = (TensorSpec("TEXT", STRING, (1,)),)
OUTPUTS = (TensorSpec("LENGTH", "TYPE_FP32", (1,)),)
STREAMED = (TensorSpec("WORD", STRING, (1,)),)  # outputs of a streaming component
_STOP = TensorSpec("stop", "TYPE_BOOL", (1,), is_optional=True)
MAX_BATCH_SIZE = 512  # as in shoal's own model folders; less if rows are large
_MAX_BYTES, _MAX_TEXT = 16 * 2**20, 64 * 2**20  # bytes per batch: of numbers, in a container's /dev/shm; of texts
MAX_FEATURES = 10_000  # greatest number that least squares can fit here
_WEIGHTS = 'parameters {\n  key: "artifacts"\n  value: { string_value: "weights.json" }\n}\n'
_COUNTS = ("TYPE_INT32", "TYPE_INT64", "TYPE_UINT32", "TYPE_UINT64", "TYPE_FP32", "TYPE_FP64")
_LENGTHS = f"[{', '.join(f'[{len(each)}]' for each in text.TEXTS)}]"


@dataclass(frozen=True)
class Skeleton:
    """New files of a project, not written yet.

    ``pipeline`` is the name of the ensemble that uses the new model, ``test`` the path of its test in the project.
    ``said`` are notes for the user. ``needs_artifacts``: the pipeline needs artifacts that no model folder contains.
    """

    draft: Draft
    pipeline: str
    test: str
    said: tuple[str, ...]
    needs_artifacts: bool


def draft_component(
    name: str,
    *,
    inputs: Sequence[TensorSpec] = INPUTS,
    outputs: Sequence[TensorSpec] = OUTPUTS,
    category: str = "preprocess",
    project: Path | str = ".",
    pipeline: str = "",
    is_streaming: bool = False,
) -> Skeleton:
    """Draft a component with the declared tensors that works without changes, a pipeline that runs it, and a test.

    The component counts characters if its input is one text, ``STRING [1]``, and its output one number, ``[1]``.
    Otherwise it returns zeros or empty texts. With ``is_streaming`` it sends several answers per request: one per word
    if its input and its output are one text each, otherwise two answers of zeros or empty texts. The pipeline is called
    ``NAME_alone``, and the test is named after the component; if ``pipeline`` is given, both have that name.

    Raises:
        InputError: a name or the category cannot be used, or two tensors have the same name.
    """
    root = Path(project)
    available = find_project_folders(root)
    tested, pipeline = pipeline or name, pipeline or alone(name)
    for each in (name, pipeline):
        check_name(each, available)
    check_category(category)
    check_distinct(inputs, outputs)
    values = {"class_name": class_name(name), "name": tested, "pipeline": pipeline}
    takes, gives = (", ".join(tensor.name for tensor in tensors) for tensors in (inputs, outputs))
    comment = f"{takes} in, {gives} out."
    if is_streaming:
        check_distinct((*inputs, _STOP), outputs)
        tensors = text.write_tensors((*inputs, _STOP), outputs)
        own = text.fill("streaming.pbtxt", comment=comment, name=name, tensors=tensors)
        size, test = 1, "test_streaming.py"
    else:
        own = _write_config(name, comment, inputs, outputs)
        size, test = _batch_size(inputs, outputs), "test_expected.py"
    files = {
        f"{category}/{name}/{CONFIG}": own,
        f"{category}/{name}/1/model.py": _write_code(inputs, outputs, values, is_streaming=is_streaming),
    }
    request, expected = _write_expected(inputs, outputs, is_streaming=is_streaming)
    config = text.write_alone(pipeline, name, size, inputs, outputs)
    test = text.fill(test, **values, request=request, expected=expected)
    return make_skeleton(root, pipeline, config, tested, test, files)


def draft_model(name: str, num_features: int, *, project: Path | str = ".") -> Skeleton:
    """Draft a linear model in NumPy, ``FEATURES FP32 [num_features]`` to ``SCORE FP32 [1]``, and a script that fits it.

    Until the script has fitted the model, the score is the mean of the features.

    Raises:
        InputError: a name cannot be used, or the number of features is out of range.
    """
    root = Path(project)
    available = find_project_folders(root)
    pipeline, folder = alone(name), f"models/{name}"
    for each in (name, pipeline):
        check_name(each, available)
    if not 1 <= num_features <= MAX_FEATURES:
        raise InputError(
            f"A linear model of {num_features:,} features cannot be fitted here.",
            f"Give a number from 1 to {MAX_FEATURES:,}: --features 4",
        )
    inputs = (TensorSpec("FEATURES", "TYPE_FP32", (num_features,)),)
    outputs = (TensorSpec("SCORE", "TYPE_FP32", (1,)),)
    names = {"class_name": class_name(name), "name": name, "pipeline": pipeline, "path": f"{folder}/train.py"}
    values = {**names, "num_features": num_features, "num_rows": num_features + 20}
    files = {
        f"{folder}/{CONFIG}": _write_config(
            name, "A linear model in NumPy; train.py fits it.", inputs, outputs, _WEIGHTS
        ),
        f"{folder}/1/model.py": text.fill("linear.py", **values),
        f"{folder}/1/weights.json": json.dumps({"weights": [1 / num_features] * num_features, "bias": 0.0}) + "\n",
        f"{folder}/train.py": text.fill("train.py", **values),
    }
    config = text.write_alone(pipeline, name, _batch_size(inputs, outputs), inputs, outputs)
    said = (f"Until {folder}/train.py has fitted it, {name} returns the mean of its features.",)
    return make_skeleton(root, pipeline, config, name, text.fill("test_linear.py", **values), files, said)


# --- parts of every skeleton -------------------------------------------------------------------------------------


def alone(name: str) -> str:
    """Return the name of the pipeline that runs only the model ``name``."""
    return f"{name[:58]}_alone"  # a name has at most 64 characters


def check_category(category: str) -> None:
    """Check that ``category`` is a category of components, ``preprocess`` or ``postprocess``.

    Raises:
        InputError: the category is another.
    """
    if category not in COMPONENT_CATEGORIES:
        known = ", ".join(COMPONENT_CATEGORIES)
        raise InputError(f"Unknown --category {category!r} for components.", f"Known: {known}.")


def make_skeleton(
    root: Path,
    pipeline: str,
    config: str,
    tested: str,
    test: str,
    files: Mapping[str, str | Path],
    said: Sequence[str] = (),
    *,
    needs_artifacts: bool = False,
) -> Skeleton:
    """Build a skeleton from ``files``, the pipeline's ``config.pbtxt``, the text of the test, and a ``.gitignore``.

    ``config`` is the text of ``config.pbtxt``. An existing ``.gitignore`` is kept. The test's file is named after
    ``tested``, a model or a pipeline: ``word-length`` gives ``test_word_length.py``.
    """
    path = f"tests/test_{re.sub('[.-]', '_', tested)}.py"
    made = {**files, f"ensembles/{pipeline}/{CONFIG}": config, f"ensembles/{pipeline}/1/.gitkeep": "", path: test}
    if not (root / ".gitignore").exists():
        made[".gitignore"] = text.fill("gitignore")
    return Skeleton(Draft(root, made), pipeline, path, tuple(said), needs_artifacts)


# --- configuration and code --------------------------------------------------------------------------------------


def _write_config(
    name: str, comment: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], parameters: str = ""
) -> str:
    return text.fill(
        "python.pbtxt",
        comment=comment,
        name=name,
        size=_batch_size(inputs, outputs),
        tensors=text.write_tensors(inputs, outputs),
        parameters=parameters,
    )


def _batch_size(*sides: Sequence[TensorSpec]) -> int:
    """Return a maximum batch size whose tensors fit into shared memory: a power of two, 2 or more."""
    rows = MAX_BATCH_SIZE
    for is_text, most in ((True, _MAX_TEXT), (False, _MAX_BYTES)):
        tensors = [tensor for side in sides for tensor in side if (tensor.dtype == STRING) == is_text]
        rows = min(rows, most // max(1, sum(Largest(rows=1).num_bytes(tensor) for tensor in tensors)))
    return int(2 ** max(1, rows.bit_length() - 1))


def _is_countable(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    if len(inputs) != 1 or len(outputs) != 1 or outputs[0].dtype not in _COUNTS:
        return False
    return inputs[0].dtype == STRING and inputs[0].dims == outputs[0].dims == (1,)


def _are_words(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Whether the input and the output are one text each, so that a streaming component can answer word by word."""
    return [(tensor.dtype, tensor.dims) for tensor in (*inputs, *outputs)] == [(STRING, (1,))] * 2


def _write_code(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], values: Mapping[str, str], *, is_streaming: bool
) -> str:
    if is_streaming and _are_words(inputs, outputs):
        return text.fill("words.py", **values, input=inputs[0].name, output=outputs[0].name)
    if not is_streaming and _is_countable(inputs, outputs):
        names = {"input": inputs[0].name, "output": outputs[0].name, "dtype": text.name_dtype(outputs[0])}
        return text.fill("count.py", **values, **names)
    given, rows = ("inputs", "1") if is_streaming else ("batch", "rows")
    comments = [f'# {given}["{tensor.name}"]: {text.describe(tensor, rows)}' for tensor in inputs]
    entries = [(tensor.name, text.write_nothing(tensor, 1 if is_streaming else "num_rows")) for tensor in outputs]
    return text.fill(
        "pieces.py" if is_streaming else "zeros.py",
        **values,
        nothing="empty texts" if all(tensor.dtype == STRING for tensor in outputs) else "zeros",
        inputs="\n".join(f"        {line}"[:120] for line in comments),
        outputs=text.write_entries(entries, 16 if is_streaming else 12),
    )


def _write_expected(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], *, is_streaming: bool
) -> tuple[str, str]:
    """Write a test's request and its expected answer as Python source; for a streaming component, all answers."""
    if is_streaming:
        request = [(tensor.name, _write_ones(tensor, 1)) for tensor in inputs]
        zeros = [(tensor.name, text.write_nothing(tensor, 1)) for tensor in outputs]
        answers = [f"    {{\n{text.write_entries(zeros, 8)}\n    }}," for _ in range(2)]
        if _are_words(inputs, outputs):
            request = [(inputs[0].name, f'["{text.TEXTS[0]}"]')]
            answers = [f'    {{"{outputs[0].name}": [[b"{word}"]]}},' for word in text.TEXTS[0].split()]
        return text.write_entries(request, 4), "\n".join(answers)
    request = [(tensor.name, _write_ones(tensor)) for tensor in inputs]
    zeros = [(tensor.name, text.write_nothing(tensor)) for tensor in outputs]
    expected = [(outputs[0].name, _LENGTHS)] if _is_countable(inputs, outputs) else zeros
    return text.write_entries(request, 4), text.write_entries(expected, 4)


def _write_ones(tensor: TensorSpec, rows: int = text.ROWS) -> str:
    """Write an array for a request as Python source; the component in the test ignores its values."""
    if tensor.dtype == STRING:
        return text.write_sample(tensor) if rows > 1 else text.write_nothing(tensor, rows)
    return text.write_nothing(tensor, rows).replace("np.zeros(", "np.ones(", 1)

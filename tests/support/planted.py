"""Mistakes to plant into a small repository, each with a corrected twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


# A file's new content; None takes it away; (old, new) replaces a text in it; bytes are written as they are, and so is
# what a callable gives, which is asked only when it is needed.
Edit: TypeAlias = "str | bytes | Link | tuple[str, str] | Callable[[], bytes] | None"

MODEL = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * np.float32(2))]))
        return responses
"""
# For decoupled models.
SENDS = (
    MODEL.replace(
        'responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * np.float32(2))]))',
        'self.send(request, pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * np.float32(2))]))',
    )
    .replace("        responses = []\n", "")
    .replace(
        "        return responses\n",
        """        return None

    def send(self, request, response):
        sender = request.get_response_sender()
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
    )
)
JOIN = MODEL.replace(
    'request, "X").as_numpy()', 'request, "A").as_numpy() + pb_utils.get_input_tensor_by_name(request, "B").as_numpy()'
)


BATCHING = "dynamic_batching { default_queue_policy { max_queue_size: 64 } }\n"
UNBOUNDED = "dynamic_batching { }\n"


def config(name: str, inputs: tuple[str, ...] = ("X",), batching: str = BATCHING) -> str:
    tensors = "\n".join(f'input {{ name: "{x}" data_type: TYPE_FP32 dims: [ 4 ] }}' for x in inputs)
    return f'''name: "{name}"
backend: "python"
max_batch_size: 8
{tensors}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }}
{batching}instance_group [ {{ kind: KIND_CPU }} ]
'''


ENSEMBLE = """name: "all"
platform: "ensemble"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling {
  step [
    {
      model_name: "first"
      model_version: -1
      input_map { key: "X" value: "IN" }
      output_map { key: "Y" value: "first_y" }
    },
    {
      model_name: "left"
      model_version: -1
      input_map { key: "X" value: "first_y" }
      output_map { key: "Y" value: "left_y" }
    },
    {
      model_name: "right"
      model_version: -1
      input_map { key: "X" value: "first_y" }
      output_map { key: "Y" value: "right_y" }
    },
    {
      model_name: "join"
      model_version: -1
      input_map { key: "A" value: "left_y" }
      input_map { key: "B" value: "right_y" }
      output_map { key: "Y" value: "OUT" }
    }
  ]
}
"""
# first fans out to left and right, which join. A folder's path ends with a slash.
BASE: dict[str, Edit] = {
    "first/config.pbtxt": config("first"),
    **{f"{name}/config.pbtxt": config(name, batching=UNBOUNDED) for name in ("left", "right")},
    "join/config.pbtxt": config("join", ("A", "B")),
    **{f"{name}/1/model.py": MODEL for name in ("first", "left", "right")},
    "join/1/model.py": JOIN,
    "all/config.pbtxt": ENSEMBLE,
    "all/1/.gitkeep": "",
}


@dataclass(frozen=True)
class Plant:
    """One mistake. ``good`` are edits of the base, ``bad`` edits of that.

    ``file`` is where the finding is, from the repository's root, and ``line`` a text of the line that it names, empty
    where it names none. ``core`` is a pattern of what Triton says when it loads ``model``; empty where it loads, or
    where what would refuse it is not here. ``is_page`` is set where the mistake is the one of the rule's page.
    """

    name: str
    rule: str
    file: str
    line: str
    bad: Mapping[str, Edit]
    good: Mapping[str, Edit] = field(default_factory=dict)
    core: str = ""
    model: str = "all"
    target: str | None = None
    is_page: bool = False

    @property
    def has_environment(self) -> bool:
        """Whether Triton unpacks an archive for it: from then on the server's working directory is in there."""
        return any(path.endswith(".tar.gz") for path in (*self.good, *self.bad))

    def write(self, folder: Path, *, is_bad: bool) -> Path:
        """Write the repository, with the mistake or corrected."""
        files: dict[str, Edit] = dict(BASE)
        for edits in (self.good, self.bad if is_bad else {}):
            for path, edit in edits.items():
                files[path] = edited(files.get(path), edit, path)
        for path, content in files.items():
            write(folder / path, content, is_folder=path.endswith("/"))
        return folder


def change(
    file: str,
    rule: str,
    name: str,
    old: str,
    new: str,
    core: str = "",
    line: str | None = None,
    *,
    good: Mapping[str, Edit] | None = None,
    model: str = "all",
    target: str | None = None,
) -> Plant:
    """Plant another text into a file; the finding is on the first line of that, where no other is given."""
    line = new.strip().split("\n")[0] if line is None else line
    return Plant(name, rule, file, line, {file: (old, new)}, good or {}, core, model, target)


def changes(
    file: str,
    *rows: tuple[str, ...],
    good: Mapping[str, Edit] | None = None,
    model: str = "all",
    target: str | None = None,
) -> tuple[Plant, ...]:
    """Plant each row: a rule, a name, the old text and the new one, then words of core and the line if they matter."""
    return tuple(change(file, *row, good=good, model=model, target=target) for row in rows)


def edited(content: Edit, edit: Edit, path: str) -> Edit:
    if not isinstance(edit, tuple):
        return edit
    assert isinstance(content, str)
    assert edit[0] in content, f"{path} has no {edit[0]!r}"
    return content.replace(*edit, 1)


def write(path: Path, content: Edit, *, is_folder: bool = False) -> None:
    if content is None:
        return
    if is_folder:
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Link):
        path.symlink_to(content.target)
        return
    assert not isinstance(content, tuple)
    if callable(content):
        content = content()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

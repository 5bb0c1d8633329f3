"""Mistakes to plant into a small repository, each with a corrected twin."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

from shoal.authoring.check.reports import read_pages, split_entries


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


class Page:
    """The mistake that the diff of the rule's page shows."""


# A file's new content; None takes it away; (old, new) replaces a text in it, and ON_PAGE the corrected lines of the
# rule's page by those with the mistake; bytes are written as they are, and so is what a callable gives, which is asked
# only when it is needed.
Edit: TypeAlias = "str | bytes | Link | Page | tuple[str, str] | Callable[[], bytes] | None"
ON_PAGE = Page()

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
    where what would refuse it is not here.
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

    @property
    def has_environment(self) -> bool:
        """Whether Triton unpacks an archive for it: from then on the server's working directory is in there."""
        return any(path.endswith(".tar.gz") for path in (*self.good, *self.bad))

    def write(self, folder: Path, *, is_bad: bool) -> Path:
        """Write the repository, with the mistake or corrected."""
        files: dict[str, Edit] = dict(BASE)
        for edits in (self.good, self.bad if is_bad else {}):
            for path, edit in edits.items():
                found = files.get(path)
                files[path] = edit_as_page(self.rule, found) if isinstance(edit, Page) else _edited(found, edit, path)
        for path, content in files.items():
            write(folder / path, content, is_folder=path.endswith("/"))
        return folder


@cache
def read_diff(rule: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the lines of a rule's diff that are wrong, and those that are right, without their remarks."""
    entries = split_entries("\n".join(read_pages().values()))
    diff = re.sub(r"  # .*", "", entries[rule].partition("```diff\n")[2].partition("```")[0]).splitlines()
    wrong, right = (tuple(line[2:].strip() for line in diff if line.startswith(f"{sign} ")) for sign in "-+")
    return wrong, right


def edit_as_page(rule: str, content: Edit) -> str:
    """Put the wrong lines of a rule's page in the place of the right ones; at the end, if there are none."""
    wrong, right = read_diff(rule)
    assert isinstance(content, str)
    assert all(line in content for line in right), (rule, right)
    for number, line in enumerate(right):
        content = content.replace(line, "\n".join(wrong) if number == 0 else "", 1)
    return content if right else "\n".join((content.rstrip("\n"), *wrong, ""))


def _edited(content: Edit, edit: Edit, path: str) -> Edit:
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
    assert not isinstance(content, tuple | Page)
    if callable(content):
        content = content()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

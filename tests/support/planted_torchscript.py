"""Mistakes about TorchScript models, for Triton's PyTorch backend."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from tests.support.page_plants import page
from tests.support.planted import Edit, Plant, change

CONFIG = "net/config.pbtxt"
FILE = "net/1/model.pt"
INT64, FP32 = "TYPE_INT64", "TYPE_FP32"


@cache
def archive(kind: str = "encoder", *, is_traced: bool = False) -> bytes:
    """A small module, saved by torch."""
    import torch

    from tests.support import modules

    module, examples = modules.make(kind)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved: Any = torch.jit.trace(module, examples) if is_traced else torch.jit.script(module)
        torch.jit.save(saved, file)
    return file.getvalue()


def traced(kind: str = "encoder") -> bytes:
    return archive(kind, is_traced=True)


@cache
def weights() -> bytes:
    """Return a file as torch.save writes it."""
    import torch

    from tests.support import modules

    file = io.BytesIO()
    torch.save(modules.make("encoder")[0].state_dict(), file)
    return file.getvalue()


def config(
    inputs: tuple[tuple[str, str], ...] = (("INPUT__0", INT64), ("INPUT__1", INT64)),
    outputs: tuple[str, ...] = ("OUTPUT__0",),
    more: str = "",
) -> str:
    lines = [f'input {{ name: "{name}" data_type: {dtype} dims: [ -1 ] }}' for name, dtype in inputs]
    lines += [f'output {{ name: "{name}" data_type: TYPE_FP32 dims: [ 1 ] }}' for name in outputs]
    head = 'name: "net"\nbackend: "pytorch"\nmax_batch_size: 8'
    batching = "dynamic_batching { default_queue_policy { max_queue_size: 64 } }"
    return "\n".join([head, *lines, batching, "instance_group [ { kind: KIND_CPU } ]", more, ""])


def good(content: Callable[[], bytes] = archive, **fields: Any) -> dict[str, Edit]:
    return {CONFIG: config(**fields), FILE: content}


ON_GPU = ("KIND_CPU", "KIND_GPU")
NAMED = (("ids", INT64), ("mask", INT64))
IN_PYTHON = 'runtime: "model.py"'

PLANTS = (
    *(page(f"torchscript-{part}", CONFIG, good()) for part in ("inputs", "names")),
    page("torchscript-outputs", CONFIG, good(), line="output"),
    page("torchscript-dtype", CONFIG, good(more=IN_PYTHON)),
    Plant("a state_dict", "torchscript-foreign", FILE, "", {FILE: weights}, good()),
    Plant("a web page", "torchscript-foreign", FILE, "", {FILE: b"<!DOCTYPE html><html></html>"}, good()),
    Plant(
        "an input too many, traced",
        "torchscript-inputs",
        CONFIG,
        "input",
        {CONFIG: config(inputs=(*NAMED, ("more", FP32)))},
        good(traced),
    ),
    Plant(
        "an argument with a default",
        "torchscript-inputs",
        CONFIG,
        "input",
        {FILE: partial(archive, "optional")},
        good(),
    ),
    Plant(
        "an index twice",
        "torchscript-names",
        CONFIG,
        "OUTPUT__0",
        {CONFIG: config(outputs=("OUTPUT__0", "SECOND__0"))},
        good(partial(archive, "pair"), outputs=("OUTPUT__0", "OUTPUT__1")),
    ),
    Plant(
        "an argument's name in another's place",
        "torchscript-names",
        CONFIG,
        "mask",
        {CONFIG: config(inputs=(("mask", INT64), ("tokens", INT64)))},
        good(inputs=NAMED),
    ),
    Plant(
        "indices out of order for Python",
        "torchscript-names",
        CONFIG,
        "INPUT__1",
        {CONFIG: config(inputs=(("INPUT__1", INT64), ("INPUT__0", INT64)), more=IN_PYTHON)},
        good(more=IN_PYTHON),
    ),
    change(
        CONFIG, "torchscript-outputs", "an output's index too high", "OUTPUT__0", "OUTPUT__1", "", "output", good=good()
    ),
    Plant("a dict of outputs", "torchscript-outputs", CONFIG, "output", {FILE: partial(archive, "dict")}, good()),
    Plant(
        "a trace that keeps the device of its example",
        "torchscript-device",
        FILE,
        "",
        {FILE: partial(traced, "placed")},
        {**good(partial(archive, "placed")), CONFIG: config().replace(*ON_GPU)},
    ),
    Plant("a GPU on the host", "torchscript-device", FILE, "", {FILE: partial(archive, "on gpu")}, good()),
    Plant("a trace for the host alone", "torchscript-bound", FILE, "", {FILE: partial(traced, "placed")}, good()),
    change(
        CONFIG,
        "kind-unsupported",
        "an encoder of the embedded server whose devices its backend chooses",
        "KIND_CPU",
        "KIND_MODEL",
        "",
        "instance_group",
        good=good(),
        target="embedded",
    ),
)

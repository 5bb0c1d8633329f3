"""Rules for weights that a backend opens by the path in a parameter: TensorRT-LLM, FasterTransformer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as IniError
from pathlib import Path, PurePosixPath

from shoal.authoring.check.findings import Findings, Rule, Severity
from shoal.authoring.check.models import Model, Repository, is_file
from shoal.system.files import read_text

RELATIVE = Rule("weights-path-relative", Severity.WARNING)
PARALLEL = Rule("checkpoint-parallel", Severity.ERROR)
DTYPE = Rule("checkpoint-dtype", Severity.WARNING)

# Parameters with the path of the model, for backends that open no other file: fastertransformer, tensorrtllm.
PATHS = frozenset({"model_checkpoint_path", "gpt_model_path", "engine_dir", "encoder_model_path", "visual_model_path"})
FASTER = "fastertransformer"
DIVIDED = re.compile(r"([1-9][0-9]{0,3})-gpu")  # a folder that its converters write, for this many GPUs
_INI = "config.ini"
_MAX_SHOWN = 200  # characters of a path in a message
_SIZES = ("tensor_para_size", "infer_gpu_num")  # entries of the converters' config.ini


def find(model: Model, _: Repository) -> Findings:
    """Find paths of weights that depend on the server's folder, and checkpoints that do not fit their configuration."""
    for name in sorted(model.parameters.keys() & PATHS):
        path = model.parameters[name][:_MAX_SHOWN]
        if path and not path.startswith(("/", "$")) and "${" not in path:
            yield RELATIVE.at(
                model.at_entry("parameters", key=name, within=("value", "string_value")),
                f"{name} of {model.name} is {path}: the server looks for it in the folder that it was started in.",
                f"Write the absolute path: /.../{path.removeprefix('./')}",
            )
    if model.backend == FASTER:
        yield from _find_faster(model, model.parameters)


def _find_faster(model: Model, given: Mapping[str, str]) -> Findings:
    """Compare a FasterTransformer model's parameters with the folder of its weights, and the ``config.ini`` there."""
    folder = PurePosixPath(given.get("model_checkpoint_path", "").rstrip("/"))
    size = given.get("tensor_para_size", "")
    place = model.at_entry("parameters", key="tensor_para_size", within=("value", "string_value"))
    said = {folder.name: found[1]} if (found := DIVIDED.fullmatch(folder.name)) else {}
    # The path is that of the container; the folder is beside config.pbtxt, or in the version folder.
    places = [Path(folder), model.folder / folder.name, *(model.folder / str(v) / folder.name for v in model.versions)]
    found_in = (place / _INI for place in places if place.is_absolute() and is_file(place / _INI))
    path = next(found_in, None) if folder.name else None
    entries = _read_ini(path) if path else {}
    said |= {f"{name} of {_INI}": entries[name] for name in _SIZES if name in entries}
    for where, number in said.items():
        if size.isdecimal() and number.isdecimal() and number != size:
            what = f"tensor_para_size of {model.name} is {size}, and its weights are for {number} ({where})."
            yield PARALLEL.at(place, what, f"Write tensor_para_size {number}, or convert the weights for {size}.")
    held, wanted = entries.get("weight_data_type", ""), given.get("data_type", "")
    if path and {held, wanted} == {"fp16", "bf16"}:
        yield DTYPE.at(
            model.at_entry("parameters", key="data_type", within=("value", "string_value")),
            f"data_type of {model.name} is {wanted}, and {_INI} says that its weights are {held}: each"
            " is converted, and rounded.",
            f"Write data_type {held}, or convert the model with --weight-data-type {wanted}.",
        )


def _read_ini(path: Path) -> dict[str, str]:
    """Read the entries of all sections, the first of a name; none if the file is not of this form."""
    parser = ConfigParser(inline_comment_prefixes=(";", "#"), strict=False, interpolation=None)
    try:
        parser.read_string(read_text(path))
    except (OSError, ValueError, IniError):
        return {}
    sections = [dict(parser[name]) for name in parser.sections()]
    return {name: value for section in reversed(sections) for name, value in section.items()}

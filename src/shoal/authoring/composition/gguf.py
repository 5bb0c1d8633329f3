"""Weights in a GGUF file, converted once to a folder of Hugging Face's layout by transformers' reader."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import shoal
from shoal.errors import ArtifactError, SetupError, needs
from shoal.system.paths import aside, check_replaceable, exchange

GGUF = ".gguf"
_MARK = "converted.json"  # in a folder that was made here, and may be replaced
_LIBRARIES = ("gguf", "accelerate")  # which transformers' reader imports


def convert(file: Path, folder: Path) -> Path:
    """Write the language model in a GGUF file to ``folder``: dequantised, as safetensors, with its tokenizer.

    A folder of an earlier conversion is replaced. Returns the folder.

    Raises:
        InputError: the folder holds something else.
        SetupError: a library that reads the file is not installed.
        ArtifactError: the file is not GGUF, or transformers cannot read it.
    """
    check(file)
    check_replaceable(folder, _MARK)
    with needs("llm"):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from shoal.kit.encoders.encoder import quiet_transformers
    place = {"gguf_file": file.name, "local_files_only": True}
    try:
        with quiet_transformers(), aside(folder) as made:
            tokenizer: Any = AutoTokenizer.from_pretrained(file.resolve().parent, **place)
            model: Any = AutoModelForCausalLM.from_pretrained(file.resolve().parent, **place)
            # Its tensors are plain already, but transformers refuses to save a model that says it was quantised.
            model.hf_quantizer = None
            del model.config.quantization_config
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
            files = sorted(each.name for each in made.iterdir())
            mark = {"shoal": shoal.__version__, "from": str(file.resolve()), "files": files}
            (made / _MARK).write_text(json.dumps(mark, indent=1), encoding="utf-8")
            exchange(made, folder)
    except OSError as error:
        raise SetupError(f"{folder} cannot be written: {error}.", "Make space, or name another folder.") from None
    except Exception as error:  # its readers have no common class of errors
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:300].rstrip(".")
        fix = "Name the folder of the model that it was made from, in safetensors."
        raise ArtifactError(f"transformers cannot read {file}: {reason}.", fix) from None
    return folder


def check(file: Path) -> None:
    """Check that a file is GGUF, and that the libraries that read it are there; it loads none of them.

    Raises:
        SetupError: a library is missing.
        ArtifactError: the file cannot be read, or is of another kind.
    """
    try:
        with file.open("rb") as opened:
            is_gguf = opened.read(4) == b"GGUF"
    except OSError as error:
        raise ArtifactError(f"{file} cannot be read: {error.strerror}.", "Name one that this user may read.") from None
    if not is_gguf:
        raise ArtifactError(f"{file} is not a GGUF file: it does not begin with GGUF.", "Copy it again.")
    if missing := [name for name in _LIBRARIES if find_spec(name) is None]:
        raise SetupError(
            f"{' and '.join(missing)}, with which transformers reads {file}, {'are' if missing[1:] else 'is'} missing.",
            f"Type: pip install {' '.join(missing)}. Or name the folder of the model in safetensors.",
        )

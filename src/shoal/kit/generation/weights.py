"""Weights folder of a language model: which files it needs, checked before any library loads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ArtifactError
from shoal.kit.component.files import check_file, describe_bytes, read_json
from shoal.kit.component.parameters import Parameters
from shoal.kit.generation.tokenizer import TOKENIZER, TOKENIZER_CONFIG, find_specials, read_settings
from shoal.kit.text.tokenizer_files import check_folder, check_growth
from shoal.system.files import MAX_LARGE_TEXT
from shoal.system.machine import computes_bf16

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
DECODER = "decoder.onnx"  # in place of safetensors, for the engine on ONNX Runtime
OPENVINO, OPENVINO_WEIGHTS = "openvino_model.xml", "openvino_model.bin"  # likewise, for the engine on OpenVINO
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
_UNNAMED_CONTEXT = 2048
NONE, INT8, INT4 = QUANTIZED = ("none", "int8", "int4")  # forms of weights on transformers
DTYPES = ("float32", "bfloat16", "float16")
CACHE_TOKENS = 32768  # greatest default size of llm-hf's cache: 4 GiB with 32 layers of 8 heads of 64, in FP32
PAGE = 32  # tokens of that cache
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")  # in the name of a tensor
_DOWNLOAD = "Download it whole: hf download OWNER/MODEL --local-dir FOLDER"


@dataclass(frozen=True)
class Weights:
    """A checked weights folder in the Hugging Face layout.

    ``config`` is the object in ``config.json``. ``shards`` are the names of the safetensors files, or, without any, the
    name of the decoder in ONNX, or of OpenVINO's weights. ``vocabulary`` is the number of the model's token ids,
    ``context`` the greatest number of tokens of prompt and answer together. ``end_ids`` are the tokens that end an
    answer: those of ``generation_config.json``, or else of ``config.json``, and the tokenizer's end token.
    """

    folder: Path
    config: Mapping[str, Any]
    shards: tuple[str, ...]
    vocabulary: int
    context: int
    end_ids: tuple[int, ...]


def read_folder(parameters: Parameters, default: str = "") -> Path:
    """Return the weights folder that the parameter ``model`` names.

    Raises:
        ArtifactError: the parameter is not the absolute path of a folder.
    """
    folder = Path(parameters.text("model", default))
    if not folder.is_absolute() or not folder.is_dir():
        raise parameters.refusal("model", "expected the absolute path of a folder with weights", "/models/llama")
    return folder


def read_context(folder: Path) -> int:
    """Return the greatest number of tokens that a model reads, as its ``config.json`` says.

    Raises:
        ArtifactError: the file is missing, or has no such number.
    """
    config = read_json(folder / CONFIG, "model configuration")
    return _context(folder, _text_part(config))


def read_vocabulary(folder: Path) -> int | None:
    """Return the number of a model's token ids, if its ``config.json`` has it.

    Raises:
        ArtifactError: the file is missing or damaged.
    """
    found = _text_part(read_json(folder / CONFIG, "model configuration")).get("vocab_size")
    return found if isinstance(found, int) else None


def choose_dtype(weights: Weights, dtype: str, *, on_gpu: bool) -> str:
    """Return torch's name of the dtype that ``auto`` means: the weights' own, if the device computes well in it.

    On a host, that is BF16 if the processor has instructions for it, and otherwise FP32.
    """
    own = str(weights.config.get("dtype") or weights.config.get("torch_dtype") or "float32")
    if dtype != "auto":
        return dtype
    return own if on_gpu or (own == "bfloat16" and computes_bf16()) else "float32"


def count_pages(tokens: int) -> int:
    """Return the number of pages of llm-hf's cache for this many tokens, plus one page in reserve."""
    return -(-tokens // PAGE) + 1


def count_cache_pages(slots: int, context: int, cache_tokens: int) -> int:
    """Return the number of pages of llm-hf's cache; with 0 ``cache_tokens``, its default number."""
    return count_pages(cache_tokens or min(slots * context, max(CACHE_TOKENS, context))) + slots


def find_weights(folder: str | Path) -> Weights:
    """Check that a weights folder has ``config.json``, ``tokenizer.json``, and ``*.safetensors`` or ``decoder.onnx``.

    Pickles are refused, because loading a pickle can run code.

    Raises:
        ArtifactError: the folder or a file of it is missing or damaged, or the tokenizer is another model's.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ArtifactError(
            f"{folder} is not a folder.",
            "Write the absolute path of the folder with config.json, tokenizer.json and *.safetensors.",
        )
    for name in (CONFIG, TOKENIZER):
        if not (folder / name).is_file():
            raise ArtifactError(f"{folder} has no {name}.", _DOWNLOAD)
    check_folder(folder)
    shards, names = _find_shards(folder), set[str]()
    for name in shards:
        begins = check_file(folder / name, "file of weights")
        if name.endswith(".safetensors"):
            names |= _list_tensors(folder / name, begins)
    config = read_json(folder / CONFIG, "model configuration")
    text = _text_part(config)
    layers = {int(found[1]) for name in names if (found := _LAYER.search(name))}
    number = text.get("num_hidden_layers", text.get("n_layer"))
    missing = sorted({*range(number)} - layers) if isinstance(number, int) else []
    if 0 < len(missing) < len(layers):  # else they may be stored once for all
        raise ArtifactError(f"{folder} lacks the weights of layer {missing[0]}.", _DOWNLOAD)
    vocabulary = _whole(folder, text, "vocab_size")
    context = _context(folder, text)
    added = _check_tokenizer(folder, vocabulary)
    return Weights(folder, config, shards, vocabulary, context, _end_ids(folder, text, vocabulary, added))


def _list_tensors(path: Path, begins: bytes) -> set[str]:
    """Return the names of the tensors in a file of safetensors: the length of a JSON object, the object, the tensors.

    ``begins`` are its first bytes.

    Raises:
        ArtifactError: it is not whole safetensors.
    """
    if begins[8:9] != b"{":
        raise _damaged(path, describe_bytes(begins) or "it does not begin as safetensors")
    size, length = path.stat().st_size, int.from_bytes(begins[:8], "little")
    try:
        with path.open("rb") as file:
            tensors = json.loads(file.read(8 + min(length, size))[8:])
        tensors.pop("__metadata__", None)
        whole = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise _damaged(path, "its list of tensors is cut or damaged") from None
    if size < whole:
        raise _damaged(path, f"it has {size:,} of its {whole:,} bytes")
    return {*tensors}


def _damaged(path: Path, why: str) -> ArtifactError:
    return ArtifactError(f"{path} is not a file of weights: {why}.", _DOWNLOAD)


def _find_shards(folder: Path) -> tuple[str, ...]:
    found = {path.name for path in folder.glob("*.safetensors")}
    if not found and (folder / DECODER).is_file():
        return (DECODER,)
    if not found and all((folder / name).is_file() for name in (OPENVINO, OPENVINO_WEIGHTS)):
        return (OPENVINO_WEIGHTS,)
    if not found:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ArtifactError(
                f"{folder} has weights only as pickles, which can run code when they are loaded: {pickles[0]}.",
                'Convert them where you trust them: python -c "from transformers import AutoModelForCausalLM as M; '
                f"M.from_pretrained('{folder}').save_pretrained('{folder}')\"",
            )
        raise ArtifactError(f"{folder} has no *.safetensors.", _DOWNLOAD)
    if not (folder / INDEX).is_file():
        if "model.safetensors" in found:
            return ("model.safetensors",)
        raise ArtifactError(f"{folder} has {sorted(found)[0]}, and neither model.safetensors nor {INDEX}.", _DOWNLOAD)
    places = read_json(folder / INDEX, "index of weights", MAX_LARGE_TEXT).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()) or not places:
        raise ArtifactError(f"{folder / INDEX} has no weight_map.", _DOWNLOAD)
    named = sorted(set(places.values()))
    if missing := [name for name in named if name not in found]:
        raise ArtifactError(
            f"{folder} misses {missing[0]}, which {INDEX} names ({len(missing)} of {len(named)} files are missing).",
            _DOWNLOAD,
        )
    return tuple(named)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of ``config`` about text: ``text_config`` if the model also reads images, else ``config``."""
    part = config.get("text_config") or config
    return part if isinstance(part, dict) else {}


def _whole(folder: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArtifactError(
            f"{folder / CONFIG} has {name} {value!r}, expected a whole number.", "Take the model's own config.json."
        )
    return value


def _context(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the greatest number of tokens, whose name differs between families.

    Models with ALiBi and recurrent ones, such as BLOOM and Mamba, name none. They get the number that vLLM assumes.
    """
    name = next((name for name in _CONTEXTS if config.get(name) is not None), None)
    return _UNNAMED_CONTEXT if name is None else _whole(folder, config, name)


def _check_tokenizer(folder: Path, vocabulary: int) -> dict[str, int]:
    """Check that the model has all ids of the tokenizer's vocabulary; return the added tokens, text -> id.

    Added tokens may be beyond it: published models have some that no text needs, such as those for images.
    """
    tokenizer = read_json(folder / TOKENIZER, "tokenizer", MAX_LARGE_TEXT)
    check_growth(tokenizer, folder / TOKENIZER)
    try:
        added = {token["content"]: int(token["id"]) for token in tokenizer.get("added_tokens", [])}
        tokens = tokenizer["model"]["vocab"]
        ids = tokens.values() if isinstance(tokens, dict) else range(len(tokens))
        greatest = max(map(int, ids))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ArtifactError(
            f"{folder / TOKENIZER} is not a tokenizer: it has no vocabulary.", "Take the model's own tokenizer.json."
        ) from error
    if greatest >= vocabulary:  # models often have a few more tokens than their tokenizer, for alignment
        raise ArtifactError(
            f"{folder / TOKENIZER} has token ids up to {greatest}, and {CONFIG} has vocab_size {vocabulary}: it is "
            "another model's.",
            "Take the tokenizer.json of the same model.",
        )
    return added


def _end_ids(folder: Path, config: Mapping[str, Any], vocabulary: int, added: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ids of the end tokens: of ``generation_config.json`` or else ``config.json``, and the tokenizer's.

    They differ in many published models. In a chat model, the tokenizer's ends a message.
    """
    path = folder / "generation_config.json"
    own = read_json(path, "generation configuration") if path.is_file() else {}
    found = own.get("eos_token_id", config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and 0 <= token < vocabulary for token in ids):
        raise ArtifactError(
            f"{folder} has eos_token_id {found}, and vocab_size {vocabulary}.", "Take all files of the same model."
        )
    own_id = added.get(find_specials(read_settings(folder), folder / TOKENIZER_CONFIG).get("eos_token", ""))
    return tuple(ids) if own_id is None or own_id in ids or own_id >= vocabulary else (*ids, own_id)

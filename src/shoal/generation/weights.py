"""Weights folder of a language model: which files it needs, checked before any library loads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.component import Parameters, read_json
from shoal.component.artifact_files import check_folder, check_growth
from shoal.errors import ArtifactError
from shoal.files import MAX_LARGE_TEXT

CONFIG, TOKENIZER, INDEX = "config.json", "tokenizer.json", "model.safetensors.index.json"
DECODER = "decoder.onnx"  # in place of safetensors, for the engine on ONNX Runtime
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DOWNLOAD = "Download it whole: hf download OWNER/MODEL --local-dir FOLDER"


@dataclass(frozen=True)
class Weights:
    """A checked weights folder in the Hugging Face layout.

    ``config`` is the object in ``config.json``. ``shards`` are the names of the safetensors files, or, without any, the
    name of the decoder in ONNX. ``vocabulary`` is the number of the model's token ids, ``context`` the greatest number
    of tokens of prompt and answer together. ``end_ids`` are the tokens that end an answer.
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
    return _whole(folder, _text_part(config), "max_position_embeddings")


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
    shards = _find_shards(folder)
    config = read_json(folder / CONFIG, "model configuration")
    text = _text_part(config)
    vocabulary = _whole(folder, text, "vocab_size")
    context = _whole(folder, text, "max_position_embeddings")
    added = _check_tokenizer(folder, vocabulary)
    end_ids = _end_ids(folder, text, vocabulary)
    _check_specials(folder, text, added, end_ids)
    return Weights(folder, config, shards, vocabulary, context, end_ids)


def _find_shards(folder: Path) -> tuple[str, ...]:
    found = {path.name for path in folder.glob("*.safetensors")}
    if not found and (folder / DECODER).is_file():
        return (DECODER,)
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


def _check_tokenizer(folder: Path, vocabulary: int) -> dict[str, int]:
    """Check that the model has all of the tokenizer's ids; return the added tokens, text -> id."""
    tokenizer = read_json(folder / TOKENIZER, "tokenizer", MAX_LARGE_TEXT)
    check_growth(tokenizer, folder / TOKENIZER)
    try:
        added = {token["content"]: int(token["id"]) for token in tokenizer.get("added_tokens", [])}
        tokens = tokenizer["model"]["vocab"]
        ids = [*added.values(), *(tokens.values() if isinstance(tokens, dict) else range(len(tokens)))]
        greatest = max(map(int, ids))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
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


def _check_specials(
    folder: Path, config: Mapping[str, Any], added: Mapping[str, int], end_ids: tuple[int, ...]
) -> None:
    """Check that config.json and tokenizer_config.json have the same begin token (bos) and end token (eos).

    A chat model may end its answers with another token, which ``generation_config.json`` names.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    settings = read_json(path, "tokenizer configuration")
    for name in ("bos_token", "eos_token"):
        token, known = settings.get(name), config.get(f"{name}_id")
        text = str(token.get("content") if isinstance(token, dict) else token)
        ids = [*end_ids, *(known if isinstance(known, list) else [known])]
        if text in added and known is not None and added[text] not in ids:
            raise ArtifactError(
                f"{path} has {name} {text!r}, which is {added[text]} in {TOKENIZER}, and {CONFIG} has {name}_id "
                f"{known}: it is another model's.",
                "Take all files of the same model.",
            )


def _end_ids(folder: Path, config: Mapping[str, Any], vocabulary: int) -> tuple[int, ...]:
    """Return the ids of the end tokens, from ``generation_config.json`` or else from ``config.json``."""
    path = folder / "generation_config.json"
    own = read_json(path, "generation configuration") if path.is_file() else {}
    found = own.get("eos_token_id", config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and 0 <= token < vocabulary for token in ids):
        raise ArtifactError(
            f"{folder} has eos_token_id {found}, and vocab_size {vocabulary}.", "Take all files of the same model."
        )
    return tuple(ids)

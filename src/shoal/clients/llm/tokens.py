"""Client of engines: token ids in, token ids out, with the tensor names that NVIDIA's clients of GPT models use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.clients.client.client import Client
from shoal.errors import ArtifactError, InputError, ServerError, needs
from shoal.kit.component.parameters import fixed_by
from shoal.kit.generation.tokenizer import read_model_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GPT2 = ("vocab.json", "merges.txt")
_SETTINGS = {"runtime_top_k": 1, "runtime_top_p": 1.0, "temperature": 1.0}  # greedy


def open_tokenizer(source: str) -> Tokenizer:
    """Return the tokenizer of a folder, or of a model's ``NAME`` or ``OWNER/NAME`` on the Hugging Face hub.

    The folder has tokenizer.json, or GPT-2's files: vocab.json and merges.txt.

    Raises:
        ArtifactError: the tokenizer cannot be read, or the hub did not give it.
    """
    folder, has_files = Path(source), [(Path(source) / name).is_file() for name in ("tokenizer.json", *_GPT2)]
    with needs("llm"), fixed_by("Name a folder with the model's tokenizer.json, or vocab.json and merges.txt."):
        if has_files == [False, True, True]:
            return _read_gpt2(folder)
        if folder.is_dir() or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source):
            return read_model_tokenizer(folder)
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_pretrained(source)
        except Exception as error:  # of any library that asks the hub
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ArtifactError(
                f"{source} is not a folder, and the Hugging Face hub did not give it: {reason}"
            ) from error


def _read_gpt2(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    try:
        tokenizer = Tokenizer(models.BPE.from_file(*(str(folder / name) for name in _GPT2)))
    except Exception as error:  # the library has no exception class of its own
        raise ArtifactError(f"{folder} has no tokenizer of GPT-2 in {' and '.join(_GPT2)}: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def read_ids(query: str, tokenizer: Tokenizer | None) -> list[int]:
    """Return the token ids of the text ``query``; without a tokenizer, ``query`` is a list of ids: 1,2,3 or 1 2 3.

    Raises:
        InputError: the text or the list is empty, or ``query`` is not a list of ids.
    """
    if tokenizer is not None:
        ids = [int(token) for token in tokenizer.encode(query).ids]
    else:
        try:
            ids = [int(word) for word in query.replace(",", " ").split()]
        except ValueError:
            raise InputError(
                f"{query[:60]!r} is not a list of token ids.", "Give ids, as 1,2,3; or --tokenizer FOLDER for texts."
            ) from None
    if not ids:
        raise InputError("The prompt has no tokens.", "Give at least one.")
    return ids


def ask(client: Client, model: str, ids: Sequence[int], output_length: int) -> list[list[int]]:
    """Return at most ``output_length`` tokens that continue ``ids``, for each beam that the model answers with.

    Each is the most probable token at its place. Tensors get the dtypes that the server declares (INT32 or UINT32), and
    inputs that it does not declare are left out. A prompt at the beginning of the answer, as FasterTransformer and
    TensorRT-LLM return it, is taken away.

    Raises:
        InputError: the model is not an engine, or refused the request.
        ServerError: no server answers in time, or the answer ended early.
    """
    spec = client.describe(model)
    declared = {tensor.name for tensor in spec.inputs}
    inputs: dict[str, Any] = {name: [[value]] for name, value in _SETTINGS.items()}
    inputs |= {"input_ids": [list(ids)], "input_lengths": [[len(ids)]], "request_output_len": [[output_length]]}
    if missing := [name for name in ("input_ids", "request_output_len") if name not in declared]:
        raise InputError(f"Model {model} has no input {missing[0]}: it is not an engine.", "Name one: --model llm-hf")
    given = {name: value for name, value in inputs.items() if name in declared}
    if not spec.is_decoupled:
        beams, has_prompt = _read_beams(client.infer(model, given)), True
        if any(tensor.name == "finish_reason" for tensor in spec.outputs) and beams[0][: len(ids)] == list(ids):
            one = client.infer(model, {**given, "request_output_len": [[1]]})  # of ours, which may do either
            is_long = np.asarray(one["finish_reason"]).item() in (b"length", "length")
            has_prompt = len(_read_beams(one)[0]) > is_long
        return [beam[len(ids) :] if has_prompt and beam[: len(ids)] == list(ids) else beam for beam in beams]
    found: list[list[int]] = [[]]
    is_whole = True
    for answer in client.stream(model, given):
        beams = _read_beams(answer)
        found = [
            begin + new for begin, new in zip(found * len(beams) if len(found) == 1 else found, beams, strict=True)
        ]
        is_whole = bool(np.asarray(answer.get("is_last", True)).all())
    if not is_whole:
        raise ServerError("The answer ended before its last token.", "The server's log says why; try again.")
    return found


def _read_beams(answer: Mapping[str, Any]) -> list[list[int]]:
    """Return the tokens of each beam of an answer of one row, without padding."""
    rows = np.atleast_2d(np.asarray(answer["output_ids"])[0])
    lengths = np.asarray(answer.get("sequence_length", [[rows.shape[1]] * len(rows)])).reshape(-1)
    return [row[:length].tolist() for row, length in zip(rows, lengths, strict=False)]

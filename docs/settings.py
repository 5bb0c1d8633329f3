"""Writer of the places that repeat the table ``shoal.kit.generation.sampling.SETTINGS``: ``python docs/settings.py``.

These are the tensors in ``config.pbtxt``, the types of the client's settings, and the table in language-models.md. Each
place stands between two lines: ``settings: KIND`` and ``end of settings``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from shoal.kit.generation.sampling import SETTINGS, Setting

ROOT = Path(__file__).parents[1]
FILES = (
    "docs/language-models.md", "ensembles/llm/config.pbtxt", "models/llamav2/config.pbtxt",
    "models/llm-hf/config.pbtxt", "models/llm-onnx/config.pbtxt", "models/llm-openvino/config.pbtxt",
    "models/llm-vllm/config.pbtxt",
    "models/llm_bls/config.pbtxt", "preprocess/prompt/config.pbtxt", "src/shoal/clients/llm/client.py",
)  # fmt: skip
_BLOCK = re.compile(
    r"^( *)((?:#|<!--) settings: ([\w ]+) \(.*\n)(?:.*\n)*?( *(?:#|<!--) end of settings)", re.MULTILINE
)


def rewrite(text: str) -> str:
    """Return a file's text with its places written again."""

    def write(found: re.Match[str]) -> str:
        indent, begin, kind, end = found.groups()
        return indent + begin + "".join(f"{indent}{line}\n" for line in _write(kind)) + end

    return _BLOCK.sub(write, text)


def _write(kind: str) -> Iterator[str]:
    if kind == "table":
        yield from ("", "| setting | dtype | allowed | if left out | meaning | engine's tensor | OpenAI's | vLLM's |")
        yield "|---|---|---|---|---|---|---|---|"
    for row in SETTINGS:
        if kind != "numbers" or not (row.dtype == "STRING" or row.name in ("top_logprobs", "echo")):
            yield _write_row(kind, row)
    if kind == "table":
        yield ""


def _write_row(kind: str, row: Setting) -> str:
    ids, needed = "[ 2, -1 ]" if row.is_list else "[ 1 ]", row.tensor == "request_output_len"
    number = "INT32" if row.is_list else row.dtype
    match kind:
        case "inputs" | "numbers":
            dims = "[ -1 ]" if row.is_list else "[ 1 ]"
            return f'{{ name: "{row.name}" data_type: TYPE_{row.dtype} dims: {dims} optional: true }},  # {row.says}'
        case "engine":
            optional = "" if needed else " optional: true"
            return f'{{ name: "{row.tensor}" data_type: TYPE_{number} dims: {ids}{optional} }},  # {row.says}'
        case "outputs":
            return f'{{ name: "{row.tensor}" data_type: TYPE_{number} dims: {ids} }},'
        case "inputs of prompt":
            return f'input_map {{ key: "{row.name}" value: "{row.name}" }}'
        case "outputs of prompt":
            return f'output_map {{ key: "{row.tensor}" value: "prompt_{row.tensor}" }}'
        case "inputs of the engine":
            return f'input_map {{ key: "{row.tensor}" value: "prompt_{row.tensor}" }}'
        case "types":
            kind = "float" if row.dtype.startswith("FP") else "bool" if row.dtype == "BOOL" else "int"
            if row.dtype == "STRING":
                kind = "Sequence[str]" if row.is_list else "Mapping[str, Any]"
            return f"{row.name}: {kind}"
        case "table":
            shape, names = "[-1]" if row.is_list else "[1]", (row.tensor, row.openai, row.vllm)
            default = "random" if row.default is None else row.default
            cells = [f"`{row.name}`", f"{row.dtype} {shape}", row.allowed, str(default), row.says]
            return f"| {' | '.join([*cells, *(f'`{name}`' if name else 'none' for name in names)])} |"
    raise ValueError(f"Unknown kind of settings {kind!r}.")


if __name__ == "__main__":
    for name in FILES:
        path = ROOT / name
        path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")

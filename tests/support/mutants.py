"""Generator of broken repositories: random configurations, truncated texts, odd files."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

from google.protobuf import descriptor, text_format
from tritonclient.grpc import model_config_pb2

from tests.support.planted import ENSEMBLE, MODEL, config

ONE_STEP = ENSEMBLE[: ENSEMBLE.index('    {\n      model_name: "left')].replace("first_y", "OUT").rstrip().rstrip(",")
SMALL = {
    "first/config.pbtxt": config("first"),
    "first/1/model.py": MODEL,
    "all/config.pbtxt": ONE_STEP + "\n  ]\n}\n",
    "all/1/.gitkeep": "",
}
CONFIGS = sorted(path for path in SMALL if path.endswith("config.pbtxt"))
NUMBERS = ("0", "1", "-1", "7", "512", "-9223372036854775808", "9223372036854775807", "1e400", "0x1F", "nan", "${n}")
NAMES = ("X", "Y", "IN", "OUT", "first", "left", "all", "", "a b", "é", "\\000", "${name}", "x" * 300)
LINES = (
    "return None", "return", "raise", "yield", "while True:", "import os", "lambda: 0", "x = y = z", "del requests",
    "class TritonPythonModel: pass", "def execute(self): ...", "async def execute(self, requests): pass", "\x00",

    "match requests:\n    case []:\n        return 1", "global a", "f'{'", "TritonPythonModel = 1", "\t\t",
    "(" * 300, "é = '\\ud800'",
)  # fmt: skip


def mutate(repository: Path, chance: random.Random) -> Path:
    """Change one file of ``repository``, which holds SMALL; returns it, to be restored."""
    if chance.random() < 0.15:
        path = repository / "first/1/model.py"
        path.write_text(_code(chance), encoding="utf-8", errors="surrogatepass")
        return path
    name = chance.choice(CONFIGS)
    text = SMALL[name]
    path = repository / name
    kind = chance.random()
    if kind < 0.3:
        path.write_text(random_config(chance), encoding="utf-8")
    elif kind < 0.9:
        path.write_text(_tokens(text, chance), encoding="utf-8", errors="surrogatepass")
    else:
        path.write_bytes(_bytes(text.encode(), chance))
    return path


def random_config(chance: random.Random) -> str:
    """A ModelConfig that is well formed, of any fields with any values."""
    message = model_config_pb2.ModelConfig()
    _fill(message, chance, 0)
    if chance.random() < 0.5:
        message.ClearField("sequence_batching")
        step = message.ensemble_scheduling.step.add(model_name=chance.choice(NAMES[:7]))
        step.input_map[chance.choice(NAMES[:4])] = chance.choice(NAMES[:4])
        step.output_map[chance.choice(NAMES[:4])] = chance.choice(NAMES[:4])
    return str(text_format.MessageToString(message, as_utf8=True))


def _fill(message: Any, chance: random.Random, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if chance.random() > (0.3 if depth else 0.4):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, field.name), field.message_type, chance, depth)
        elif field.message_type is not None:
            many = field.is_repeated
            for _ in range(chance.randint(1, 3) if many else 1):
                child = getattr(message, field.name)
                child = child.add() if many else child
                child.SetInParent()
                if depth < 5:
                    _fill(child, chance, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(_scalar(field, chance) for _ in range(chance.randint(0, 4)))
        else:
            setattr(message, field.name, _scalar(field, chance))


def _fill_map(entries: Any, entry: Any, chance: random.Random, depth: int) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    for _ in range(chance.randint(1, 3)):
        if value.message_type is None:
            entries[_scalar(key, chance)] = _scalar(value, chance)
        elif depth < 5:
            _fill(entries[_scalar(key, chance)], chance, depth + 1)


def _scalar(field: Any, chance: random.Random) -> Any:
    kind = field.cpp_type
    if kind == descriptor.FieldDescriptor.CPPTYPE_STRING:
        return chance.choice([*NAMES[:8], "python", "ensemble", "fil", "pytorch", "model.py"])
    if kind == descriptor.FieldDescriptor.CPPTYPE_ENUM:
        return chance.choice(field.enum_type.values).number
    if kind == descriptor.FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (descriptor.FieldDescriptor.CPPTYPE_FLOAT, descriptor.FieldDescriptor.CPPTYPE_DOUBLE):
        return chance.choice([0.0, 0.5, -1.0, 2.0])
    is_signed = kind in (descriptor.FieldDescriptor.CPPTYPE_INT32, descriptor.FieldDescriptor.CPPTYPE_INT64)
    return chance.choice([0, 1, 2, 8, 2**31 - 1] + ([-1, -2, -(2**31)] if is_signed else []))


def _tokens(text: str, chance: random.Random) -> str:
    """``text`` with tokens taken away, doubled, exchanged or replaced."""
    tokens = text.replace("{", " { ").replace("}", " } ").replace("\n", " \n ").split(" ")
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(tokens))
        match chance.randint(0, 6):
            case 0:
                del tokens[at]
            case 1:
                tokens.insert(at, tokens[chance.randrange(len(tokens))])
            case 2:
                other = chance.randrange(len(tokens))
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 3:
                tokens[at] = chance.choice(NUMBERS)
            case 4:
                tokens[at] = f'"{chance.choice(NAMES)}"'
            case 5:
                tokens[at] = "".join(chance.choices(string.printable, k=chance.randint(0, 6)))
            case _:
                tokens[at] = chance.choice(["{", "}", "[", "]", "input {", "dims: [", "#", "'", '"', "{" * 150])
    return " ".join(tokens)


def _bytes(content: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(content))
        content = content[:at] + bytes([chance.randrange(256)]) + content[at + chance.randint(0, 2) :]
    return content[: chance.randrange(len(content))] if chance.random() < 0.2 else content


def _code(chance: random.Random) -> str:
    lines = MODEL.split("\n")
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(lines))
        indent = " " * chance.choice([0, 4, 8, 12])
        match chance.randint(0, 3):
            case 0:
                lines[at] = ""
            case 1:
                lines.insert(at, indent + chance.choice(LINES))
            case 2:
                lines[at] = "".join(chance.sample(lines[at], len(lines[at])))
            case _:
                lines[at] = lines[chance.randrange(len(lines))]
    return "\n".join(lines)

"""Plant mistakes in the code, one a function, and count how many the unit tests find.

``python benchmarks/mutants.py`` draws 28 functions of the gateway's core and 28 of the kit, by a seed, and changes one
expression in each: a comparison, ``and`` for ``or``, a sign, a truth value, a missing ``not``. For each mutant it runs
the unit tests that reach the changed line, which a run with coverage finds. Engines and GPU code, which only slow tests
and a GPU reach, are left out. ``--before FOLDER`` plants the same mistakes in another checkout that has a virtual
environment, and tells both numbers. It changes files of the checkouts while it runs: use clones. About an hour.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROOMS = {
    "core": ("*/gateway/core", "gateway/core"),
    "kit": ("kit", "component", "text", "generation", "forests", "encoders"),
}
LEFT_OUT = ("engines", "backends", "gpu_text.py", "quantize.py", "rendering.py")
PYTEST = (".venv/bin/python", "-m", "pytest")
NUMBER, SEED, PATIENCE = 28, 61, 300
_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}


class Mutant(NamedTuple):
    """One mistake: ``old`` in a line of a function becomes ``new``."""

    function: str
    old: str
    new: str


class Place(NamedTuple):
    """Place of a mutant in a checkout."""

    path: Path
    line: int
    text: str  # of the whole file, with the mistake


def find_mutants(path: Path) -> Iterator[tuple[Mutant, Place]]:
    """Yield each mistake that can be planted in a file."""
    text = path.read_text(encoding="utf-8")
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    if isinstance(node, ast.expr) and (new := _change(node)):
                        old = ast.get_source_segment(text, node) or ""
                        start = _offset(text, node.lineno, node.col_offset)
                        mutated = text[:start] + f"({new})" + text[start + len(old) :]
                        yield Mutant(function.name, ast.unparse(node), new), Place(path, node.lineno, mutated)


def _change(node: ast.expr) -> str:
    """Return the changed expression; empty if there is nothing to change."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARED:
            return ast.unparse(ast.Compare(node.left, [_COMPARED[type(operator)]()], node.comparators))
        case ast.BoolOp():
            return ast.unparse(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
        case ast.UnaryOp(op=ast.Not()):
            return ast.unparse(node.operand)
        case ast.BinOp() if type(node.op) in _SIGNS and not _is_text(node):
            return ast.unparse(ast.BinOp(node.left, _SIGNS[type(node.op)](), node.right))
        case ast.Constant(value=bool()):
            return str(not node.value)
    return ""


def _is_text(node: ast.BinOp) -> bool:
    values = [getattr(each, "value", None) for each in ast.walk(node)]
    return any(isinstance(each, ast.JoinedStr) for each in ast.walk(node)) or any(
        isinstance(v, str | bytes) for v in values
    )


def _offset(text: str, line: int, column: int) -> int:
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def read_rooms(checkout: Path, room: str) -> dict[Mutant, Place]:
    """Return the mistakes that can be planted in a room, without those that stand there twice."""
    source = checkout / "src" / "shoal"
    found: dict[Mutant, list[Place]] = {}
    for pattern in ROOMS[room]:
        for folder in sorted(source.glob(pattern)):
            for path in sorted(folder.rglob("*.py")):
                if not any(name in path.parts for name in LEFT_OUT):
                    for mutant, place in find_mutants(path):
                        found.setdefault(mutant, []).append(place)
    return {mutant: places[0] for mutant, places in found.items() if len(places) == 1}


def draw(rooms: list[dict[Mutant, Place]]) -> list[Mutant]:
    """Draw mutants that all checkouts have, one a function."""
    chance = random.Random(SEED)
    shared = sorted(set(rooms[0]).intersection(*rooms[1:]))
    functions = sorted({mutant.function for mutant in shared})
    chosen = chance.sample(functions, NUMBER)
    return [chance.choice([mutant for mutant in shared if mutant.function == function]) for function in chosen]


def read_contexts(checkout: Path) -> sqlite3.Connection:
    """Run the unit tests with coverage, and return the database of which test ran which line.

    Each file of tests has a process of its own: a test that forks or starts pytest loses what was measured before it.
    """
    data = checkout / ".cache" / "mutants.coverage"
    if not data.exists():
        parts = checkout / ".cache" / "mutants"
        parts.mkdir(parents=True, exist_ok=True)

        def measure(path: Path) -> None:
            command = [*PYTEST, "-q", "-n", "0", "--cov=shoal", "--cov-context=test", "--cov-report=", str(path)]
            part = parts / f"{path.stem}.coverage"
            if part.exists():  # of a run that was stopped: coverage writes it as a whole
                return
            own = os.environ | {"COVERAGE_FILE": str(part)}
            subprocess.run(command, cwd=checkout, check=False, stdout=subprocess.DEVNULL, env=own)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(measure, sorted((checkout / "tests" / "unit").glob("test_*.py"))))
        found = map(str, sorted(parts.glob("*.coverage")))
        combine = [".venv/bin/python", "-m", "coverage", "combine", "-q", f"--data-file={data}", *found]
        subprocess.run(combine, cwd=checkout, check=True)
    return sqlite3.connect(data)


def find_tests(contexts: sqlite3.Connection, place: Place) -> list[str]:
    """Return the tests that ran a line."""
    query = (
        "select context.context, line_bits.numbits from line_bits join file on file.id = line_bits.file_id "
        "join context on context.id = line_bits.context_id where file.path = ?"
    )
    bits = ((name.partition("|")[0], data) for name, data in contexts.execute(query, [str(place.path)]))
    byte, bit = divmod(place.line, 8)
    return sorted({name for name, data in bits if name and byte < len(data) and data[byte] & (1 << bit)})


def is_found(checkout: Path, place: Place, tests: list[str]) -> bool:
    """Tell whether one of ``tests`` fails, or hangs, with the mistake in place."""
    if not tests:
        return False
    original = place.path.read_text(encoding="utf-8")
    place.path.write_text(place.text, encoding="utf-8")
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as listing:
            listing.write("\n".join(tests))
            listing.flush()
            command = [*PYTEST, "-q", "-n", "0", "-x", "-p", "no:cacheprovider", f"@{listing.name}"]
            ended = subprocess.run(command, cwd=checkout, capture_output=True, timeout=PATIENCE, check=False)
            return ended.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        place.path.write_text(original, encoding="utf-8")


def main() -> None:
    """Plant the mistakes, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, with its .venv")
    before = parser.parse_args().before
    checkouts = [ROOT, *([before.resolve()] if before else [])]
    contexts = [read_contexts(checkout) for checkout in checkouts]
    for name in ROOMS:
        rooms = [read_rooms(checkout, name) for checkout in checkouts]
        counts = [0] * len(checkouts)
        for mutant in draw(rooms):
            places = [room[mutant] for room in rooms]
            tests = [find_tests(*each) for each in zip(contexts, places, strict=True)]
            with ThreadPoolExecutor(len(checkouts)) as pool:
                found = list(pool.map(is_found, checkouts, places, tests))
            counts = [count + each for count, each in zip(counts, found, strict=True)]
            print(json.dumps([name, str(rooms[0][mutant].path.relative_to(ROOT)), *mutant, found]), flush=True)
        print(f"{name}: {counts} of {NUMBER} found", flush=True)


if __name__ == "__main__":
    main()

"""Every option of every command, and every parameter that shoal reads, has a test in which two values differ.

The entries are in the tables of the other ``test_option_*.py``: a command's options without a server in the unit tests,
with one in the slow tests. **To add an option, add a line** to the table that has the command's other options: the
option, what both command lines have in common, and the two values. If a test of another file compares two values, name
it: ``Elsewhere("slow/test_x.py::test_y")``.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal.authoring.repository import parameters
from shoal.cli import app
from shoal.errors import InputError
from tests.slow import test_option_engines, test_option_served, test_option_service, test_option_training
from tests.support.once import ROOT
from tests.support.options import Elsewhere, Table, find_options
from tests.unit import test_option_keys, test_option_parameters, test_option_repositories, test_option_uses

TABLES: tuple[Table, ...] = (
    test_option_repositories.TABLE, test_option_uses.TABLE, test_option_service.TABLE, test_option_served.TABLE,
    test_option_training.TABLE, test_option_keys.TABLE,
)  # fmt: skip
PARAMETERS: tuple[Mapping[tuple[str, str], Any], ...] = (test_option_parameters.ENTRIES, test_option_engines.ENTRIES)
# What a line of the command has besides the options that exclude one another.
REFUSED = {
    "evaluate a --unseen --data a.csv": "--data has no effect with --unseen, which scores no texts.",
    "evaluate a --unseen --seen skip": "--seen has no effect with --unseen, which scores no texts.",
    "infer --local --url a:1 text": "--url has no effect with --local, which asks no server.",
    "infer --local --protocol http text": "--protocol has no effect with --local",
    "infer --local --timeout 1 text": "--timeout has no effect with --local",
    "infer --repository r text": "--repository has no effect without --local or --placement client.",
    "infer --fresh text": "--fresh has no effect without --output.",
    "infer --input a.csv -o b.csv --format csv": "--format has no effect with --output, whose ending is the format.",
    "infer --input a.csv -o b.csv --json": "--json has no effect with --output, whose ending is the format.",
    "infer --json --format csv text": "--format has no effect with --json.",
    "infer --input-format csv text": "--input-format has no effect without standard input.",
    "infer --input a.csv --input-format csv": "--input-format has no effect without standard input.",
    "infer --workers 2 text": "--workers has no effect without an --output folder.",
    "infer --ray auto text": "--ray has no effect without an --output folder.",
    "infer --input a.csv -o b.csv --shard-rows 5": "--shard-rows has no effect without an --output folder.",
    "infer --input a.csv -o out --full": "--full has no effect with an --output folder.",
    "infer --stream --batch-size 1 text": "--batch-size has no effect with --stream.",
    "infer --curl --concurrency 1 text": "--concurrency has no effect with --curl.",
    "infer --curl --full text": "--full has no effect with --curl.",
    "infer --curl --json text": "--json has no effect with --curl.",
    "infer --curl -o a.csv text": "--output has no effect with --curl.",
    "infer --curl --protocol grpc text": "--protocol has no effect with --curl, whose request is HTTP.",
    "generate --local --url a:1 text": "--url has no effect with --local, which asks no server.",
    "chat a:1 --local": "URL has no effect with --local, which asks no server.",
    "chat --repository r": "--repository has no effect without --local.",
    "generate text --set chat_template_kwargs={}": "chat_template_kwargs has no effect on a text.",
    "generate --repository r text": "--repository has no effect without --local.",
    "check --explain tensor-dims --strict": "--strict has no effect with --explain, which checks nothing.",
    "check --explain tensor-dims r": "PATHS has no effect with --explain, which checks nothing.",
    "check r --json --format sarif": "--format has no effect with --json.",
    "compose llm r --accept-error": "--accept-error has no effect without --tuned",
    "tune r --text-column x": "--text-column has no effect without --data",
    "tune --artifacts a --output x": "--output has no effect with --artifacts",
    "compose llm r --placement cpu --reserve-requests 2": "--reserve-requests has no effect without a GPU",
    "plan llm --gpu-memory 80": "--gpu-memory has no effect: no language model is on a GPU",
    "plan ensemble_all --engine vllm": "--engine vllm has no effect: no model uses llm-hf.",
    "compose ensemble_all r --engine hf": "--engine hf has no effect: no model uses llm-hf.",
    "compose llm r --engine vllm --swap llm-hf=llm-onnx": "--engine vllm and --swap llm-hf=llm-onnx both name",
    "plan ensemble_all --quantize int8": "--quantize int8 has no effect: none of these models",
    "plan llm --placement cpu --reserve-requests 2": "--reserve-requests has no effect without a GPU",
    "compose llm r --env a --env b": "There are two paths for all models: a and b.",
    "compose llm r --env llm-hf=a --env llm-hf=b": "There are two paths for llm-hf: a and llm-hf=b.",
    "compose llm r --queue-delay a=1 --queue-delay a=2": "--queue-delay a=... is given twice.",
    "compose llm r --preferred-batch a=1 --preferred-batch a=2": "--preferred-batch a=... is given twice.",
    "generate --seed 1 --set seed=2 text": "seed is given twice, as an option and by --set.",
    "generate --set top_k=1 --set top_k=2 text": "--set top_k=... is given twice.",
    "quickstart --llm --data a.csv": "--data has no effect with --llm, whose model is made on the spot.",
    "quickstart --llm --encoder e": "--encoder has no effect with --llm, whose model is made on the spot.",
    "serve r --print --bare --audit a": "--audit has no effect with --bare: the container has no proxy of shoal's",
    "bench r --text-column a": "--text-column has no effect without --inputs.",
    "bench r --column a=b": "--column has no effect without --inputs.",
    "env build r.txt --engine venv --channel c": "--channel has no effect with --engine venv, which has no conda.",
    "env build --stub none --stub-builder b": "--stub-builder has no effect with --stub none, which compiles none.",
    "env build r.txt --gpu": "--gpu has no effect with a source and no --stub-builder.",
    "env build --for llm-vllm --gpu": "--gpu has no effect with --for.",
    "env build . --engine conda": "--engine has no effect with ., an environment that exists.",
}


def find_missing(command: Any = None) -> list[str]:
    """Return the options of the command line without an entry, and the entries without an option."""
    entries = [name for table in TABLES for name in table]
    assert len(entries) == len({*entries}), "an option has two entries"
    return sorted({*find_options(command)} ^ {*entries})


def test_every_option_has_an_entry() -> None:
    assert find_missing() == []


def test_a_planted_option_without_an_entry_is_found() -> None:
    command = typer.main.get_command(app)
    group: Any = command
    fit = group.commands.get("env").commands["fit"]
    planted = copy.copy(fit.params[-1])
    planted.opts = ["--planted"]
    fit.params.append(planted)
    assert find_missing(command) == ["env fit --planted"]


def test_every_parameter_has_an_entry() -> None:
    entries = [key for table in PARAMETERS for key in table]
    assert len(entries) == len({*entries})
    assert {*entries} == test_option_parameters.find_parameters()


def test_a_planted_parameter_without_an_entry_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table = parameters.TABLE
    planted = table[-1]._replace(name="planted", readers="label, top_k")
    monkeypatch.setattr(test_option_parameters, "TABLE", (*table, planted))
    entries = {key for table in PARAMETERS for key in table}
    assert test_option_parameters.find_parameters() - entries == {("label", "planted"), ("top_k", "planted")}


def test_tests_of_other_files_exist() -> None:
    tables: list[Mapping[Any, Any]] = [*TABLES, *PARAMETERS]
    named = [entry.test for table in tables for entry in table.values() if isinstance(entry, Elsewhere)]
    for name in named:
        path, _, test = name.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


@pytest.mark.parametrize("line", REFUSED)
def test_an_option_without_effect_is_refused(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, line.split())
    assert REFUSED[line] in (str(done.exception) if isinstance(done.exception, InputError) else done.output)

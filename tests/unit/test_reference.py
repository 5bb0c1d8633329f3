"""The reference pages that are made with the site name all that exists, and nothing else.

Those of parameters and rules are in the repository; they have tests of their own, as public names have in test_api.py.
"""

from __future__ import annotations

import re
import runpy

from shoal.kit.component import ledger
from shoal.kit.component.ledger import CopyTotals
from shoal.serving.gateway.control.health import Health
from shoal.serving.gateway.v1.document import MODEL
from shoal.serving.gateway.v1.front import ApiFront
from tests.support.gates import make_gate
from tests.support.once import ROOT
from tests.support.options import find_options

PROGRAM = runpy.run_path(str(ROOT / "docs" / "reference.py"))
PAGES: dict[str, str] = PROGRAM["make_pages"]()


SERVICE, COMPONENTS = PAGES["metrics"].split("## Components")


def find_first_cells(text: str) -> list[str]:
    """Return what the first column of the tables has in code style."""
    return re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE)))


def test_every_option_of_every_command() -> None:
    sections = re.findall(r"^## shoal ?(.*)\n((?:(?!## ).*\n)*)", PAGES["commands"], re.MULTILINE)
    named = [
        f"{command} {name}".lstrip()
        for command, text in sections
        for name in re.findall(r"^\| `(?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
    ]
    assert sorted(named) == sorted(find_options())


def test_every_metric_of_the_service_with_its_labels() -> None:
    """As the page about serving has them; the service gives all but those of keys to a service without keys."""
    rows = re.findall(r"^\| `(\S+)`.* \| (.*) \| ", SERVICE, re.MULTILINE)
    made = {re.sub("_count$", "", name): [*re.findall(r"`(\w+)`", labels)] for name, labels in rows}
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    told = re.findall(
        r"`(shoal_\w+)(?:\{([\w,]+)\})?`", "\n".join(re.findall(r"^\| (`shoal_.*?) \|", page, re.MULTILINE))
    )
    assert made == {name: labels.split(",") if labels else [] for name, labels in told}
    given = {metric.name + "_total" * (metric.type == "counter") for metric in Health(make_gate(), {}).collect()}
    assert {*made} - given == {"shoal_keys_damaged", "shoal_key_requests_total", "shoal_key_tokens_total"}
    assert given <= {*made}


def test_every_metric_of_components() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    events = re.findall(r"ledger\.count\((?:\"(vllm:\w+)\"|([A-Z_]+)\b)", code)
    counters = {f"{theirs or f'shoal_{getattr(ledger, name)}'}_total" for theirs, name in events}
    levels = {*re.findall(r'ledger\.levels\["(.+?)"\] =', code)}
    assert len(counters) == 10
    assert {*find_first_cells(COMPONENTS)} == counters | levels | {ledger.INFO} | {*ledger._amounts(CopyTotals())}


def test_every_route() -> None:
    named = {route.partition(" ")[2] for route in find_first_cells(PAGES["routes"])}
    served = {re.sub(r"\(\?P<model>.*\)(?=$|:)", MODEL, route.path) for route in ApiFront(make_gate(), {}, {}).routes}
    assert named == {path for path in served if "(" not in path} - {"/v1/openapi.json", "/v1/docs"}


def test_every_environment_variable() -> None:
    files = [
        path for folder in ("src", "env", "preprocess", "postprocess", "models") for path in (ROOT / folder).rglob("*")
    ]
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".sh")]
    assert {*find_first_cells(PAGES["variables"])} == {*re.findall(r"\bSHOAL_\w*[A-Z0-9]\b", "".join(texts))}

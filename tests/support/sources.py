"""A model.py for the rules that read one."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

from shoal.authoring.check import security
from shoal.authoring.check.findings import Finding
from shoal.authoring.check.python import code
from shoal.authoring.check.repositories import read_repository
from tests.support.planted import config

FAMILIES = (code, security)


def find(path: Path) -> list[Finding]:
    repository = read_repository(path)
    return [f for model in repository.models for family in FAMILIES for f in family.find(model, repository)]


def check_source(folder: Path, text: str | bytes, settings: str = "") -> list[str]:
    """The rules that a model.py breaks."""
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "config.pbtxt").write_text(config("m") + settings, encoding="utf-8")
    (folder / "m" / "1" / "model.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    return [finding.rule.id for finding in find(folder)]


def execute(body: str, *, before: str = "", head: str = "def execute(self, requests):") -> str:
    """A model.py whose execute is ``body``."""
    return (
        "import triton_python_backend_utils as pb_utils\n"
        + dedent(before)
        + f"\n\nclass TritonPythonModel:\n    {head}\n"
        + indent(dedent(body).strip("\n") or "pass", " " * 8)
        + "\n"
    )

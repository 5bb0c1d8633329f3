"""Imports of a ``model.py`` that its environment cannot satisfy."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, entries
from shoal.check.python.source import PB, Source, examine

IMPORT = Rule("import-not-in-environment", Severity.ERROR, is_core=True)
RULES = (IMPORT,)

# The backend's own, and what only older Pythons have.
_KNOWN = frozenset({PB, "c_python_backend_utils", "asynchat", "asyncore", "distutils", "imp", "smtpd"})
_KNOWN |= sys.stdlib_module_names
# The folder of model.py, which is searched anyway; other changes of sys.path may lead anywhere.
_OWN_FOLDER = re.compile(
    r"sys\.path\.\w+\((0, *)?(os\.path\.dirname\((os\.path\.\w+\()?__file__\)+|(str\()?Path\(__file__\)\.parent\)+) *$"
)


def find_missing(model: Model, modules: Collection[str], environment: str) -> Findings:
    """Find top-level imports of modules that are neither in the environment nor beside the code."""

    def look(source: Source) -> Findings:
        lines = source.path.read_text(encoding="utf-8", errors="replace").splitlines()
        if any("sys.path" in line and not _OWN_FOLDER.search(line) for line in lines):
            return
        paths = [*entries(source.path.parent), *entries(model.folder)]
        beside = {path.name.partition(".")[0] for path in paths}
        for node, name in _imports(source.tree):
            if name not in _KNOWN and name not in modules and name not in beside:
                yield IMPORT.at(
                    source.at(node),
                    f"ModuleNotFoundError: No module named '{name}': {environment} does not contain it.",
                    "Add its package to the environment, or put the module beside model.py.",
                )

    yield from examine(model, look)


def _imports(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the imports that always run, by the first part of the module's name."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node, (node.module or "").partition(".")[0]

"""Downloads of a ``model.py`` while it is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model
from shoal.check.python.source import Function, Source, examine

DOWNLOADS = Rule("downloads-at-import", Severity.WARNING)
RULES = (DOWNLOADS,)

_DOWNLOADS = re.compile(
    r"(requests|httpx)\.(get|post|request|stream)|(urllib\.request\.|urllib\.|urllib2\.)url(open|retrieve)"
    r"|wget\.download|gdown\.\w*download\w*|huggingface_hub\.(snapshot_download|hf_hub_download)|nltk\.download"
    r"|torch\.hub\.(load|load_state_dict_from_url|download_url_to_file)|spacy\.cli\.download(\.download)?|stanza\.download"
)


def find(model: Model) -> Findings:
    """Find the downloads of a model's code."""
    yield from examine(model, _look)


def _look(source: Source) -> Findings:
    for call, by in _calls_at_import(source):
        name = source.name(call.func)
        if _DOWNLOADS.fullmatch(name):
            what = f"{name} runs while model.py is imported{f', called by {by}' if by else ''}."
            yield DOWNLOADS.at(source.at(call), what, "Download when the image or the repository is built.")


def _calls_at_import(source: Source) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls made while the module is imported.

    They are at module level, or in the module's own functions that are called there; the string names that function.
    """
    seen: set[str] = set()
    for node in _run(source.tree):
        if not isinstance(node, ast.Call):
            continue
        yield node, ""
        name = source.name(node.func)
        own = source.functions.get(name)
        if own is not None and name not in seen:
            seen.add(name)
            for statement in own.body:
                yield from ((n, name) for n in _run(statement) if isinstance(n, ast.Call))


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs when ``node`` does: bodies of classes, but not those of functions."""
    stack = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, Function):
            stack += [*current.decorator_list, *current.args.defaults, *(d for d in current.args.kw_defaults if d)]
        elif not isinstance(current, ast.Lambda):
            yield current
            stack.extend(reversed(list(ast.iter_child_nodes(current))))

"""What an ``execute`` gives back: a list of responses, or None where a model sends them itself."""

from __future__ import annotations

import ast

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.python.escape import Requests
from shoal.check.python.returns import Ends
from shoal.check.python.source import Function, Source, is_literal, walk_within

NONE = Rule(
    "execute-returns-none",
    Severity.ERROR,
    "An execute that can end without its responses",
    "Unless the model is decoupled or sends through response senders, its clients wait for ever: since 24.06 Triton"
    " takes None for a promise to send later, and logs nothing. An `except` that only logs is the usual way there.",
    "python_backend, src/pb_stub.cc: ProcessReturnedResponses; tried on Triton 24.10.",
    "try:\n    return [self.answer(request) for request in requests]\nexcept Exception as error:\n    print(error)",
    "return [self.answer(request) for request in requests]  # an exception answers every request with an error",
)
RETURNS = Rule(
    "decoupled-returns",
    Severity.ERROR,
    "An execute of a decoupled model that returns its responses",
    "A decoupled model sends what it has through response senders. The list that its execute returns, an empty one too,"
    " fails the requests, with `is using the decoupled mode and the execute function must return None`.",
    "python_backend, src/pb_stub.cc: ProcessReturnedResponses.",
    "model_transaction_policy { decoupled: true }\n\nreturn responses",
    "model_transaction_policy { decoupled: true }\n\n"
    "sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\nreturn None",
)
RULES = (NONE, RETURNS)

_NONE = ast.Constant(None)


def look(source: Source, execute: Function, *, is_decoupled: bool) -> Findings:
    """Each place in the ``execute`` of a model; ``is_decoupled`` is what its configuration says."""
    if "set_model_transaction_policy" not in source.words:  # else the code says whether it is
        yield from _check_returns(source, execute) if is_decoupled else _check_ends(source, execute)


def _check_ends(source: Source, execute: Function) -> Findings:
    if "get_response_sender" in source.words:
        return
    within = list(walk_within(execute))
    answers = any(isinstance(node, ast.Return) and not is_literal(node.value or _NONE, None) for node in within)
    requests = Requests(source)
    calls_alone = "InferenceResponse" not in source.words and any(isinstance(node, ast.Call) for node in within)
    if not answers and (calls_alone or requests.are_handed_on):
        return  # somebody else may send the responses
    ends = Ends(execute, source, requests)
    for node in ends.bare:
        yield NONE.at(source.at(node), "This return ends execute without a list of responses.", "Return the list.")
    if ends.falls:
        yield NONE.at(
            source.at(execute),
            "This execute can reach its end without returning a list of responses.",
            "Return one response for each request on every way, or raise.",
        )


def _check_returns(source: Source, execute: Function) -> Findings:
    """Lists that a decoupled model returns, where its configuration alone says that it is one."""
    within = list(walk_within(execute))
    texts = {node.value for node in source.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    if any("decoupled" in word for word in (*source.words, *texts)):
        return  # it may ask whether it is
    bound: dict[str, list[ast.AST]] = {}
    for node in within:
        for name in (inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.Name)):
            if isinstance(name.ctx, ast.Store | ast.Del):
                bound.setdefault(name.id, []).append(node)
    for node in within:
        value = node.value if isinstance(node, ast.Return) else None
        if isinstance(value, ast.Name):
            values = [getattr(by, "value", None) for by in bound.get(value.id, [None])]
        else:
            values = [value]
        if all(isinstance(value, ast.List | ast.ListComp) for value in values):
            what = "It returns a list, which a decoupled model must not."
            yield RETURNS.at(source.at(node), what, "Send each response through its request's sender; return None.")

"""The checks of a model.py's code: what must be found, and above all what must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sources import check_source, execute

ENDS = {
    "nothing": "pass",
    "a missing return": "responses = [r for r in requests]",
    "a bare return": "return",
    "None": "return None",
    "None in a branch": "if self.is_idle:\n    return None\nreturn []",
    "no else": "if self.is_idle:\n    return []",
    "an elif without else": "if self.a:\n    return []\nelif self.b:\n    return []",
    "an except that logs": "try:\n    return []\nexcept Exception as error:\n    print(error)",
    "one of two excepts": "try:\n    return []\nexcept ValueError:\n    raise\nexcept Exception:\n    pass",
    "an else of try that falls": "try:\n    x = 1\nexcept ValueError:\n    return []\nelse:\n    print(x)",
    "a finally that falls": "try:\n    x = 1\nfinally:\n    print(requests)",
    "a return of None in a finally": "try:\n    return []\nfinally:\n    return",
    "while with a condition": "while self.is_busy:\n    self.wait()",
    "while True with a break": "while True:\n    if self.is_done:\n        break\n    return []",
    "a loop over other things": "for item in self.items:\n    self.answer(item)",
    "a loop that is left": "for n in self.n:\n    try:\n        return []\n    except E:\n        break",
    "one request": "if len(requests) > 1:\n    return []",
    "one request, the other way round": "if 2 <= len(requests):\n    return []",
    "requests, and more": "if requests and self.a:\n    return []",
    "a test that holds before, and does not leave": "if self.a:\n    x = 1\nif not self.a:\n    return []",
    "a request that is only logged": "try:\n    return []\nexcept Exception:\n    logging.error('no', requests)",
    "a loop over requests that continues": "for request in requests:\n    if request:\n        continue\n    return []",
    "a loop over requests that breaks": "for request in requests:\n    break\nelse:\n    return []",
    "suppress": "import contextlib\nwith contextlib.suppress(ValueError):\n    return []",
    "match without a wildcard": "match self.mode:\n    case 1:\n        return []\n    case 2:\n        return []",
    "match with a guard": "match self.mode:\n    case _ if self.a:\n        return []",
    "match of texts": "match self.mode:\n    case 'a' | 'b':\n        return []",
    "a nested function's return": "def answer():\n    return []\nanswer()",
    "a call that may come back": "if self.a:\n    return []\nself.log('no')",
}
DOES_NOT = {
    "a return": "return []",
    "what another method returns": "return self.answer(requests)",
    "an awaited one": "return await self.answer(requests)",
    "both branches": "if self.a:\n    return []\nelse:\n    return [1]",
    "elif and else": "if self.a:\n    return []\nelif self.b:\n    raise ValueError\nelse:\n    return []",
    "while True": "while True:\n    if self.a:\n        return []",
    "while 1 with an inner break": "while 1:\n    for x in y:\n        break",
    "endless count": "import itertools\nfor i in itertools.count():\n    if i > 3:\n        return []",
    "try and raise": "try:\n    return []\nexcept Exception:\n    raise",
    "try and return": "try:\n    x = 1\nexcept Exception as e:\n    return [e]\nreturn [x]",
    "a finally that returns": "try:\n    return\nfinally:\n    return []",
    "a finally that cleans up": "try:\n    return []\nfinally:\n    self.clean()",
    "with": "with self.lock:\n    return []",
    "a match of everything": "match self.mode:\n    case 1:\n        return []\n    case _:\n        raise ValueError",
    "a match that captures": "match self.mode:\n    case 1:\n        return []\n    case any:\n        return [any]",
    "every request returns": "for request in requests:\n    return []",
    "every request, counted": "for i, request in enumerate(requests):\n    return []",
    "no requests": "if not requests:\n    return None\nreturn []",
    "length of none": "if len(requests) == 0:\n    return\nreturn []",
    "sys.exit": "import sys\nif self.a:\n    return []\nsys.exit(1)",
    "raise_error": "if self.a:\n    return []\nraise_error('no')",
    "assert False": "if self.a:\n    return []\nassert False, 'never'",
    "raise NotImplementedError": "raise NotImplementedError",
    "dead code": "return []\nreturn None",
    "if True": "if True:\n    return []",
    "if False": "if False:\n    return None\nreturn []",
    "a response sender": "for request in requests:\n    request.get_response_sender().send(1)\nreturn None",
    "a nested return of None": "def quiet():\n    return None\nquiet()\nreturn []",
    "a lambda": "f = lambda: None\nreturn [f()]",
    "requests": "if requests:\n    return []",
    "not no requests": "if not not requests and requests is not None:\n    return []",
    "more than no requests": "if len(requests) > 0:\n    return []",
    "no fewer than one": "if 1 <= len(requests):\n    return []",
    "fewer than one": "if len(requests) < 1:\n    return\nreturn []",
    "None or no requests": "if requests is None or len(requests) == 0:\n    return None\nreturn []",
    "an empty list": "if requests == []:\n    return None\nelse:\n    return []",
    "as often as there are requests": "for i in range(len(requests)):\n    return []",
    "at the last request": "for i, r in enumerate(requests):\n    if i == len(requests) - 1:\n        return []",
    "assert_never": "import typing\nif self.a:\n    return []\nelse:\n    typing.assert_never(self.a)",
    "a plain assert_never": "from typing import assert_never\nif self.a:\n    return []\nassert_never(self.a)",
    "retries": "for n in range(3):\n    try:\n        return []\n    except E:\n        if n == 2:\n            raise",
    "retries, and None for a linter": "for n in range(3):\n    try:\n        return []\n    except E:\n"
    "        if n == 2:\n            raise\nreturn None",
    "retries by while": "n = 0\nwhile n < 3:\n    try:\n        return []\n    except E:\n        n += 1\n"
    "        if n == 3:\n            raise",
    "retries of each request": "for request in requests:\n    for n in range(3):\n        try:\n"
    "            return []\n        except E:\n            if n == 2:\n                raise",
    "one of several": "for item in self.items:\n    if item.fits:\n        return []",
    "a condition and its opposite": "if self.a:\n    return []\nif not self.a:\n    return []",
    "a comparison and its opposite": "if self.a == 1:\n    return []\nelif self.a != 1:\n    return []",
    "an enumeration": "match self.mode:\n    case Mode.A:\n        return []\n    case Mode.B:\n        return []",
    "some queue answers": "if self.is_idle:\n    return []\nself.queue.put(requests)",
    "some function answers": "if self.is_idle:\n    return []\nfor request in requests:\n    send(request)",
    "a list of them is sent": "batch = []\nfor i, one in enumerate(requests):\n    batch.append(one)\nsend(batch)",
    "they are kept": "if self.a:\n    return []\nself.pending += requests",
    "a thread gets them": "Thread(target=answer, args=(requests,)).start()\nreturn None",
    "somebody else answers": "self.engine.answer(requests)",
}


@pytest.mark.parametrize("body", ENDS.values(), ids=ENDS)
def test_an_execute_that_can_end_without_responses_is_found(body: str, tmp_path: Path) -> None:
    # A model that never speaks of responses may leave them to somebody else.
    assert check_source(tmp_path, execute(body, before="Response = pb_utils.InferenceResponse")) == [
        "execute-returns-none"
    ]


@pytest.mark.parametrize("body", DOES_NOT.values(), ids=DOES_NOT)
def test_an_execute_that_cannot_is_left_alone(body: str, tmp_path: Path) -> None:
    head = "async def execute(self, requests):" if "await" in body else "def execute(self, requests):"
    before = "" if "somebody" in body or "engine" in body else "Response = pb_utils.InferenceResponse"
    assert check_source(tmp_path, execute(body, head=head, before=before)) == []


@pytest.mark.parametrize(
    ("methods", "rules"),
    [
        ("def answer(self, one):\n        send(one)", []),
        ("def answer(self, one):\n        self.waiting = one", []),
        ("def answer(self, one):\n        one.count()", ["execute-returns-none"]),
        ("def answer(self, one):\n        return pb_utils.Tensor('Y', one)", ["execute-returns-none"]),
        ("def answer(self, one) -> NoReturn:\n        self.stop()", []),
    ],
)
def test_a_method_may_hand_requests_on(methods: str, rules: list[str], tmp_path: Path) -> None:
    before = "from typing import NoReturn\nResponse = pb_utils.InferenceResponse"
    text = execute("for request in requests:\n    self.answer(request)", before=before)
    assert check_source(tmp_path, f"{text}\n    {methods}\n") == rules


@pytest.mark.parametrize(
    ("body", "rules"),
    [
        ("return []", ["decoupled-returns"]),
        ("return [answer(request) for request in requests]", ["decoupled-returns"]),
        ("responses = []\nfor r in requests:\n    responses.append(r)\nreturn responses", ["decoupled-returns"]),
        ("if self.a:\n    return []\nreturn None", ["decoupled-returns"]),
        ("return None", []),
        ("return self.answer(requests)", []),
        ("responses = []\nresponses = self.answer(responses)\nreturn responses", []),
        ("if self.is_decoupled:\n    return None\nreturn []", []),
        ("if self.settings['model_transaction_policy']['decoupled']:\n    return None\nreturn []", []),
        ("def inner():\n    return []\ninner()", []),
    ],
)
def test_a_decoupled_model_returns_no_list(body: str, rules: list[str], tmp_path: Path) -> None:
    assert check_source(tmp_path, execute(body), "model_transaction_policy { decoupled: true }\n") == rules

"""The checks of a model.py's code: what must be found, and above all what must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources import check_source, execute

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
    "while with a condition": "while self.is_busy:\n    return []",
    "while True with a break": "while True:\n    if self.is_done:\n        break\n    return []",
    "a loop over other things": "for item in self.items:\n    return []",
    "a loop over requests that continues": "for request in requests:\n    if request:\n        continue\n    return []",
    "a loop over requests that breaks": "for request in requests:\n    break\nelse:\n    return []",
    "suppress": "import contextlib\nwith contextlib.suppress(ValueError):\n    return []",
    "match without a wildcard": "match self.mode:\n    case 1:\n        return []\n    case 2:\n        return []",
    "match with a guard": "match self.mode:\n    case _ if self.a:\n        return []",
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
    assert check_source(tmp_path, execute(body, head=head)) == []

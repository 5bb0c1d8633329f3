"""The check of what the execute of a decoupled model returns: what must be found, and above all what must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sources import check_source, execute


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

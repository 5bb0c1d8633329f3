"""Code blocks of the pages."""

from __future__ import annotations

import re

from tests.support.once import ROOT

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The README and the page after it, in the order in which a newcomer types their blocks.
README = [
    block
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md")
    for block in BLOCK.findall(page.read_text(encoding="utf-8"))
]

"""Picture of the first commands in a terminal: ``python docs/first_minute.py < TEXT > docs/first-minute.svg``.

``TEXT`` has lines of output, and commands after ``$``. tests/slow/test_readme.py types the commands of the picture, and
compares what they print with it; where they differ, it writes the text to build/first-minute.txt.
"""

from __future__ import annotations

import html
import io
import re
import sys

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

# Without the fonts that a browser would load from elsewhere.
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
_WIDTH = 114


def draw(text: str) -> str:
    """Draw the lines as SVG."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    for line in text.splitlines():
        shown = Text(line, "bold" if line.startswith("$ ") else "")
        shown.highlight_regex(r"\berror:", "red")
        console.print(shown)
    return console.export_svg(title="shoal", code_format=_FORMAT, unique_id="shoal")


def read(picture: str) -> str:
    """Return the lines of a picture that ``draw`` drew."""
    lines: dict[str, str] = {}
    for number, text in re.findall(r'-line-(\d+)\)">(.*?)</text>', picture):
        lines[number] = lines.get(number, "") + html.unescape(text).replace("\xa0", " ")
    return "".join(f"{line}\n" for line in lines.values())


if __name__ == "__main__":
    sys.stdout.write(draw(sys.stdin.read()))

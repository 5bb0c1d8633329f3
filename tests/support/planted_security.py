"""Names and links."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import MODEL, Plant, change, config

FIRST = "first/config.pbtxt"

PLANTS = (
    Plant(
        "a model beyond ASCII",
        "unsafe-name",
        "modèle",
        "",
        {"modèle/config.pbtxt": config("modèle"), "modèle/1/model.py": MODEL},
        core="UnicodeEncodeError: 'ascii' codec can't encode character",
        model="modèle",
    ),
    change(
        FIRST,
        "unsafe-name",
        "an instance group of two words",
        'name: "on-cpu"',
        'name: "on cpu"',
        "No module named 'model'",
        good={FIRST: ("kind: KIND_CPU", 'name: "on-cpu" kind: KIND_CPU')},
        model="first",
    ),
    page("symlink-leaves-repository", at="first/1/weights.pt"),
    page("dangling-link", at="first/1/weights.pt"),
)

"""Names and links."""

from __future__ import annotations

from tests.support.planted import MODEL, Link, Plant, change, config

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
    Plant("a link out", "symlink-leaves-repository", "first/1/hosts", "", {"first/1/hosts": Link("/etc/hostname")}),
    Plant(
        "a link to nowhere",
        "dangling-link",
        "first/1/weights.pt",
        "",
        {"first/1/weights.pt": Link("../../../runs/7/weights.pt")},
    ),
)

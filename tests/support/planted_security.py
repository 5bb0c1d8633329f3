"""Names, links, and downloads at import."""

from __future__ import annotations

from tests.support.planted import MODEL, Link, Plant, config

CODE = "first/1/model.py"
CLASS = "\n\nclass TritonPythonModel"
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
    Plant(
        "an instance group of two words",
        "unsafe-name",
        FIRST,
        "name: ",
        {FIRST: ('name: "on-cpu"', 'name: "on cpu"')},
        {FIRST: ("kind: KIND_CPU", 'name: "on-cpu" kind: KIND_CPU')},
        core="No module named 'model'",
        model="first",
    ),
    Plant(
        "a link out",
        "symlink-leaves-repository",
        "first/1/hosts",
        "",
        {"first/1/hosts": Link("/etc/hostname")},
    ),
    Plant(
        "a link to nowhere",
        "dangling-link",
        "first/1/weights.pt",
        "",
        {"first/1/weights.pt": Link("../../../runs/7/weights.pt")},
    ),
    Plant(
        "a download at import",
        "downloads-at-import",
        CODE,
        "urlretrieve",
        {
            CODE: (
                CLASS,
                '\nimport urllib.request\n\nurllib.request.urlretrieve("file:///etc/hostname", "/dev/null")' + CLASS,
            )
        },
    ),
    Plant(
        "a download by a function that is called at import",
        "downloads-at-import",
        CODE,
        "urlopen",
        {CODE: ("    pass", '    urlopen("file:///etc/hostname")')},
        {CODE: (CLASS, "\nfrom urllib.request import urlopen\n\n\ndef prepare():\n    pass\n\n\nprepare()" + CLASS)},
    ),
)

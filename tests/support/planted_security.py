"""Names, links, pickles, and code that runs at import."""

from __future__ import annotations

import io
import pickle
import zipfile

from tests.support.planted import MODEL, Link, Plant, config

CODE = "first/1/model.py"
CLASS = "\n\nclass TritonPythonModel"


def checkpoint() -> bytes:
    """A file as torch.save writes it, without torch."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("weights/data.pkl", pickle.dumps({"weight": 1}))
        archive.writestr("weights/data/0", bytes(16))
    return content.getvalue()


LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
PARAMETER = 'parameters { key: "trust_remote_code" value: { string_value: "false" } }\ndynamic'
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
    Plant("a pickle", "pickle", "first/1/vocabulary.pkl", "", {"first/1/vocabulary.pkl": pickle.dumps({})}),
    Plant("a checkpoint", "pickle", "first/1/weights.pth", "", {"first/1/weights.pth": checkpoint()}),
    Plant("an old checkpoint", "pickle", "first/1/pytorch_model.bin", "", {"first/1/pytorch_model.bin": LEGACY}),
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
    Plant(
        "a command at import",
        "shell-at-import",
        CODE,
        "subprocess.run",
        {CODE: (CLASS, '\nimport subprocess\n\nsubprocess.run(["true"])' + CLASS)},
    ),
    Plant(
        "a command in the class's body",
        "shell-at-import",
        CODE,
        "os.system",
        {CODE: (CLASS + ":\n", "\nimport os" + CLASS + ':\n    os.system("true")\n\n')},
    ),
    Plant(
        "a hub's code",
        "trust-remote-code",
        CODE,
        "trust_remote_code=True",
        {CODE: ("trust_remote_code=False", "trust_remote_code=True")},
        {CODE: (CLASS, "\nsettings = dict(trust_remote_code=False)" + CLASS)},
    ),
    Plant(
        "a hub's code by a parameter",
        "trust-remote-code",
        FIRST,
        "trust_remote_code",
        {FIRST: ('string_value: "false"', 'string_value: "true"')},
        {FIRST: ("dynamic", PARAMETER)},
    ),
    Plant(
        "a hub's code for vLLM",
        "trust-remote-code",
        "first/1/model.json",
        "trust_remote_code",
        {"first/1/model.json": ("false", "true")},
        {"first/1/model.json": '{\n  "model": "org/name",\n  "trust_remote_code": false\n}\n'},
    ),
)

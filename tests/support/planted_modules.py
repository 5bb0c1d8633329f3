"""Imports that an environment does not satisfy."""

from __future__ import annotations

from tests.support.planted import MODEL, Edit, Plant
from tests.support.planted_environments import GOOD, PYTHON, path

CODE = "first/1/model.py"
PACKAGES = f"first/env/lib/python{PYTHON}/site-packages"
FOLDER: dict[str, Edit] = {
    **path("$$TRITON_MODEL_DIRECTORY/env"),
    "first/env/bin/activate": "",
    "first/env/bin/python3": "",
    "first/env/pyvenv.cfg": "include-system-site-packages = false\n",
    f"{PACKAGES}/numpy/__init__.py": "",
    f"{PACKAGES}/numpy-1.26.4.dist-info/METADATA": "Metadata-Version: 2.1\nName: numpy\nVersion: 1.26.4\n",
    f"{PACKAGES}/distutils-precedence.pth": "import os\n",
    "first/1/beside.py": "A = 1\n",
    "first/1/model.py": "import json\nimport beside\n" + MODEL,
}


def plant(name: str, line: str, good: dict[str, Edit], edits: dict[str, Edit] | None = None) -> Plant:
    bad = edits or {CODE: ("import numpy as np\n", f"import numpy as np\n{line}\n")}
    return Plant(name, "import-not-in-environment", CODE, line, bad, good, model="first")


TRIED = {
    **FOLDER,
    CODE: MODEL.replace("import numpy", "try:\n    import torch\nexcept ImportError:\n    pass\nimport numpy"),
}
PLANTS = (
    plant("torch in no archive", "import torch", GOOD),
    plant("a part of a package in no archive", "from transformers.models import bert", GOOD),
    plant("a second module", "import json, requests", FOLDER),
    plant("a submodule", "import google.protobuf as protobuf", FOLDER),
    plant("a module that is gone", "import beside", FOLDER, {"first/1/beside.py": None}),
    plant("a module beside one that is tried", "from PIL import Image", TRIED),
)

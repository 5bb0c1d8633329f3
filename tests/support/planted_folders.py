"""Mistakes in a model's folder."""

from __future__ import annotations

from tests.support.planted import MODEL, ON_PAGE, Plant, config

FIRST = "first/config.pbtxt"
OTHER = config("other")
AUTO = """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [4]})
        return config
"""

PLANTS = (
    Plant(
        "another folder's name",
        "folder-name",
        FIRST,
        "second",
        {FIRST: ('name: "first"', 'name: "second"')},
        core="directory name must equal model name",
    ),
    Plant(
        "an ensemble that git cut",
        "no-version",
        "all",
        "",
        {"all/1/.gitkeep": None},
        core="at least one version must be available",
    ),
    Plant(
        "a version 0 of one",
        "no-version",
        "first",
        "",
        {"first/1/model.py": None, "first/01/model.py": MODEL},
        core="at least one version must be available",
    ),
    Plant(
        "only a version that is not there",
        "no-version",
        FIRST,
        "version_policy",
        {FIRST: ("dynamic", "version_policy: { specific { versions: [ 7 ] } }\ndynamic")},
        core="at least one version must be available",
    ),
    Plant("a version called v2", "version-folder-ignored", "first/v2", "", {"first/v2/model.py": MODEL}),
    Plant("a version put aside", "version-folder-misread", "first/2.bak", "", {"first/2.bak/model.py": MODEL}),
    Plant(
        "one version too many",
        "version-policy-absent",
        FIRST,
        "version_policy",
        {FIRST: ON_PAGE},
        {FIRST: ("dynamic", "version_policy: { specific { versions: [ 1 ] } }\ndynamic")},
    ),
    Plant(
        "model.py by another name",
        "model-file-missing",
        "first/1",
        "",
        {"first/1/model.py": None, "first/1/models.py": MODEL},
    ),
    Plant(
        "labels that are not there",
        "label-file-missing",
        FIRST,
        "labels.txt",
        {FIRST: ('output { name: "Y"', 'output { label_filename: "labels.txt" name: "Y"')},
        core="failed to open text file for read",
    ),
    Plant(
        "labels from Windows",
        "label-line-ends",
        "first/labels.txt",
        "",
        {"first/labels.txt": "short\r\nlong\r\n"},
        {
            "first/labels.txt": "short\nlong\n",
            FIRST: ('output { name: "Y"', 'output { label_filename: "labels.txt" name: "Y"'),
        },
    ),
    *(
        Plant(
            f"the configuration in {name}",
            "config-incomplete",
            f"other/{name}",
            "",
            {"other/config.pbtxt": None, f"other/{name}": OTHER, "other/1/model.py": MODEL},
            {"other/config.pbtxt": OTHER, "other/1/model.py": MODEL},
            target=target,
        )
        for name, target in (
            ("Config.pbtxt", "embedded"),
            ("config.pbtxt.txt", "26.06"),
            ("1/config.pbtxt", "embedded"),
        )
    ),
    Plant(
        "no configuration at all",
        "config-incomplete",
        "other",
        "",
        {"other/config.pbtxt": None},
        {"other/config.pbtxt": OTHER, "other/1/model.py": MODEL},
        target="embedded",
    ),
    Plant(
        "tensors that only code declares",
        "config-incomplete",
        "other/config.pbtxt",
        "",
        {
            "other/config.pbtxt": 'backend: "python"\ninstance_group [ { kind: KIND_CPU } ]\n',
            "other/1/model.py": MODEL + AUTO,
        },
        {"other/config.pbtxt": OTHER, "other/1/model.py": MODEL + AUTO},
        target="embedded",
    ),
    Plant(
        "a folder of documents",
        "not-a-model",
        "docs",
        "",
        {"docs/index.md": "# Models\n"},
        core="Poll failed|no backend|must specify",
        model="docs",
    ),
)

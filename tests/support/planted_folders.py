"""Mistakes in a model's folder."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import MODEL, Plant, change, config

FIRST = "first/config.pbtxt"
OTHER = config("other")
NO_VERSION = "at least one version must be available"
AUTO = """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [4]})
        return config
"""

PLANTS = (
    page("folder-name", core="directory name must equal model name"),
    page("no-version", at="all", core=NO_VERSION),
    page("version-folder-ignored", at="first/v2"),
    page("version-folder-misread", at="first/2.bak"),
    page("version-policy-absent"),
    page("model-file-missing", at="first/1"),
    page("label-file-missing", good={"first/labels.txt": "a\nb\nc\nd\n"}, core="failed to open text file for read"),
    page(
        "label-count",
        "first/labels.txt",
        {
            "first/labels.txt": "cold\ncool\nwarm\nhot\n",
            FIRST: ('output { name: "Y"', 'output { label_filename: "labels.txt" name: "Y"'),
        },
        line="",
    ),
    page("config-incomplete", at="first/Config.pbtxt", target="embedded"),
    page("not-a-model", at="docs", core="Poll failed|no backend|must specify", model="docs"),
    Plant(
        "a version 0 of one",
        "no-version",
        "first",
        "",
        {"first/1/model.py": None, "first/01/model.py": MODEL},
        core=NO_VERSION,
    ),
    change(
        FIRST,
        "no-version",
        "only a version that is not there",
        "dynamic",
        "version_policy: { specific { versions: [ 7 ] } }\ndynamic",
        NO_VERSION,
    ),
    *(
        change(
            FIRST,
            "no-version",
            f"a policy of {policy}",
            "dynamic",
            f"version_policy {{ {policy} }}\ndynamic",
            NO_VERSION,
        )
        for policy in ("specific { }", "latest { num_versions: 0 }", "latest { }")
    ),
    Plant("a newer version without its file", "model-file-missing", "first/2", "", {"first/2/": ""}),
    Plant(
        "no configuration of a model.py that completes none",
        "config-incomplete",
        "other",
        "",
        {"other/1/model.py": MODEL},
        {"other/config.pbtxt": None, "other/1/model.py": MODEL + AUTO},
        target="26.06",
    ),
    Plant(
        "labels from Windows",
        "label-line-ends",
        "first/labels.txt",
        "",
        {"first/labels.txt": "short\r\nlong\r\na\r\nb\r\n"},
        {
            "first/labels.txt": "short\nlong\na\nb\n",
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
        for name, target in (("config.pbtxt.txt", "26.06"), ("1/config.pbtxt", "embedded"))
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
)

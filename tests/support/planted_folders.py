"""Mistakes in a model's folder."""

from __future__ import annotations

from tests.support.planted import MODEL, Plant

FIRST = "first/config.pbtxt"

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
        {FIRST: ("[ 1 ]", "[ 1, 7 ]")},
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
        "a folder of documents",
        "not-a-model",
        "docs",
        "",
        {"docs/index.md": "# Models\n"},
        core="Poll failed|no backend|must specify",
        model="docs",
    ),
)

"""Reading of the users' files that environments are made from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.authoring.environment.building import find_file, find_overrides
from shoal.authoring.environment.spec import Wanted, read_wanted
from shoal.errors import InputError
from tests.support.once import ROOT


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_an_environment_yml(tmp_path: Path) -> None:
    (tmp_path / "a.whl").touch()
    write(tmp_path / "more.txt", "tokenizers>=0.21  # words\n\n# nothing\n-r deeper.txt\n")
    write(tmp_path / "deeper.txt", "rich \\\n  >=13\n-r more.txt\n")
    source = write(
        tmp_path / "environment.yml",
        "name: x\nchannels: [conda-forge, nodefaults]\n"
        "dependencies:\n  - python=3.12\n  - numpy <2\n  - pip\n  - pip: ['-r more.txt', './a.whl --hash=sha256:12']\n",
    )
    wanted = read_wanted(source)
    assert wanted.channels == ("conda-forge", "nodefaults")
    assert wanted.conda == ("python=3.12", "numpy <2", "pip")
    assert wanted.pip == ("tokenizers>=0.21", "rich    >=13", f"{tmp_path}/a.whl --hash=sha256:12")
    assert wanted.python == "3.12"
    assert not wanted.is_pip_only
    assert wanted.with_python("3.12").conda == ("python 3.12.*", "python=3.12", "numpy <2", "pip")
    with pytest.raises(InputError, match=r"asks for Python 3\.12, which excludes Python 3\.11"):
        wanted.with_python("3.11")


def test_the_digest_follows_contents_not_places(tmp_path: Path) -> None:
    first = write(tmp_path / "a.txt", "numpy<2\n")
    second = write(tmp_path / "b.txt", "# the same\nnumpy<2\n")
    assert read_wanted(first).digest == read_wanted(second).digest
    write(second, "-r c.txt\n")
    write(tmp_path / "c.txt", "numpy<3\n")
    changed = read_wanted(second).digest
    assert changed != read_wanted(first).digest
    write(tmp_path / "c.txt", "numpy<4\n")
    assert read_wanted(second).digest != changed


@pytest.mark.parametrize(
    ("spec", "python"),
    [("python=3.12", "3.12"), ("python 3.11.*", "3.11"), ("python==3.13.1", "3.13"), ("python >=3.11,<3.13", "")],
)
def test_pinned_python_versions(spec: str, python: str) -> None:
    assert Wanted(Path("x"), conda=(spec,)).python == python


def test_a_range_of_pythons_is_kept() -> None:
    wanted = Wanted(Path("e.yml"), conda=("python >=3.11,<3.13", "numpy"))
    assert wanted.with_python("3.12").conda == ("python 3.12.*", "python >=3.11,<3.13", "numpy")


def test_an_environment_that_changed_is_another_one(tmp_path: Path) -> None:
    record = tmp_path / "lib" / "python3.11" / "site-packages" / "a-1.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.touch()
    before = read_wanted(tmp_path).digest
    write(record, "a.py,,\n")
    assert read_wanted(tmp_path).digest != before


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("e.yml", "a: [", "is not YAML: while parsing"),
        ("e.yml", "name: x\n", "has no list `dependencies`"),
        ("e.yml", "dependencies: [{conda: [x]}]\n", r"has the dependency \{'conda': \['x'\]\}, which is not text"),
        ("e.yml", "dependencies: [{pip: ['-e ./mine']}]\n", r"asks for an editable install of \./mine"),
        ("r.txt", "numpy\n--editable=git+https://host/x\n", "asks for an editable install of git"),
        ("r.txt", "# nothing\n", "lists no packages"),
        ("r.txt", "-r nowhere.txt\n", "refers to .*nowhere.txt, which cannot be read"),
        ("r.txt", 'numpy; python_version < "3\n', "has a quote that is not closed"),
        ("r.txt", "caf\xe9", "cannot be read: it is not UTF-8"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=words):
        read_wanted(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.yml cannot be read: No such file"):
        read_wanted(tmp_path / "nowhere.yml")


@pytest.mark.parametrize(
    ("target", "engine", "is_for_gpu", "name"),
    [
        ("embedded", "rattler", False, "environment-embedded.yml"),
        ("24.10", "conda", False, "environment-embedded.yml"),
        ("26.06", "rattler", False, "environment.yml"),
        ("26.06", "micromamba", True, "environment-gpu.yml"),
        ("embedded", "venv", False, "requirements-embedded.txt"),
    ],
)
def test_shoals_own_files(target: str, engine: str, is_for_gpu: bool, name: str) -> None:
    path = find_file(target, engine, is_for_gpu=is_for_gpu)
    assert path == ROOT / "env" / name
    wanted = read_wanted(path)
    assert any(line.startswith("tokenizers") for line in wanted.pip)
    assert any("numpy" in line and "<2" in line for line in wanted.pip) == name.endswith(("-embedded.yml", "d.txt"))
    assert wanted.is_pip_only


@pytest.mark.parametrize(
    ("target", "engine", "name", "overrides"),
    [
        ("embedded", "venv", "requirements-vllm.txt", ("numpy>=1.26,<2",)),
        ("24.10", "rattler", "environment-vllm.yml", ("numpy>=1.26,<2",)),
        ("26.06", "conda", "environment-vllm.yml", ()),
    ],
)
def test_the_file_of_a_model_with_special_requirements(
    target: str, engine: str, name: str, overrides: tuple[str, ...]
) -> None:
    path = find_file(target, engine, is_for_gpu=True, model="llm-vllm")
    assert path == ROOT / "env" / name
    assert {re.split("[<>]", line)[0] for line in read_wanted(path).pip} == {"array-api-compat", "numpy", "vllm"}
    assert find_overrides(target, "llm-vllm") == overrides
    assert find_overrides(target, "") == ()
    with pytest.raises(InputError, match=r"llm-hf does not need an environment of its own\. Known: llm-vllm\."):
        find_file(target, engine, is_for_gpu=False, model="llm-hf")


def test_rapids_needs_a_server_that_supports_numpy_2() -> None:
    for target in ("embedded", "24.10"):
        with pytest.raises(InputError, match="RAPIDS needs NumPy 2"):
            find_file(target, "rattler", is_for_gpu=True)

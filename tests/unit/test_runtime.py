from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest

from shoal.authoring.environment.embedded import STUB
from shoal.cli.doctor import examine
from shoal.errors import SetupError
from shoal.serving.server import runtime
from shoal.serving.server.runtime import check_numpy, find_runtime


def test_the_runtime_is_found_by_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packaged = find_runtime()
    monkeypatch.setenv("SHOAL_TRITONSERVER", str(packaged.binary))
    assert find_runtime() == packaged
    monkeypatch.setenv("SHOAL_TRITONSERVER", str(tmp_path / "nowhere"))
    with pytest.raises(SetupError, match=r"SHOAL_TRITONSERVER names .*nowhere, which is not a file"):
        find_runtime()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    monkeypatch.setenv("SHOAL_TRITONSERVER", str(tmp_path / "bin" / "tritonserver"))
    with pytest.raises(SetupError, match="has no Python backend stub for Python"):
        find_runtime()


def test_a_stub_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may be built for NumPy 2: then this NumPy is the model's business, whose start tries it."""
    packaged = find_runtime()
    own = tmp_path / STUB
    shutil.copy2(packaged.stub, own)
    monkeypatch.setenv("SHOAL_STUB", str(own))
    monkeypatch.setattr("numpy.__version__", "2.5.2")
    assert find_runtime() == dataclasses.replace(packaged, stub=own)
    monkeypatch.setenv("SHOAL_STUB", str(tmp_path / "nowhere"))
    with pytest.raises(SetupError, match=r"SHOAL_STUB names .*nowhere, which is not a file"):
        find_runtime()


def test_missing_libraries_are_named_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing, fix in ((["libpython3.11.so.1.0"], "apt install libpython3.11"), (["libb64.so.0d"], "Reinstall it")):
        with monkeypatch.context() as patch:
            patch.setattr(runtime.Runtime, "missing_libraries", lambda _, names=missing: names)
            with pytest.raises(SetupError, match=f"Triton needs {missing[0]}.*{fix}"):
                find_runtime()


def test_other_machines_are_pointed_to_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(
        SetupError, match=r"The embedded Triton runs on Linux x86-64, not on Linux aarch64\. Use NVIDIA's"
    ):
        find_runtime()
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SetupError, match=r"pip install 'shoal\[serve\]'"):
        find_runtime()


def test_numpy_2_is_refused_for_the_packaged_stub() -> None:
    with pytest.raises(SetupError, match=r"corrupts tensors under NumPy 2\.1\.0\. Type: pip install 'numpy<2'"):
        check_numpy("2.1.0")


def test_the_doctor_reads_the_stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One of one's own, for an older NumPy or none at all; and a user's own packages."""
    root = find_runtime().stub.parents[1]
    own = root / f"{sys.version_info.major}.{sys.version_info.minor}" / STUB
    monkeypatch.setenv("SHOAL_STUB", str(own))
    monkeypatch.setattr("shoal.cli.doctor.np.__version__", "2.5.5")
    assert "corrupts tensors under NumPy 2" in _told("stub")
    monkeypatch.setenv("SHOAL_STUB", __file__)
    assert "is not a whole ELF file" in _told("stub")
    (tmp_path / "numpy-2.5.5.dist-info").mkdir()
    monkeypatch.setattr("site.getusersitepackages", lambda: str(tmp_path))
    monkeypatch.delenv("PYTHONNOUSERSITE", raising=False)
    assert _told("this user's own packages") == f"{tmp_path} holds numpy"


def _told(check: str) -> str:
    return next(finding.found for finding in examine() if finding.check == check)

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import SetupError
from shoal.serving import runtime
from shoal.serving.runtime import container_command, find_runtime


def test_the_runtime_is_found_by_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packaged = find_runtime()
    monkeypatch.setenv("SHOAL_TRITONSERVER", str(packaged.binary))
    assert find_runtime() == packaged
    monkeypatch.setenv("SHOAL_TRITONSERVER", str(tmp_path / "nowhere"))
    with pytest.raises(SetupError, match=r"SHOAL_TRITONSERVER names .*nowhere, which is no file"):
        find_runtime()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    monkeypatch.setenv("SHOAL_TRITONSERVER", str(tmp_path / "bin" / "tritonserver"))
    with pytest.raises(SetupError, match="has no Python backend stub for Python"):
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


def test_the_container_command() -> None:
    command = container_command(Path("/srv/repository"), "26.06")
    assert "nvcr.io/nvidia/tritonserver:26.06-py3 tritonserver --model-repository=/models" in command
    assert "-v /srv/repository:/models:ro" in command

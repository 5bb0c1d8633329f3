from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shoal.errors import ArtifactError, SetupError
from shoal.readability import download
from shoal.readability.corpus import DATA_DIR, FORMULAS, read_corpus
from shoal.readability.download import CLEAR_FILE, CLEAR_SHA256, CLEAR_URL, download_clear

BODY = bytes(range(256)) * 1000
SUM = hashlib.sha256(BODY).hexdigest()


class _Origin(BaseHTTPRequestHandler):
    """A web server's answers, by path."""

    def do_GET(self) -> None:
        origin = self.server
        assert isinstance(origin, _Server)
        origin.num_requests += 1
        if self.path == "/missing":
            self.send_error(404)
        elif self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/whole")
            self.end_headers()
        elif self.path == "/stalled":
            time.sleep(1)
        else:
            self.send_response(200)
            if self.path != "/unsized":
                self.send_header("Content-Length", str(len(origin.body)))
            self.end_headers()
            self.wfile.write(origin.body[:-1] if self.path == "/truncated" else origin.body)

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002
        pass


class _Server(ThreadingHTTPServer):
    body = BODY
    num_requests = 0

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


@pytest.fixture
def origin(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with _Server(("127.0.0.1", 0), _Origin) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["whole", "unsized", "moved"])
def test_a_file_is_downloaded_once(
    path: str, origin: _Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "not" / "yet"
    stages: list[tuple[str, int, int]] = []
    with caplog.at_level(logging.INFO, logger="root"):
        for _ in range(2):
            found = download_clear(
                url=origin.url(path), sha256=SUM, folder=folder, on_progress=lambda *step: stages.append(step)
            )
            assert found == folder / CLEAR_FILE
            assert found.read_bytes() == BODY
            origin.shutdown()
    assert origin.num_requests == (2 if path == "moved" else 1)
    assert [entry.name for entry in folder.iterdir()] == [CLEAR_FILE]
    assert {stage for stage, _, _ in stages} == {download.STAGE}
    steps = [step for _, *step in stages]
    assert (steps[0], steps[-1]) == ([0, 1], [1, 1])
    sized = [tuple(step) for step in steps[1:-1]]
    assert sized == sorted(sized)
    assert sized[-1:] == ([] if path == "unsized" else [(len(BODY), len(BODY))])
    assert not [record for record in caplog.records if record.name == "pooch"]
    assert capfd.readouterr() == ("", "")


def test_a_server_that_is_gone_does_not_matter(origin: _Server, tmp_path: Path) -> None:
    (tmp_path / CLEAR_FILE).write_bytes(BODY)
    assert download_clear(url="http://127.0.0.1:9/x", sha256=SUM, folder=tmp_path).read_bytes() == BODY
    assert origin.num_requests == 0


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing", "HTTP 404 Not Found"),
        ("truncated", "IncompleteRead(255999 bytes read, 1 more expected)"),
        ("stalled", "timed out"),
        ("closed", "Connection refused"),
    ],
)
def test_a_host_that_does_not_give_it(
    path: str, reason: str, origin: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUTS", (0.2, 0.2))
    url = f"http://127.0.0.1:{closed_port()}/x" if path == "closed" else origin.url(path)
    with pytest.raises(SetupError) as caught:
        download_clear(url=url, sha256=SUM, folder=tmp_path)
    assert str(caught.value) == (
        f"127.0.0.1 did not give {CLEAR_FILE}: {reason}. "
        f"Download it by hand from {url}, and name the file with --data FILE."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_no_host_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(SetupError, match=rf"^nowhere\.invalid did not give {CLEAR_FILE}: [^\n]+\. Download it by hand"):
        download_clear(url="http://nowhere.invalid/x", sha256=SUM, folder=tmp_path)


@pytest.mark.parametrize("was_there", [False, True])
def test_another_file_is_not_kept(was_there: bool, origin: _Server, tmp_path: Path) -> None:
    if was_there:
        (tmp_path / CLEAR_FILE).write_bytes(b"half of one")
    wanted = "0" * 64
    with pytest.raises(ArtifactError) as caught:
        download_clear(url=origin.url("whole"), sha256=wanted, folder=tmp_path)
    assert str(caught.value) == (
        f"{CLEAR_FILE} from 127.0.0.1 has the SHA-256 {SUM}, not {wanted}. "
        "If it was published again, download it by hand, look at it, and name the file with --data FILE."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_copy_is_replaced(origin: _Server, tmp_path: Path) -> None:
    (tmp_path / CLEAR_FILE).write_bytes(b"half of one")
    assert download_clear(url=origin.url("whole"), sha256=SUM, folder=tmp_path).read_bytes() == BODY


def test_folders_that_cannot_be_used(origin: _Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, reason in ((tmp_path / "file", "Not a directory"), (Path("/proc/shoal"), "No such file or directory")):
        with pytest.raises(SetupError) as caught:
            download_clear(url=origin.url("whole"), sha256=SUM, folder=folder)
        assert str(caught.value) == (
            f"{folder} cannot be used: {reason}. "
            f"Download it by hand from {origin.url('whole')}, and name the file with --data FILE."
        )
    assert origin.num_requests == 0


def test_the_cache_is_this_users(origin: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert download_clear(url=origin.url("whole"), sha256=SUM) == tmp_path / "shoal" / CLEAR_FILE


def test_pooch_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(SetupError, match=r"^pooch is not installed\. Type: pip install 'shoal\[train\]'$"):
        download_clear(folder=tmp_path)


@pytest.mark.corpus
def test_the_real_file_is_the_one_that_is_meant(origin: _Server, tmp_path: Path) -> None:
    source = Path(os.environ.get(DATA_DIR, "")) / CLEAR_FILE
    if not os.environ.get(DATA_DIR) or not source.is_file():
        pytest.skip(f"{DATA_DIR} names no folder with {CLEAR_FILE}")
    assert CLEAR_URL.endswith(f"/{CLEAR_FILE}")
    origin.body = source.read_bytes()
    found = read_corpus(download_clear(url=origin.url(CLEAR_FILE), sha256=CLEAR_SHA256, folder=tmp_path))
    assert (found.name, len(found)) == ("CLEAR corpus", 4724)
    assert tuple(found.formulas) == FORMULAS
    assert set(found.genres) == {"Lit", "Info"}

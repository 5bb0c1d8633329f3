"""S3 in the process of the tests (moto), with faults planted before and after it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from shoal.clients.bulk.shards import folders
from shoal.clients.bulk.shards.folders import find_inputs, open_folder


class Store:
    """S3 in this process. Of each file whose name contains ``lost``, the answer to its first put is lost; puts of files
    whose names contain ``refused`` are refused.
    """

    def __init__(self) -> None:
        import boto3
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.lost = self.refused = "/none/"
        self.seen: list[str] = []
        self._app: Any = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        url = f"http://127.0.0.1:{self._server.server_port}"
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        self.environ = {**keys, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
        boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
        ).create_bucket(Bucket="bucket")

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] == "PUT" and self.refused in path:
            start_response("403 Forbidden", [("Content-Length", "0")])
            return [b""]
        answer = self._app(environ, start_response)
        if environ["REQUEST_METHOD"] == "PUT" and self.lost in path and path not in self.seen:
            self.seen.append(path)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return answer

    def end(self) -> None:
        urlopen(f"{self.environ['AWS_ENDPOINT_URL']}/moto-api/reset", b"").close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store()
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    folders._open_store.cache_clear()
    yield made
    made.end()
    folders._open_store.cache_clear()


def upload(pattern: str, url: str) -> str:
    """Put the files of a pattern into a folder; return their pattern there."""
    folder = open_folder(url)
    for name, _ in find_inputs(pattern):
        folder.put(Path(name).name, Path(name))
    return f"{url}/{Path(pattern).name}"


def download(url: str) -> dict[str, bytes]:
    folder = open_folder(url)
    return {entry.name: folder.read(entry.name) or b"" for entry in folder.entries()}

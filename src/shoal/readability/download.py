"""Download of the CLEAR corpus from its authors' repository."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoal.errors import ArtifactError, SetupError, needs
from shoal.system.progress import OnProgress

CLEAR_FILE = "CLEAR_corpus_final.xlsx"
CLEAR_URL = "https://github.com/scrosseye/CLEAR-Corpus/raw/main/CLEAR_corpus_final.xlsx"
CLEAR_SHA256 = "e87a19a29c12a441e0c4f11a4e49897ff24ac7dff240ee7397283a050a902cc7"
TIMEOUTS = (10.0, 30.0)  # seconds to connect, and between two reads
STAGE = "download the CLEAR corpus"
_CHUNK = 1 << 16  # bytes
_BY_HAND = "Download it by hand from {url}, and name the file with --data FILE."


def download_clear(
    *,
    url: str = CLEAR_URL,
    sha256: str = CLEAR_SHA256,
    folder: Path | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Path:
    """Return the CLEAR corpus's file, downloaded to ``folder`` (else this user's cache) if it is not there already.

    Crossley, Heintz, Choi, Batchelor, Karimi, Malatinszky, "A large-scaled corpus for assessing text readability",
    Behavior Research Methods, 2022. Licence: CC BY-NC-SA 4.0, so not for commercial use; shoal contains no part of it.

    An existing file with the checksum ``sha256`` is used without network access. Progress is in bytes.

    Raises:
        ArtifactError: the downloaded file has another checksum; it is deleted.
        SetupError: the host cannot be reached or refuses, the folder cannot be written, or pooch is not installed.
    """
    with needs("train"):
        import pooch
    import requests

    path = Path(folder or pooch.os_cache("shoal")) / CLEAR_FILE
    answers: list[requests.Response] = []  # pooch does not close them
    fetch = pooch.HTTPDownloader(
        timeout=TIMEOUTS,
        chunk_size=_CHUNK,
        progressbar=_Bar(on_progress),
        hooks={"response": lambda answer, *rest, **more: answers.append(answer)},
    )

    def fetch_checked(source: str, file: str, mirror: Any) -> None:
        on_progress(STAGE, 0, 1)
        fetch(source, file, mirror)
        found = pooch.file_hash(file)
        if found != sha256:  # raised here, before pooch deletes the file and raises an error of its own
            path.unlink(missing_ok=True)
            raise ArtifactError(
                f"{CLEAR_FILE} from {urlsplit(url).hostname} has the SHA-256 {found}, not {sha256}.",
                "If it was published again, download it by hand, look at it, and name the file with --data FILE.",
            )
        on_progress(STAGE, 1, 1)

    pooch.get_logger().setLevel(logging.WARNING)  # it logs every file
    by_hand = _BY_HAND.format(url=url)
    try:
        pooch.retrieve(url, known_hash=sha256, fname=path.name, path=path.parent, downloader=fetch_checked)
    except requests.RequestException as error:
        raise SetupError(f"{urlsplit(url).hostname} did not give {CLEAR_FILE}: {_reason(error)}.", by_hand) from None
    except OSError as error:
        raise SetupError(f"{path.parent} cannot be used: {error.strerror or error}.", by_hand) from None
    finally:
        for answer in answers:
            answer.close()
    return path


class _Bar:
    """Progress bar with the interface that pooch expects, forwarding to ``on_progress``."""

    def __init__(self, on_progress: OnProgress) -> None:
        self.total = 0  # bytes, which pooch sets; 0 where the server does not say
        self._done = 0
        self._on_progress = on_progress

    def update(self, num_bytes: int) -> None:
        self._done = min(self._done + num_bytes, self.total)
        if self._done:
            self._on_progress(STAGE, self._done, self.total)

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        pass


def _reason(error: BaseException) -> str:
    """Describe a failure in one line: the HTTP status, else the innermost exception."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP {response.status_code} {response.reason}".strip()
    while cause := error.__cause__ or error.__context__:
        error = cause
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(said).splitlines()[0]

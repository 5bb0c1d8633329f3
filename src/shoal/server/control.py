"""Load and unload models of a running server."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

from shoal.errors import InputError, ServerError

MODES = NONE, EXPLICIT = ("none", "explicit")
LOAD_SECONDS = 120.0
_LOOK_SECONDS = 0.01  # between two looks whether a model is unloaded
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for loopback


class ModelControl:
    """Loads and unloads models of a server that was started with ``model_control="explicit"``.

    Threads may share it; requests to Triton are serialised. Concurrent loads and unloads crash the embedded 24.10 with
    a segmentation fault, about once in a hundred pairs. Triton answers a request to unload before it has unloaded, so
    the next request waits for that.
    """

    def __init__(self, http_url: str, admin_key: str, mode: str) -> None:
        if mode not in MODES:
            raise InputError(f"Unknown model control {mode!r}.", f"Known: {', '.join(MODES)}.")
        self._http_url, self._admin_key, self.mode = http_url, admin_key, mode
        self._lock = threading.Lock()

    def load(self, model: str, timeout: float = LOAD_SECONDS) -> None:
        """Load ``model``, or load it again if its files have changed; returns when it is ready.

        An ensemble whose member was unloaded has to be loaded again as well.

        Raises:
            InputError: the server was not started with explicit model control.
            ServerError: it did not load, with Triton's reason, or took longer than ``timeout`` seconds.
        """
        self._ask(model, "load", {}, timeout)

    def unload(self, model: str, timeout: float = LOAD_SECONDS) -> None:
        """Unload ``model`` after answering its requests; returns when it is unloaded.

        Ensembles that call it are unloaded with it.

        Raises:
            InputError: the server was not started with explicit model control.
            ServerError: there is no such model, or it took longer than ``timeout`` seconds.
        """
        self._ask(model, "unload", {"parameters": {"unload_dependents": False}}, timeout)

    def _ask(self, model: str, action: str, body: object, timeout: float) -> None:
        if self.mode != EXPLICIT:
            raise InputError(
                f"This server keeps the models that it started with; {model} cannot be {action}ed.",
                f'Start it with shoal.serve(..., model_control="{EXPLICIT}").',
            )
        end = time.monotonic() + timeout
        try:
            with self._lock:
                self._post(f"models/{urllib.parse.quote(model, safe='')}/{action}", body, end)
                while b'"UNLOADING"' in self._post("index", {}, end):
                    time.sleep(_LOOK_SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(f"{model} was not {action}ed: {_reason(error.read())}") from None
        except TimeoutError:
            raise ServerError(
                f"{model} was not {action}ed within {timeout:g} s.", f"Give it longer: timeout={timeout * 2:g}"
            ) from None
        except OSError as error:
            raise ServerError(f"The server at {self._http_url} is gone ({error}).", "Start it again.") from None

    def _post(self, path: str, body: object, end: float) -> bytes:
        request = urllib.request.Request(
            f"http://{self._http_url}/v2/repository/{path}",
            data=json.dumps(body).encode(),
            headers={"admin-key": self._admin_key},
        )
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        with _DIRECT.open(request, timeout=left) as answer:
            return bytes(answer.read())


def _reason(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return answer.decode("utf-8", "replace")

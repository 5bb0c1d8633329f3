"""Pages of a service's port for operators: metrics, and the state of its models."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import NamedTuple

from shoal.clients.client.failures import Kind, connection_failure
from shoal.clients.client.flow import read_url
from shoal.errors import ServerError

_KEY = (
    "It needs a key that may read metrics. Make one in the file of shoal serve --keys: shoal keys new operator --may"
    " metrics --file KEYS > key; then give it: --api-key-file key"
)


class ModelState(NamedTuple):
    """State of a model: ``ready``, or why it is not, and how many requests to it are in flight."""

    model: str
    state: str
    in_flight: int


def read_page(url: str, path: str, api_key: str = "", ca_cert: str = "", client_cert: str = "") -> str:
    """Read a page, also that of a service which is not ready. The options are those of ``shoal.Client``, for HTTP.

    Raises:
        InputError: the value of an option is invalid.
        ServerError: no server answers at ``url``, or it refuses the key.
    """
    url, tls = read_url(url, "http", ca_cert, client_cert)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{'https' if tls else 'http'}://{url}{path}", headers=headers)
    # no proxy for loopback
    handlers = [urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=tls.context)] if tls else [])]
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 503:
                return error.read().decode()
            fix = _KEY if error.code in (401, 403) else _say_place(url)
            why = ": this is not its metrics address" if error.code == 404 else ""
            raise ServerError(f"The server at {url} answered HTTP {error.code}{why}.", fix) from None
    except http.client.HTTPException:
        fix = _say_place(url)
        fix = fix if tls else f"It may speak TLS: shoal status https://{url} --ca-cert FILE. Otherwise: {fix}"
        raise ServerError(f"The server at {url} does not speak HTTP, as a port of gRPC does not.", fix) from None
    except OSError as error:
        inner = getattr(error, "reason", error)
        failure = connection_failure(inner if isinstance(inner, OSError) else error)
        what, fix = (
            f"No Triton answers at {url} ({failure.message}).",
            f"Start one: shoal serve MODEL. {_say_place(url)}",
        )
        if failure.kind is Kind.UNTRUSTED:
            what = f"No secure connection to the server at {url} was made: {failure.message}."
            fix = "If the certificate is right, name its authority: --ca-cert FILE, in Python ca_cert=..."
        raise ServerError(what, fix) from None


def _say_place(url: str) -> str:
    host, _, port = url.rpartition(":")
    return f"Give its metrics address, such as {host}:{8003 if port == '8002' else 8002}, which shoal serve prints."


def read_states(url: str, api_key: str = "", ca_cert: str = "", client_cert: str = "") -> list[ModelState]:
    """Return the state of each model that `shoal serve` serves; the parameters and errors are those of ``read_page``.

    Raises:
        ServerError: what answers is no service of shoal, or the key may not see its models.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        page = json.loads(read_page(url, "/health/ready", api_key, ca_cert, client_cert))
    except ValueError:
        page = None
    known = page if isinstance(page, dict) else {}
    states = known.get("models")
    if not isinstance(states, dict):
        fix = _KEY if "ready" in known else _say_place(url)
        raise ServerError(f"The server at {url} does not tell the states of models.", fix)
    families = text_string_to_metric_families(read_page(url, "/metrics", api_key, ca_cert, client_cert))
    counts = {
        labels["model"]: int(value)
        for family in families
        for name, labels, value, *_ in family.samples
        if name == "shoal_in_flight"
    }
    return [ModelState(name, state, counts.get(name, 0)) for name, state in states.items()]

"""OpenAI's and Anthropic's clients over https, with keys and their limits: their own exceptions, and their retries."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from shoal.serving.gateway.callers.key_file import KeyFile
from tests.support.apis import chat, connect
from tests.support.pairs import make_pair
from tests.support.service import Service, wait_until

ASKED: Any = {"model": "llm", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
CLOSED: Any = {**ASKED, "model": "llamav2"}  # no key is for it


class Served(NamedTuple):
    """A service, the certificate that it shows, and its file of keys."""

    service: Service
    certificate: Path
    keys: KeyFile


@pytest.fixture(scope="module")
def secured(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("secured")
    certificate, private = make_pair(home)
    keys = KeyFile(home / "keys.json")
    keys.new("first", models=("llm",))
    tls = ["--tls-cert", certificate, "--tls-key", private]
    with Service(repository, home / "log", "--keys", keys.path, *tls) as service:
        yield Served(service, certificate, keys)


class Asker:
    """One client of three, and the statuses of the answers that it got, those before its own retries included."""

    def __init__(self, kind: str, served: Served, key: str, retries: int) -> None:
        self.statuses: list[int] = []
        self._library = anthropic if kind == "anthropic" else openai
        context = ssl.create_default_context(cafile=served.certificate)
        address = f"https://{served.service.http}"
        options: Any = {"api_key": key, "max_retries": retries}
        options["base_url"] = address if kind == "anthropic" else f"{address}/v1"
        self._options, self._context, self._kind = options, context, kind

    def ask(self, asked: Any = ASKED) -> str:
        """Return the text of an answer."""
        hooks: Any = {"response": [lambda response: self.statuses.append(response.status_code)]}
        if self._kind == "asyncio":
            return asyncio.run(self._ask_async(asked))
        http = self._library.DefaultHttpxClient(verify=self._context, event_hooks=hooks)
        if self._kind == "anthropic":
            with anthropic.Anthropic(**self._options, http_client=http) as client:
                return str(client.messages.create(**asked).content[0].text)
        with openai.OpenAI(**self._options, http_client=http) as client:
            return client.chat.completions.create(**asked).choices[0].message.content or ""

    async def _ask_async(self, asked: Any) -> str:
        async def note(response: Any) -> None:
            self.statuses.append(response.status_code)

        http = openai.DefaultAsyncHttpxClient(verify=self._context, event_hooks={"response": [note]})
        async with openai.AsyncOpenAI(**self._options, http_client=http) as client:
            found = await client.chat.completions.create(**asked)
            return found.choices[0].message.content or ""


@pytest.mark.parametrize("kind", ["openai", "asyncio", "anthropic"])
def test_keys_and_limits_over_https(kind: str, secured: Served) -> None:
    """401, 403 and 429 are the client's own exceptions; after a 429 it waits as long as Retry-After says, and is right.

    The limit is one request at once, which a stream of another client uses up until it is closed.
    """
    library: Any = anthropic if kind == "anthropic" else openai
    key = secured.keys.new(f"{kind}-one", models=("llm",), limits={"at_once": 1})
    wait_for(lambda: Asker(kind, secured, key, 0).ask(), library.AuthenticationError)  # the file is followed
    with pytest.raises(library.AuthenticationError) as unknown:
        Asker(kind, secured, "sk-nothing", 0).ask()
    assert unknown.value.status_code == 401
    with pytest.raises(library.PermissionDeniedError, match=r"not for the model 'llamav2'\. Models: llm"):
        Asker(kind, secured, key, 0).ask(CLOSED)
    with pytest.raises(library.APIConnectionError):  # without trust in its certificate
        Asker(kind, secured._replace(certificate=make_pair(secured.keys.path.parent, kind)[0]), key, 0).ask()

    context = ssl.create_default_context(cafile=secured.certificate)
    holder = openai.OpenAI(
        base_url=f"https://{secured.service.http}/v1",
        api_key=key,
        http_client=openai.DefaultHttpxClient(verify=context),
    )
    with holder, holder.chat.completions.create(model="llm", **chat("Hello", max_tokens=900), stream=True) as stream:
        next(iter(stream))
        with pytest.raises(library.RateLimitError, match="its limit is 1 requests at once") as refused:
            Asker(kind, secured, key, 0).ask()
        assert refused.value.response.headers["retry-after"] == "1"
        patient = Asker(kind, secured, key, 30)
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(patient.ask()))
        asking.start()
        assert wait_until(lambda: len(patient.statuses) > 0, 60)
    asking.join(120)
    assert answers == [Asker(kind, secured, key, 5).ask()]
    assert patient.statuses[0] == 429
    assert patient.statuses[-1] == 200
    assert {*patient.statuses[:-1]} == {429}


def wait_for(ask: Callable[[], Any], refusal: type[Exception]) -> None:
    """Ask until there is no such refusal, for at most a minute."""
    for _ in range(60):
        try:
            ask()
        except refusal:
            threading.Event().wait(1)  # wrong keys of one address are counted
        else:
            return
    ask()


def test_keys(repository: Path, tmp_path: Path) -> None:
    """Models of other keys are neither listed nor asked; without a key, there is OpenAI's own exception."""
    file = KeyFile(tmp_path / "keys.json")
    key, short = file.new("some", models=("llm*", "prompt")), file.new("few", models=("embedder",), may=("infer",))
    with Service(repository, tmp_path / "log", "--keys", file.path, "--alias", "gpt-4o=llm_bls") as service:
        with connect(service, api_key=key) as client:
            assert {model.id for model in client.models.list()} == {"llm", "llm_bls", "llm-hf", "gpt-4o"}
            assert client.chat.completions.create(model="llm", **chat("Hello")).choices[0].message.content
            with pytest.raises(openai.PermissionDeniedError) as closed:
                client.embeddings.create(model="embedder", input="a")
            assert closed.value.code == "permission_denied"
            said = "This key is not for the model 'embedder'. Models: gpt-4o, llm, llm_bls, llm-hf"
            assert said in closed.value.message, "what serves nothing here comes last"
        with connect(service, api_key=short) as client:
            assert client.embeddings.create(model="embedder", input="a", encoding_format="float").data
            with pytest.raises(openai.PermissionDeniedError, match=r"not for the model 'gpt-4o'\. Models: embedder\."):
                client.chat.completions.create(model="gpt-4o", **chat("Hello"))
            with pytest.raises(openai.PermissionDeniedError):
                client.models.list()
        with connect(service, api_key="sk-nothing") as client, pytest.raises(openai.AuthenticationError) as unknown:
            client.models.list()
        assert unknown.value.code == "invalid_api_key"
        with anthropic.Anthropic(base_url=f"http://{service.http}", api_key=key, max_retries=0) as other:
            messages: Any = [{"role": "user", "content": "Hello"}]
            assert other.messages.create(model="llm", max_tokens=3, messages=messages).content
        with (
            anthropic.Anthropic(base_url=f"http://{service.http}", api_key="sk", max_retries=0) as other,
            pytest.raises(anthropic.AuthenticationError),
        ):
            other.messages.create(model="llm", max_tokens=3, messages=messages)

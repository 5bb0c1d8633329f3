"""Subjects of a measurement: pipelines in repositories, and models of servers that run already."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from shoal.authoring.repository.config import ModelConfig, read_config
from shoal.authoring.repository.describe import describe
from shoal.authoring.repository.find_graph import find_graph
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.made import suggest_repository
from shoal.authoring.repository.manifest import launch_flags, read_manifest
from shoal.authoring.repository.plan import HYBRID
from shoal.clients.bulk.rows import shorten_all
from shoal.clients.client.client import Client
from shoal.clients.client.tls import Access
from shoal.errors import ArtifactError, InputError
from shoal.kit.component.spec import ModelSpec
from shoal.lab.bench.endpoint import Endpoint, Found, Started
from shoal.lab.bench.openai import read_models, speaks_openai
from shoal.serving.server.launch import serve

PLAN = ("placement", "dtype", "target")  # manifest fields in which repositories of one pipeline differ
SERVER, CLIENT = PLACEMENTS = ("server", "client")  # of a pipeline's Python components
_UNKNOWN = dict.fromkeys(PLAN, "-")


@dataclass(frozen=True)
class Servers:
    """The options of access to servers: ``url`` of a running one, the protocol, and the key and certificates.

    Without ``protocol``, it is that of the address, else gRPC.
    """

    url: str = ""
    protocol: str = ""
    access: Access = field(default_factory=Access, repr=False)  # it may have a key


@dataclass(frozen=True)
class BenchTarget:
    """A model to measure, with its label in tables: of a repository, or of a server that runs at ``url``, or both.

    ``plan`` has placement, dtype and target, "-" where they are not known. ``spec`` is None for a server of OpenAI's
    API. If ``is_client``, the Python components of the repository's pipeline run in the client.
    """

    label: str
    name: str
    spec: ModelSpec | None
    plan: Mapping[str, str]
    servers: Servers
    graph: Graph | None = None
    url: str = ""
    is_client: bool = False

    @property
    def repository(self) -> Path | None:
        """Folder of the repository."""
        return self.graph.config.folder.parent if self.graph else None

    def steps(self) -> dict[str, ModelConfig]:
        """Return the non-ensemble models of this pipeline and its nested ensembles, in the order of the steps.

        Those of a running server are as it tells them; empty if it does not.
        """
        if self.graph is None:
            return Found(self.url, self.servers.protocol, self.servers.access).steps(self.name) if self.spec else {}
        configs = (read_config(path.parent) for path in self.graph.config.folder.parent.glob("*/config.pbtxt"))
        return _leaves(self.graph.config, {config.name: config for config in configs})

    def open(self, held: ExitStack) -> Endpoint:
        """Start the repository's server, which ends with ``held``, or return the running one."""
        if self.url or self.repository is None:
            return Found(self.url, self.servers.protocol, self.servers.access)
        return Started(held.enter_context(serve(self.repository)), self.servers.protocol)

    def describe(self) -> dict[str, Any]:
        """Return the target's label, plan and steps as JSON values for the record."""
        place = self.url or (self.repository.name if self.repository else "")
        described = {"label": self.label, "repository": place, "model": self.name, **self.plan}
        if self.graph is None or self.repository is None:
            return {**described, "url": self.url}
        graph = describe(self.graph)
        return {
            **described,
            "max_batch_size": graph["max_batch_size"],
            "contents": read_manifest(self.repository).get("contents", {}),
            "steps": [
                {key: step[key] for key in ("name", "level", "backend", "device", "instances", "batching")}
                for step in graph["steps"]
            ],
            "launch_flags": launch_flags(self.repository),
        }


def _resolve(servers: Servers, url: str) -> Servers:
    """Return ``servers`` with the protocol for ``url``."""
    by_address = "http" if url.startswith(("http://", "https://")) else "grpc"
    return replace(servers, protocol=servers.protocol or by_address)


def _leaves(config: ModelConfig, models: Mapping[str, ModelConfig]) -> dict[str, ModelConfig]:
    if not config.is_ensemble:
        return {config.name: config}
    found: dict[str, ModelConfig] = {}
    for step in config.steps:
        found |= _leaves(models[step.model], models)
    return found


def find_targets(
    subjects: Sequence[str | Path],
    models: Sequence[str] = (),
    servers: Servers | None = None,
    placements: Sequence[str] = (),
) -> list[BenchTarget]:
    """Find the model of each subject: a repository or its model folder, ``HOST:PORT``, or ``NAME=`` either of them.

    Without subjects, the subject is the server at ``servers.url``; with it, repositories are not started: their models
    are asked there. ``models`` has one name for all subjects, or one for each. ``placements`` says where the Python
    components of pipelines run, instead of the repositories' own placement; each placement is a target.
    A target's label is NAME, or the name of its repository's folder. If two are the same, all labels are paths.

    Raises:
        InputError: a subject or a label is named twice, or has no model of that name.
        ArtifactError: a subject is not a repository.
        ServerError: a server does not answer.
    """
    servers = servers or Servers()
    if len(models) > 1 and len(models) != len(subjects):
        raise InputError(f"There are {len(models)} models for {len(subjects)} subjects.", "Name one for all, or each.")
    labels = [label for label, _ in map(_split, subjects) if label]
    if len({*labels}) < len(labels):
        raise InputError("Two columns would have one name.", "Give each its own: NAME=REPOSITORY or NAME=HOST:PORT")
    names = models if len(models) > 1 else [*models, ""][:1] * max(1, len(subjects))
    targets = [
        target
        for subject, model in zip_longest(map(str, subjects or [servers.url]), names)
        for target in _placed(_find(subject, model, servers), placements)
    ]
    if len({(t.label, t.repository, t.url, t.name, t.is_client) for t in targets}) < len(targets):
        raise InputError("A repository is named twice.", "Name each once.")
    if len({target.label for target in targets}) < len(targets):
        targets = [replace(target, label=target.url or str(target.repository)) for target in targets]
    return targets


def names_server(subject: str) -> bool:
    """Whether a subject is the address of a running server, possibly with a name."""
    _, rest = _split(subject)
    return bool(re.search(r"://|:\d+(/v1)?/?$", rest)) and not Path(rest).is_dir()


def _split(subject: str | Path) -> tuple[str, str]:
    """Return the name of a subject, if it has one, and the rest."""
    name, _, rest = ("", "", str(subject)) if Path(subject).exists() else str(subject).rpartition("=")
    return name, rest


def check_inputs(targets: Sequence[BenchTarget]) -> None:
    """Raise ``InputError`` unless all targets take the same inputs, as far as their servers tell."""
    first = targets[0]
    for other in targets[1:]:
        mine, others = ({(t.name, t.dtype, t.dims) for t in e.spec.inputs} if e.spec else {} for e in (first, other))
        if mine != others:
            raise InputError(
                f"{other.name} in {other.repository or other.url} takes different inputs from {first.name} in"
                f" {first.repository or first.url}.",
                "Compare repositories of the same pipeline, or name the pipeline: --model NAME",
            )


def _placed(target: BenchTarget, placements: Sequence[str]) -> Iterator[BenchTarget]:
    if placements and target.graph is None:
        fix = "Name the repository with their code: shoal bench REPOSITORY --url HOST:PORT --placement client"
        raise InputError(f"The components of {target.name} at {target.url} are not here.", fix)
    for placement in placements:
        label = placement if len(placements) > 1 else target.label
        plan = {**target.plan, "placement": placement}
        yield replace(target, label=label, plan=plan, is_client=placement == CLIENT)
    if not placements:
        yield target


def _find(subject: str, model: str, servers: Servers) -> BenchTarget:
    name, rest = _split(subject)
    place = Path(rest)
    if not rest or names_server(subject):
        return _ask(name, rest, model, servers)
    if not place.is_dir():
        fix = "Make one: shoal compose ENSEMBLE REPOSITORY. A pipeline is measured from its repository, shoal bench"
        fix += " REPOSITORY, and the model of a running server without one: shoal bench HOST:PORT --model NAME"
        raise ArtifactError(f"There is no repository {place}.", suggest_repository(place) or fix)
    graph = find_graph(place, model)
    manifest = read_manifest(graph.config.folder.parent)
    plan = {key: str(manifest.get(key, "-")) for key in PLAN}
    return BenchTarget(
        name or graph.config.folder.parent.name,
        graph.config.name,
        graph.config.spec,
        plan,
        _resolve(servers, servers.url),
        graph,
        servers.url,
        is_client=plan["placement"] == HYBRID,
    )


def _ask(label: str, url: str, model: str, servers: Servers) -> BenchTarget:
    """Ask a running server for its model."""
    wanted, servers = servers.protocol, _resolve(servers, url)
    if wanted != "grpc" and speaks_openai(url, servers.access):
        known = read_models(url, servers.access)
        if not model and len(known) != 1:
            names = shorten_all(known)
            raise InputError(
                f"The server at {url} has {len(known)} models: {names or 'none'}.", "Name one: --model NAME"
            )
        return BenchTarget(label or model or known[0], model or known[0], None, _UNKNOWN, servers, url=url)
    with Client(url, protocol=servers.protocol, **servers.access) as client:
        model = model or client.default_model()
        spec = client.describe(model)
        url = url or client.url
    return BenchTarget(label or model, model, spec, _UNKNOWN, servers, url=url)

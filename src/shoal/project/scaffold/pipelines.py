"""Pipelines of models by name, wired by name, dtype and shape, with questions for ambiguous inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shoal.component.artifact_files import find_repeated
from shoal.component.spec import TensorSpec
from shoal.composition.accepted import check_accepted
from shoal.composition.ensemble import Ensemble, Tensor
from shoal.errors import InputError
from shoal.project.scaffold import text
from shoal.project.scaffold.names import check_name, check_tensor_name, find_project_folders
from shoal.project.scaffold.sample_request import find_width
from shoal.project.scaffold.skeletons import Skeleton, draft_component, make_skeleton
from shoal.repository.config import ModelConfig
from shoal.repository.ensemble_config import first_steps
from shoal.repository.model_folders import collect
from shoal.repository.shapes import Declared

REQUEST = ""  # in place of a step: a tensor of the request
MASK = "attention_mask"  # the parameter of a model, and the name of the output in tokenizers


@dataclass(frozen=True)
class Source:
    """Source of an input: output ``name`` of the step ``model``, or tensor ``name`` of the request."""

    model: str
    name: str

    def __str__(self) -> str:
        return f"{self.model}.{self.name}" if self.model else self.name


@dataclass(frozen=True)
class Question:
    """An input that several outputs fit, so that the user is asked for one of them.

    ``nearest`` is the default: an output that no step reads yet, from the latest step that has one.
    """

    model: str
    tensor: TensorSpec
    fits: tuple[Source, ...]
    nearest: Source

    @property
    def key(self) -> str:
        """Qualified name of the input: ``encoder.INPUT__0``."""
        return f"{self.model}.{self.tensor.name}"


Ask = Callable[[Question], str]


def draft_pipeline(
    name: str,
    steps: Sequence[str] = (),
    *,
    maps: Mapping[str, str] | None = None,
    project: Path | str = ".",
    ask: Ask | None = None,
) -> Skeleton:
    """Draft a pipeline of the models ``steps``, from shoal and the project, in an order in which they can run.

    An input reads the earlier output with its name, dtype and shape (an attention mask also one called so); else the
    only one of its dtype and shape that no step reads yet, or the only one at all, unless it is optional; else the
    request. ``maps`` override this: ``MODEL.INPUT`` to ``MODEL.OUTPUT``, or to a name in the request. If several
    outputs fit, or the one with its name would skip a step that fits as well, ``ask`` is called. Outputs that no step
    reads become the answer. Without ``steps`` it gets a component of its own, ``NAME_preprocess``.

    Raises:
        InputError: a name cannot be used; there is no such model or tensor; several outputs fit and there is no
            ``ask``; or Triton would refuse it.
    """
    if not steps:
        for key in maps or ():
            raise InputError(
                f"--map {key} maps a step, and no steps are given.", "Name the models: --step MODEL --step MODEL"
            )
        return draft_component(f"{name[:53]}_preprocess", project=project, pipeline=name)
    root = Path(project)
    available = find_project_folders(root)
    check_name(name, available)
    models = _find_models(steps, available)
    sources = _Join(models, maps or {}).answer(ask)
    definition, said = _define(name, models, sources, root)
    config = definition.config()
    check_accepted(config, available)
    spec = config.spec
    members = {member.name: member for step in steps for member in collect(step, available) if not member.is_ensemble}
    missing = sorted({file for member in members.values() for file in _missing(member)})
    test = text.write_test(
        name, name, spec.inputs, members.values(), is_batched=spec.is_batched, artifacts=missing,
        widths=_find_widths(models, sources, spec.inputs),
    )  # fmt: skip
    first = [config.steps[index].model for index in first_steps(config.message)]
    if len(first) > 1:
        said.append(
            f"{' and '.join(first)} read the request in parallel; before 26.05, Triton may stop answering if one of"
            " them rejects it. Let one step read it first, such as checked_text, and map the others to its output."
        )
    if missing:
        said.append(f"It needs {', '.join(missing)}: in build/artifacts, or each in its model's folder 1.")
    ensemble = text.write_ensemble(config.message)
    return make_skeleton(root, name, ensemble, name, test, {}, said, needs_artifacts=bool(missing))


def _find_models(steps: Sequence[str], available: Mapping[str, ModelConfig]) -> list[ModelConfig]:
    for step in steps:
        if step not in available:
            raise InputError(f"There is no model {step}.", f"Known: {', '.join(sorted(available))}.")
    twice = find_repeated(steps)
    if twice:
        raise InputError(
            f"The model {twice} is given twice as a step.", "Write such a pipeline in Python: shoal.Ensemble"
        )
    return [available[step] for step in steps]


def _find_widths(
    models: Sequence[ModelConfig], sources: Mapping[str, Source], inputs: Sequence[TensorSpec]
) -> dict[str, int]:
    """Choose a size for each variable-size request tensor, one that its model accepts; left out if none is known."""
    widths: dict[str, int] = {}
    for model in models:
        read = {sources[f"{model.name}.{tensor.name}"] for tensor in model.spec.inputs}
        wanted = [t.name for t in inputs if Source(REQUEST, t.name) in read and -1 in t.dims]
        if wanted and not _missing(model):
            with suppress(Exception):  # a component that does not start: its test will report it
                widths |= dict.fromkeys(wanted, find_width(model))
    return widths


def _missing(model: ModelConfig) -> list[str]:
    return [str(file) for file in model.artifacts if file.is_required and not file.find([model.folder / "1"])]


# --- the pipeline ------------------------------------------------------------------------------------------------


def _define(
    name: str, models: Sequence[ModelConfig], sources: Mapping[str, Source], root: Path
) -> tuple[Ensemble, list[str]]:
    """Define the pipeline; also return a line for each of its tensors."""
    definition, said = Ensemble(name, projects=[root]), []
    requested = _request(definition, models, sources)
    given: dict[Source, Tensor] = {}
    for model in models:
        inputs = {}
        for tensor in model.spec.inputs:
            key = f"{model.name}.{tensor.name}"
            source = sources[key]
            inputs[tensor.name] = given[source] if source.model else requested[key]
            said.append(f"{key} reads {source if source.model else f'{requested[key].name} of the request'}.")
        outputs = definition.step(model.name, inputs)
        given |= {Source(model.name, output): tensor for output, tensor in outputs.items()}
    read = set(sources.values())
    unread = [source for source in given if source not in read]
    taken = {tensor.name for tensor in requested.values()}
    for source in unread:
        is_taken = source.name in taken or [other.name for other in unread].count(source.name) > 1
        answered = f"{source.model}_{source.name}" if is_taken else source.name
        definition.output(answered, given[source])
        said.append(f"{answered} of the answer is {source}.")
    return definition, said


def _request(definition: Ensemble, models: Sequence[ModelConfig], sources: Mapping[str, Source]) -> dict[str, Tensor]:
    """Declare the request's tensors, by the inputs that read them; same name, dtype and shape are one tensor."""
    readers: dict[str, list[tuple[str, TensorSpec]]] = {}
    for model in models:
        for tensor in model.spec.inputs:
            key = f"{model.name}.{tensor.name}"
            if sources[key].model:
                continue
            wanted = sources[key].name
            first = readers.get(wanted, [(key, tensor)])[0][1]
            if (first.dtype, first.dims) != (tensor.dtype, tensor.dims):
                wanted = f"{model.name}_{wanted}"
            readers.setdefault(wanted, []).append((key, tensor))
    found: dict[str, Tensor] = {}
    for name, keys in readers.items():
        first = keys[0][1]
        is_optional = all(tensor.is_optional for _, tensor in keys)
        made = definition.input(name, first.dtype, first.dims, optional=is_optional)
        found |= {key: made for key, _ in keys}
    return found


# --- wiring by name, dtype and shape -----------------------------------------------------------------------------


@dataclass
class _Join:
    """Wires models in order; ``maps`` override the source of ``MODEL.INPUT``: ``MODEL.OUTPUT``, or a request tensor.

    ``found`` are the sources of inputs so far, ``behind`` the steps that lead to each step.
    """

    models: Sequence[ModelConfig]
    maps: Mapping[str, str]
    found: dict[str, Source] = field(default_factory=dict)
    behind: dict[str, set[str]] = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)

    def answer(self, ask: Ask | None) -> dict[str, Source]:
        """Choose the source of each input, by ``MODEL.INPUT``; ask about ambiguous ones."""
        known = [f"{model.name}.{tensor.name}" for model in self.models for tensor in model.spec.inputs]
        for key in self.maps:
            if key not in known:
                raise InputError(f"Unknown input {key} to map.", f"Known: {', '.join(known)}.")
        for place, model in enumerate(self.models):
            for tensor in model.spec.inputs:
                key = f"{model.name}.{tensor.name}"
                if key in self.maps:
                    self.found[key] = self._read(self.maps[key], self.models[:place], f"--map {key}={self.maps[key]}")
        for place, model in enumerate(self.models):
            self._join(model, self.models[:place], ask)
            read = {self.found[f"{model.name}.{tensor.name}"].model for tensor in model.spec.inputs} - {REQUEST}
            self.behind[model.name] = read.union(*(self.behind[name] for name in read))
        if self.questions and ask is None:
            raise _several(self.questions)
        return self.found

    def _join(self, model: ModelConfig, earlier: Sequence[ModelConfig], ask: Ask | None) -> None:
        # Explicit maps and matching names first; the other inputs share the outputs that are left. An output that no
        # step reads yet comes before one that is read: another step processes that one already, and reading it would
        # skip this step. An output is taken if it is the only one left for an input and fits no other input alone;
        # else the input becomes a question.
        fitting: dict[str, tuple[TensorSpec, list[Source]]] = {}
        named: dict[str, Source] = {}
        for tensor in model.spec.inputs:
            key = f"{model.name}.{tensor.name}"
            if key in self.found:
                continue
            fits = _find_fits(tensor, model, earlier)
            is_mask = model.spec.parameters.get(MASK) == tensor.name
            same = [source for source in fits if source.name == tensor.name or (is_mask and source.name == MASK)]
            same = self._unread(same) or same
            if len(same) == 1:
                named[key] = same[0]
            if tensor.is_optional or not fits:
                self.found[key] = named.pop(key, Source(REQUEST, tensor.name))
            else:
                fitting[key] = tensor, fits
        claimed = set(named.values())
        for key, source in named.items():
            others = [other for other in self._unread(fitting[key][1]) if other not in claimed]
            if not any(source.model in self.behind[other.model] for other in others):  # none of them is skipped
                self.found[key] = source
                del fitting[key]
        taken = {self.found.get(f"{model.name}.{tensor.name}") for tensor in model.spec.inputs}
        left = {key: [source for source in fits if source not in taken] for key, (_, fits) in fitting.items()}
        best = {key: self._unread(sources) or sources for key, sources in left.items()}
        asked = []
        for key, sources in best.items():
            if not sources:  # no step reads one tensor twice
                self.found[key] = Source(REQUEST, fitting[key][0].name)
            elif len(sources) == 1 and list(best.values()).count(sources) == 1 and key not in named:
                self.found[key] = sources[0]
            else:
                asked.append(key)
        for place, key in enumerate(asked):
            alike = sum(left[other] == left[key] for other in asked[place:])
            question = self._question(model, fitting[key][0], left[key], alike, earlier)
            self.questions.append(question)
            chosen = ask(question) if ask else str(question.nearest)
            self.found[key] = self._read(chosen, earlier, f"{chosen!r}")

    def _question(
        self, model: ModelConfig, tensor: TensorSpec, fits: list[Source], alike: int, earlier: Sequence[ModelConfig]
    ) -> Question:
        """Make the question of an input, the first of ``alike`` that the same outputs fit."""
        taken = {self.found.get(f"{model.name}.{other.name}") for other in model.spec.inputs}
        left = [source for source in fits if source not in taken]
        unread, places = self._unread(left), [other.name for other in earlier]
        ranked = sorted(left, key=lambda source: (source not in unread, -places.index(source.model)))[:alike]
        nearest = next((source for source in left if source in ranked), Source(REQUEST, tensor.name))
        return Question(model.name, tensor, tuple(fits), nearest)

    def _unread(self, sources: Iterable[Source]) -> list[Source]:
        read = set(self.found.values())
        return [source for source in sources if source not in read]

    def _read(self, value: str, earlier: Sequence[ModelConfig], where: str) -> Source:
        """Parse ``MODEL.OUTPUT``, or a name in the request."""
        for model in self.models:
            output = value.removeprefix(f"{model.name}.")
            if output == value:
                continue
            names = [tensor.name for tensor in model.spec.outputs]
            if output not in names:
                raise InputError(f"Model {model.name} has no output {output}: {where}.", f"It has: {', '.join(names)}.")
            if model not in earlier:
                raise InputError(f"{where} reads a step that comes later.", f"Name --step {model.name} before it.")
            return Source(model.name, output)
        check_tensor_name(value, where)
        return Source(REQUEST, value)


def _find_fits(tensor: TensorSpec, model: ModelConfig, earlier: Iterable[ModelConfig]) -> list[Source]:
    wanted = Declared(model.name, tensor, model.spec.is_batched)
    return [
        Source(other.name, output.name)
        for other in earlier
        for output in other.spec.outputs
        if output.dtype == tensor.dtype and Declared(other.name, output, other.spec.is_batched).fits(wanted)
    ]


def _several(questions: Sequence[Question]) -> InputError:
    said = [f"{q.key} ({text.describe(q.tensor, '')}) fits {' and '.join(map(str, q.fits))}." for q in questions]
    examples = " ".join(f"--map {q.key}={q.nearest}" for q in questions)
    return InputError(" ".join(said), f"Map each to an output or to a name in the request. For example: {examples}")

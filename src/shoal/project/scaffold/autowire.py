"""Automatic wiring of pipeline inputs to outputs by name, dtype and shape, with questions for ambiguous ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.component.spec import TensorSpec
from shoal.errors import InputError
from shoal.project.scaffold import text
from shoal.project.scaffold.names import check_tensor_name
from shoal.repository.config import ModelConfig
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
    """An input that several outputs fit; ``free`` are the outputs that no other input reads."""

    model: str
    tensor: TensorSpec
    fits: tuple[Source, ...]
    free: tuple[Source, ...] = ()

    @property
    def key(self) -> str:
        """Qualified name of the input: ``encoder.INPUT__0``."""
        return f"{self.model}.{self.tensor.name}"


Ask = Callable[[Question], str]


@dataclass
class Join:
    """Wires models in order; ``maps`` override the source of ``MODEL.INPUT``: ``MODEL.OUTPUT``, or a request tensor."""

    models: Sequence[ModelConfig]
    maps: Mapping[str, str]
    questions: list[Question] = field(default_factory=list)

    def answer(self, ask: Ask | None) -> dict[str, Source]:
        """Choose the source of each input, by ``MODEL.INPUT``; ask about ambiguous ones."""
        self._check_maps()
        found: dict[str, Source] = {}
        for place, model in enumerate(self.models):
            found |= self._join(model, self.models[:place])
        places = {model.name: place for place, model in enumerate(self.models)}
        if self.questions and ask is None:
            raise _several(self.questions)
        for question in self.questions:
            read = set(found.values())
            free = tuple(source for source in question.fits if source not in read)
            chosen = ask(replace(question, free=free)) if ask else ""
            found[question.key] = self._read(chosen, self.models[: places[question.model]], f"{chosen!r}")
        return found

    def _join(self, model: ModelConfig, earlier: Sequence[ModelConfig]) -> dict[str, Source]:
        # Explicit maps and matching names first; the other inputs share the outputs that are left. An output is taken
        # if it is the only one left for an input and fits no other input alone; else the input becomes a question.
        found: dict[str, Source] = {}
        fitting: dict[str, tuple[TensorSpec, list[Source]]] = {}
        for tensor in model.spec.inputs:
            key = f"{model.name}.{tensor.name}"
            fits = _find_fits(tensor, model, earlier)
            same = [source for source in fits if source.name in _roles(tensor, model)]
            if key in self.maps:
                found[key] = self._read(self.maps[key], earlier, f"--map {key}={self.maps[key]}")
            elif len(same) == 1:
                found[key] = same[0]
            elif tensor.is_optional or not fits:
                found[key] = Source(REQUEST, tensor.name)
            else:
                fitting[key] = tensor, fits
        taken = set(found.values())  # no step reads one tensor twice
        left = [[source for source in fits if source not in taken] for _, fits in fitting.values()]
        for (key, (tensor, _)), sources in zip(fitting.items(), left, strict=True):
            if not sources:
                found[key] = Source(REQUEST, tensor.name)
            elif len(sources) == 1 and left.count(sources) == 1:
                found[key] = sources[0]
            else:
                self.questions.append(Question(model.name, tensor, tuple(sources)))
        return found

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

    def _check_maps(self) -> None:
        known = [f"{model.name}.{tensor.name}" for model in self.models for tensor in model.spec.inputs]
        for key in self.maps:
            if key not in known:
                raise InputError(f"Unknown input {key} to map.", f"Known: {', '.join(known)}.")


def _find_fits(tensor: TensorSpec, model: ModelConfig, earlier: Iterable[ModelConfig]) -> list[Source]:
    wanted = Declared(model.name, tensor, model.spec.is_batched)
    return [
        Source(other.name, output.name)
        for other in earlier
        for output in other.spec.outputs
        if output.dtype == tensor.dtype and Declared(other.name, output, other.spec.is_batched).fits(wanted)
    ]


def _roles(tensor: TensorSpec, model: ModelConfig) -> set[str]:
    """Return the names to match an input by: its own, and ``attention_mask`` if a parameter declares it the mask."""
    is_mask = model.spec.parameters.get(MASK) == tensor.name
    return {tensor.name, MASK} if is_mask else {tensor.name}


def _several(questions: Sequence[Question]) -> InputError:
    said = [f"{q.key} ({text.describe(q.tensor, '')}) fits {' and '.join(map(str, q.fits))}." for q in questions]
    examples = " ".join(f"--map {q.key}={q.fits[place % len(q.fits)]}" for place, q in enumerate(questions))
    return InputError(" ".join(said), f"Map each to an output or to a name in the request. For example: {examples}")

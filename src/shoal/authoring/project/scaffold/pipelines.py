"""Pipelines of named models. Inputs are connected to outputs by the names, dtypes and shapes of the tensors."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.authoring.composition.ensemble import Ensemble, Tensor
from shoal.authoring.composition.validation import check_accepted
from shoal.authoring.project.scaffold import text
from shoal.authoring.project.scaffold.names import check_name, check_tensor_name, find_project_folders
from shoal.authoring.project.scaffold.skeletons import Skeleton, draft_component, make_skeleton
from shoal.authoring.repository.call_graph import collect
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.ensemble_config import Declared, first_steps
from shoal.errors import InputError, suggest
from shoal.kit.component.files import find_repeated
from shoal.kit.component.spec import TensorSpec

REQUEST = ""  # in place of a step: a tensor of the request
MASK = "attention_mask"  # the parameter of a model, and the name of the output in tokenizers


@dataclass(frozen=True)
class TensorSource:
    """Source of an input: output ``name`` of the step ``model``, or a tensor of the request.

    For the tensor ``name`` of the request, ``model`` is empty.
    """

    model: str
    name: str

    def __str__(self) -> str:
        return f"{self.model}.{self.name}" if self.model else self.name


def draft_pipeline(
    name: str, steps: Sequence[str] = (), *, maps: Mapping[str, str] | None = None, project: Path | str = "."
) -> Skeleton:
    """Draft a pipeline of the models ``steps``, from shoal and the project, in an order in which they can run.

    An input reads the earlier output that has its name, dtype and shape; an attention mask may also read an output
    called ``attention_mask``. Without such an output, an optional input reads the request. A required input then reads
    the only earlier output of its dtype and shape that no step reads yet; if there is none, the only one that another
    step reads; if no output fits, the request. ``maps`` override this: they map ``MODEL.INPUT`` to ``MODEL.OUTPUT``, or
    to a name in the request. Outputs that no step reads are the pipeline's outputs. Without ``steps``, the pipeline
    gets a new component, ``NAME_preprocess``.

    Raises:
        InputError: a name cannot be used; a model or tensor does not exist; several outputs fit an input; the output
            with an input's name would skip a step whose output fits as well; or Triton would refuse the pipeline.
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
    sources = _Wiring(models, maps or {}).wire()
    definition, said = _define(name, models, sources, root)
    config = definition.config()
    check_accepted(config, available)
    spec = config.spec
    members = {member.name: member for step in steps for member in collect(step, available) if not member.is_ensemble}
    missing = sorted({file for member in members.values() for file in _missing(member)})
    test = text.write_test(
        name,
        name,
        spec.inputs,
        members.values(),
        is_batched=spec.is_batched,
        artifacts=missing,
        widths=_find_widths(models, sources, spec.inputs),
    )
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
            raise InputError(f"There is no model {step}.", suggest(step, sorted(available)))
    twice = find_repeated(steps)
    if twice:
        raise InputError(
            f"The model {twice} is given twice as a step.", "Write such a pipeline in Python: shoal.Ensemble"
        )
    return [available[step] for step in steps]


def _find_widths(
    models: Sequence[ModelConfig], sources: Mapping[str, TensorSource], inputs: Sequence[TensorSpec]
) -> dict[str, int]:
    """Choose sizes for the variable dimensions of the request's tensors, by the first model that reads each tensor."""
    widths: dict[str, int] = {}
    for model in models:
        read = {sources[f"{model.name}.{tensor.name}"] for tensor in model.spec.inputs}
        width = text.find_width(model.spec.parameters, (model.folder / "1").glob("*.json"))
        widths = {tensor.name: width for tensor in inputs if TensorSource(REQUEST, tensor.name) in read} | widths
    return widths


def _missing(model: ModelConfig) -> list[str]:
    return [str(file) for file in model.artifacts if file.is_required and not file.find([model.folder / "1"])]


# --- the pipeline ------------------------------------------------------------------------------------------------


def _define(
    name: str, models: Sequence[ModelConfig], sources: Mapping[str, TensorSource], root: Path
) -> tuple[Ensemble, list[str]]:
    """Define the ensemble; also return notes for the user: what each input reads, and where each answer comes from."""
    definition, said = Ensemble(name, projects=[root]), []
    requested = _request(definition, models, sources)
    given: dict[TensorSource, Tensor] = {}
    for model in models:
        inputs = {}
        for tensor in model.spec.inputs:
            key = f"{model.name}.{tensor.name}"
            source = sources[key]
            inputs[tensor.name] = given[source] if source.model else requested[key]
            said.append(f"{key} reads {source if source.model else f'{requested[key].name} of the request'}.")
        outputs = definition.step(model.name, inputs)
        given |= {TensorSource(model.name, output): tensor for output, tensor in outputs.items()}
    read = set(sources.values())
    unread = [source for source in given if source not in read]
    taken = {tensor.name for tensor in requested.values()}
    for source in unread:
        is_taken = source.name in taken or [other.name for other in unread].count(source.name) > 1
        answered = f"{source.model}_{source.name}" if is_taken else source.name
        definition.output(answered, given[source])
        said.append(f"{answered} of the answer is {source}.")
    return definition, said


def _request(
    definition: Ensemble, models: Sequence[ModelConfig], sources: Mapping[str, TensorSource]
) -> dict[str, Tensor]:
    """Declare the request's tensors; return them by the step's input that reads them, ``MODEL.INPUT``.

    Inputs that read the same name of the request, with the same dtype and shape, read one tensor.
    """
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


class _Wiring:
    """Search for the source of each step's inputs, model by model in the order of the steps.

    ``maps`` are the user's: from ``MODEL.INPUT`` to ``MODEL.OUTPUT``, or to a name in the request. ``found`` are the
    sources found so far, by ``MODEL.INPUT``. ``behind`` has for each step the earlier steps whose outputs it reads,
    directly or through other steps. ``ambiguous`` describes each input that several outputs fit; the source of such an
    input in ``found`` is only a suggestion.
    """

    def __init__(self, models: Sequence[ModelConfig], maps: Mapping[str, str]) -> None:
        self.models, self.maps = models, maps
        self.found: dict[str, TensorSource] = {}
        self.behind: dict[str, set[str]] = {}
        self.ambiguous: dict[str, str] = {}  # descriptions

    def wire(self) -> dict[str, TensorSource]:
        """Return the source of each input, by ``MODEL.INPUT``.

        Raises:
            InputError: several outputs fit an input, or ``maps`` has an unknown name.
        """
        known = [f"{model.name}.{tensor.name}" for model in self.models for tensor in model.spec.inputs]
        for key in self.maps:
            if key not in known:
                raise InputError(f"Unknown input {key} to map.", f"Known: {', '.join(known)}.")
        for place, model in enumerate(self.models):
            for tensor in model.spec.inputs:
                key = f"{model.name}.{tensor.name}"
                if key in self.maps:
                    self.found[key] = self._parse(self.maps[key], self.models[:place], f"--map {key}={self.maps[key]}")
        for place, model in enumerate(self.models):
            self._join(model, self.models[:place])
            read = {source.model for source in self._sources(model)} - {REQUEST}
            self.behind[model.name] = read.union(*(self.behind[name] for name in read))
        if self.ambiguous:
            examples = " ".join(f"--map {key}={self.found[key]}" for key in self.ambiguous)
            raise InputError(
                " ".join(self.ambiguous.values()),
                f"Map each to an output or to a name in the request. For example: {examples}",
            )
        return self.found

    def _join(self, model: ModelConfig, earlier: Sequence[ModelConfig]) -> None:
        # First the outputs with the names of inputs, then the outputs that are left. An output that no step reads yet
        # comes before one that is read: the step that reads it processes it, and reading it again would skip that step.
        fits: dict[str, list[TensorSource]] = {}
        named: dict[str, TensorSource] = {}
        for tensor in model.spec.inputs:
            if f"{model.name}.{tensor.name}" in self.found:
                continue
            fitting = _find_fits(tensor, model, earlier)
            names = {tensor.name, MASK} if model.spec.parameters.get(MASK) == tensor.name else {tensor.name}
            same = self._prefer_unread([source for source in fitting if source.name in names])
            if tensor.is_optional or not fitting:
                self.found[f"{model.name}.{tensor.name}"] = (
                    same[0] if len(same) == 1 else TensorSource(REQUEST, tensor.name)
                )
                continue
            fits[tensor.name] = fitting
            if len(same) == 1:
                named[tensor.name] = same[0]
        skipping = {name for name, source in named.items() if self._skips(source, fits[name], set(named.values()))}
        for name, source in named.items():
            if name not in skipping:
                self.found[f"{model.name}.{name}"] = source
                del fits[name]
        self._share(model, fits, skipping)

    def _skips(self, source: TensorSource, fitting: Sequence[TensorSource], named: Container[TensorSource]) -> bool:
        """Whether an input that reads ``source`` would skip a step.

        A step is skipped if it reads outputs of ``source.model``, directly or through other steps, and one of its
        outputs is in ``fitting`` and has no reader yet.
        """
        others = [other for other in self._unread(fitting) if other not in named]
        return any(source.model in self.behind[other.model] for other in others)

    def _share(self, model: ModelConfig, fits: Mapping[str, Sequence[TensorSource]], skipping: Container[str]) -> None:
        """Choose a source for each input of ``model`` in ``fits``, which has the outputs that fit each input.

        An input reads the only output that is left for it, unless this is the only output for another input too. If no
        output is left, the input reads the request. All other inputs, and those in ``skipping``, are ambiguous.
        """
        taken = set(self._sources(model))
        left = {name: [source for source in sources if source not in taken] for name, sources in fits.items()}
        best = {name: self._prefer_unread(sources) for name, sources in left.items()}
        unclear = []
        for name, sources in best.items():
            if not sources:  # no step reads one tensor twice
                self.found[f"{model.name}.{name}"] = TensorSource(REQUEST, name)
            elif len(sources) == 1 and list(best.values()).count(sources) == 1 and name not in skipping:
                self.found[f"{model.name}.{name}"] = sources[0]
            else:
                unclear.append(name)
        specs = {tensor.name: tensor for tensor in model.spec.inputs}
        for place, name in enumerate(unclear):
            key = f"{model.name}.{name}"
            listed = " and ".join(map(str, left[name]))
            self.ambiguous[key] = f"{key} ({text.describe(specs[name], '')}) fits {listed}."
            alike = sum(left[other] == left[name] for other in unclear[place:])
            self.found[key] = self._suggest(model, left[name], alike) or TensorSource(REQUEST, name)

    def _suggest(self, model: ModelConfig, fitting: Sequence[TensorSource], alike: int) -> TensorSource | None:
        """Suggest a source for an ambiguous input, out of the outputs ``fitting``; None if no output is left.

        The same outputs fit ``alike`` inputs, this one and later ones, so the ``alike`` best outputs are for them, in
        order: the best are outputs that no step reads, then outputs of the latest steps. The suggestion is the first of
        them.
        """
        taken = set(self._sources(model))
        left = [source for source in fitting if source not in taken]
        unread, order = self._unread(left), [each.name for each in self.models]
        ranked = sorted(left, key=lambda source: (source not in unread, -order.index(source.model)))[:alike]
        return next((source for source in left if source in ranked), None)

    def _sources(self, model: ModelConfig) -> Iterable[TensorSource]:
        """Return the sources that have been found for inputs of ``model``."""
        keys = [f"{model.name}.{tensor.name}" for tensor in model.spec.inputs]
        return [self.found[key] for key in keys if key in self.found]

    def _unread(self, sources: Iterable[TensorSource]) -> list[TensorSource]:
        read = set(self.found.values())
        return [source for source in sources if source not in read]

    def _prefer_unread(self, sources: list[TensorSource]) -> list[TensorSource]:
        return self._unread(sources) or sources

    def _parse(self, value: str, earlier: Sequence[ModelConfig], where: str) -> TensorSource:
        """Parse the target of a map: ``MODEL.OUTPUT`` of a step in ``earlier``, or a name in the request.

        ``where`` is the option, for errors.
        """
        for model in self.models:
            output = value.removeprefix(f"{model.name}.")
            if output == value:
                continue
            names = [tensor.name for tensor in model.spec.outputs]
            if output not in names:
                raise InputError(f"Model {model.name} has no output {output}: {where}.", f"It has: {', '.join(names)}.")
            if model not in earlier:
                raise InputError(f"{where} reads a step that comes later.", f"Name --step {model.name} before it.")
            return TensorSource(model.name, output)
        check_tensor_name(value, where)
        return TensorSource(REQUEST, value)


def _find_fits(tensor: TensorSpec, model: ModelConfig, earlier: Iterable[ModelConfig]) -> list[TensorSource]:
    wanted = Declared(model.name, tensor, model.spec.is_batched)
    return [
        TensorSource(other.name, output.name)
        for other in earlier
        for output in other.spec.outputs
        if output.dtype == tensor.dtype and Declared(other.name, output, other.spec.is_batched).fits(wanted)
    ]

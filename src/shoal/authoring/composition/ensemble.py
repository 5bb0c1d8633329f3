"""Define an ensemble in Python: models by name, and typed tensors between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from shoal.authoring.composition.validation import check_accepted
from shoal.authoring.repository.config import CONFIG, ModelConfig, Step, as_config, read_config, write_config
from shoal.authoring.repository.ensemble_config import Declared, make_ensemble, show
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.versions import LATEST
from shoal.errors import InputError, suggest
from shoal.kit.component.spec import DTYPES, TensorSpec

_COMMENT = "Written by shoal's Ensemble."
_PASS_ON = "Let a component pass it on, under another name."


@dataclass(frozen=True)
class Tensor:
    """A tensor of a pipeline: an input of the request, or an output of a step.

    ``name`` is its name in the ensemble. ``declared`` holds dtype, shape, and the model that declares them. ``owner``
    is the `Ensemble` that the tensor belongs to. ``is_requested`` is True for an input of the request.
    """

    name: str
    declared: Declared
    owner: Any = field(repr=False, compare=False)
    is_requested: bool = False

    @property
    def dtype(self) -> str:
        """Data type as in Triton's configurations, such as ``TYPE_FP32``."""
        return self.declared.tensor.dtype

    @property
    def dims(self) -> tuple[int, ...]:
        """Dimensions without the batch dimension; -1 is any size."""
        return self.declared.tensor.dims


class Outputs(dict[str, Tensor]):
    """Output tensors of a step, by the names that the step's model gives them."""

    def __init__(self, model: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._model = model

    def __missing__(self, name: str) -> Tensor:
        raise InputError(f"Model {self._model} has no output {name}.", f"It has: {', '.join(self)}.")


class Ensemble:
    """An ensemble over models by name, shoal's own and those in the folders ``projects``::

        triage = Ensemble("triage")
        message = triage.input("MESSAGE", "STRING", [1])
        tokens = triage.step("tokenizer", TEXT=message)
        topic = triage.step("topic", INPUT__0=tokens["input_ids"], INPUT__1=tokens["attention_mask"])
        triage.output("TOPIC", topic["OUTPUT__0"])
        triage.write("ensembles/triage")

    Each tensor has dtype and shape, and a step takes only what fits. ``max_batch_size`` defaults to the models'
    smallest above 0, or to 0 if there is none.
    """

    def __init__(
        self, name: str, *, projects: Iterable[Path | str] = (".",), max_batch_size: int | None = None
    ) -> None:
        if max_batch_size is not None and max_batch_size < 0:
            raise InputError(f"max_batch_size is {max_batch_size}; it cannot be negative.", "0 means: no batches.")
        self.name = name
        self._models: Mapping[str, ModelConfig] = find_model_folders(projects)
        self._max_batch_size = max_batch_size
        self._tensors: dict[str, Tensor] = {}  # inputs and outputs of steps, by their names in the ensemble
        self._inputs: list[Tensor] = []
        self._steps: list[Step] = []
        self._outputs: dict[str, Tensor] = {}  # by their names in the answer

    def input(self, name: str, dtype: str, dims: Sequence[int], *, optional: bool = False) -> Tensor:
        """Declare an input of the request.

        ``dtype`` is Triton's name, such as ``FP32`` or ``STRING``. ``dims`` do not include the batch dimension.

        Raises:
            InputError: the name is taken, or ``dtype`` or ``dims`` is not valid.
        """
        known = "TYPE_" + dtype.removeprefix("TYPE_")
        if known not in DTYPES:
            names = ", ".join(each.removeprefix("TYPE_") for each in DTYPES)
            raise InputError(f"Input {name} of {self.name} has dtype {dtype!r}.", f"Known: {names}.")
        if not dims or any(size < 1 and size != -1 for size in dims):
            raise InputError(
                f"Input {name} of {self.name} has dims {list(dims)}.", "Give each dimension a size, or -1 for any."
            )
        self._check_free(name)
        spec = TensorSpec(name, known, tuple(dims), is_optional=optional)
        tensor = Tensor(name, Declared(self.name, spec, is_batched=True), self, is_requested=True)
        self._tensors[name] = tensor
        self._inputs.append(tensor)
        return tensor

    def step(
        self,
        model: str,
        inputs: Mapping[str, Tensor] | None = None,
        /,
        *,
        names: Mapping[str, str] | None = None,
        **more: Tensor,
    ) -> Outputs:
        """Add a step that runs ``model``; returns the model's output tensors, by the model's names for them.

        ``inputs`` and the keyword arguments map the model's input names to tensors; an optional input may be left out.
        ``names`` maps the model's output names to names in the ensemble, for outputs whose names matter to you.

        Raises:
            InputError: there is no such model or tensor; or a tensor does not fit in dtype or shape, or is missing.
        """
        given = {**(inputs or {}), **more}
        config = self._find(model)
        for name, tensor in given.items():
            self._check_own(tensor)
            check_fits(tensor, config, name, self._rows)
            for output, exported in self._outputs.items():
                if exported.name == tensor.name:
                    raise self._refuse_both(output, model)
        missing = [t.name for t in config.spec.inputs if t.name not in given and not t.is_optional]
        if missing or not given:
            wanted = ", ".join(missing) or "any input"
            has = ", ".join(f"{tensor.name} {tensor.kind}" for tensor in config.spec.inputs)
            raise InputError(f"The step {model} of {self.name} is not given {wanted}.", f"Model {model} takes: {has}.")
        called = self._name_outputs(config, names or {})
        self._steps.append(Step(model, LATEST, {n: t.name for n, t in sorted(given.items())}, called))
        made = {
            spec.name: Tensor(called[spec.name], Declared(model, spec, config.spec.is_batched), self)
            for spec in config.spec.outputs
        }
        self._tensors.update({tensor.name: tensor for tensor in made.values()})
        return Outputs(model, made)

    def output(self, name: str, tensor: Tensor) -> None:
        """Make ``tensor`` an output of the ensemble, under ``name``.

        Raises:
            InputError: the tensor is an input of the request, is read by a step, or is an output already; or the name
                is taken.
        """
        self._check_own(tensor)
        if tensor.is_requested:
            raise InputError(f"Output {name} of {self.name} would be its input {tensor.name}.", _PASS_ON)
        exported = [known for known, given in self._outputs.items() if given.name == tensor.name]
        if exported:
            raise InputError(f"{tensor.name} is output {exported[0]} of {self.name} already.", _PASS_ON)
        for step in self._steps:
            if tensor.name in step.inputs.values():
                raise self._refuse_both(name, step.model)
        if name != tensor.name:
            self._check_free(name)
        self._outputs[name] = tensor

    @property
    def max_batch_size(self) -> int:
        """Maximum number of rows per request; 0 if requests have no batch dimension."""
        if self._max_batch_size is not None:
            return self._max_batch_size
        sizes = [self._find(step.model).spec.max_batch_size for step in self._steps]
        return min((size for size in sizes if size), default=0)

    def config(self) -> ModelConfig:
        """Return the configuration of the ensemble, with only those outputs of steps that a step or the answer uses.

        Raises:
            InputError: an input or a step is not used, or the ensemble has no output.
        """
        used = {tensor for step in self._steps for tensor in step.inputs.values()}
        exported = {tensor.name: name for name, tensor in self._outputs.items()}
        idle = [tensor.name for tensor in self._inputs if tensor.name not in used]
        idle += [step.model for step in self._steps if not set(step.outputs.values()) & (used | exported.keys())]
        if idle or not exported:
            what = f"never uses {idle[0]}" if idle else "has no output"
            raise InputError(f"{self.name} {what}.", "Read each tensor in a step, or give it as an output.")
        steps = [
            replace(
                step, outputs={n: exported.get(t, t) for n, t in step.outputs.items() if t in used | exported.keys()}
            )
            for step in self._steps
        ]
        message = make_ensemble(
            self.name,
            self.max_batch_size,
            [tensor.declared.tensor for tensor in self._inputs],
            [
                TensorSpec(name, tensor.dtype, _dims_in(tensor, has_rows=self.max_batch_size > 0))
                for name, tensor in self._outputs.items()
            ],
            steps,
        )
        return as_config(message, Path(self.name))

    def write(self, folder: Path | str) -> Path:
        """Write ``config.pbtxt`` and an empty version folder into ``folder``; returns the path of ``folder``.

        ``shoal check FOLDER --target RELEASE`` lists what a given server does not support, such as several steps that
        read the request in parallel before Triton 26.05.

        Raises:
            InputError: Triton would refuse the ensemble, or ``folder`` holds a model that is not an ensemble.
        """
        folder, config = Path(folder), self.config()
        if (folder / CONFIG).exists() and not read_config(folder).is_ensemble:
            raise InputError(f"{folder} holds a model that is not an ensemble.", "Name another folder.")
        check_accepted(config, self._models)
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "1" / ".gitkeep").touch()
        write_config(config.message, folder / CONFIG, comment=_COMMENT)
        return folder

    def _find(self, model: str) -> ModelConfig:
        if model not in self._models or model == self.name:
            known = suggest(model, sorted(self._models.keys() - {self.name}))
            raise InputError(
                f"There is no model {model} for {self.name} to call.",
                f"{known} For models in other folders: projects=[...]",
            )
        return self._models[model]

    def _check_free(self, name: str) -> None:
        if name in self._tensors or name in self._outputs:
            raise InputError(f"{self.name} has a tensor {name} already.", "Give it another name.")

    def _check_own(self, tensor: Tensor) -> None:
        if tensor.owner is not self:
            raise InputError(f"Tensor {tensor.name} belongs to {tensor.owner.name}, not to {self.name}.")

    def _refuse_both(self, output: str, model: str) -> InputError:
        return InputError(
            f"Output {output} of {self.name} is also read by its step {model}: Triton would not answer a request that"
            " does not ask for it.",
            _PASS_ON,
        )

    def _name_outputs(self, config: ModelConfig, names: Mapping[str, str]) -> dict[str, str]:
        """Choose a name in the ensemble for each output of a model; ``names`` are the names that the caller chose."""
        known = [spec.name for spec in config.spec.outputs]
        if unknown := sorted(names.keys() - set(known)):
            raise InputError(f"Model {config.name} has no output {unknown[0]}.", f"It has: {', '.join(known)}.")
        for name in names.values():
            self._check_free(name)
        called: dict[str, str] = {}
        for output in known:
            base = names.get(output, f"{config.name}_{output}")
            taken = {*self._tensors, *self._outputs, *called.values(), *names.values()}
            others = (base if number == 1 else f"{base}_{number}" for number in count(1))
            called[output] = base if output in names else next(name for name in others if name not in taken)
        return called

    @property
    def _rows(self) -> tuple[bool, ...]:
        """Possible values of "a request has a batch dimension": both until ``max_batch_size`` is known."""
        return (True, False) if self._max_batch_size is None else (self._max_batch_size > 0,)


def check_fits(tensor: Tensor, config: ModelConfig, name: str, rows: tuple[bool, ...]) -> None:
    """Check that a model may read ``tensor`` as its input ``name``.

    ``rows`` are the possible values of "a request has a batch dimension". They matter only if ``tensor`` is an input of
    the request; for an output of a step, the step's model decides whether there is a batch dimension.

    Raises:
        InputError: the model has no such input, dtype or shape do not fit, or only ``tensor`` may be left out.
    """
    specs = {spec.name: spec for spec in config.spec.inputs}
    if name not in specs:
        raise InputError(f"Model {config.name} has no input {name}.", f"It has: {', '.join(specs)}.")
    wanted, given = Declared(config.name, specs[name], config.spec.is_batched), tensor.declared
    what = f"Input {name} of model {config.name}"
    if tensor.dtype != specs[name].dtype:
        raise InputError(
            f"{what} is {specs[name].dtype}, and {tensor.name} of {given.who} is {tensor.dtype}.",
            "Triton converts nothing: put a component between them.",
        )
    ways = [replace(given, is_batched=has_rows) for has_rows in rows] if tensor.is_requested else [given]
    if not any(way.fits(wanted) for way in ways):
        raise InputError(
            f"{what} has shape {show(wanted.full)}, and {tensor.name} of {given.who} has {show(ways[0].full)}.",
            "Give them the same dims; -1 fits any.",
        )
    if given.tensor.is_optional and not specs[name].is_optional:
        raise InputError(
            f"{what} must be given, and {tensor.name} of {given.who} may be left out.",
            f"Declare {name} optional in {config.name}, or {tensor.name} required.",
        )


def _dims_in(tensor: Tensor, *, has_rows: bool) -> tuple[int, ...]:
    """Return the dims that an ensemble declares for an output that is a step's tensor.

    If only one of ensemble and model has a batch dimension, the model's dims are changed to include or exclude it.
    """
    full = tensor.declared.full
    if has_rows == tensor.declared.is_batched:
        return tensor.dims
    return full[1:] if has_rows and full[0] == -1 and len(full) > 1 else full

"""Rules of Triton's core, with its error messages, for batching, sequences, queues, instances and caches."""

from __future__ import annotations

import difflib
from typing import Any

from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import PLATFORMS, Model, Repository, enum_name, is_file
from shoal.authoring.check.python.source import served_sources
from shoal.authoring.environment.targets import EMBEDDED as EMBEDDED_TARGET
from shoal.authoring.repository.devices import PYTHON_BASED_BACKENDS, find_host_reason
from shoal.authoring.repository.model_code import find_library, is_component
from shoal.kit.component.spec import ENGINE_LIBRARY

BATCH_SIZE = Rule("negative-batch-size", Severity.ERROR, is_core=True)
PREFERRED = Rule("preferred-batch-size", Severity.ERROR, is_core=True)
PRIORITY = Rule("priority-level", Severity.ERROR, is_core=True)
ORDERING = Rule("ordering-and-priority", Severity.ERROR, is_core=True)
INSTANCE_GPUS = Rule("gpus-without-gpu", Severity.ERROR, is_core=True)
PROFILE = Rule("profile-without-tensorrt", Severity.ERROR, is_core=True)
CACHE = Rule("cache-on-uncacheable", Severity.ERROR, is_core=True)
BACKEND = Rule("no-backend", Severity.ERROR, is_core=True)
PLATFORM = Rule("platform-and-backend", Severity.ERROR, is_core=True)
MISSPELT = Rule("misspelt-backend", Severity.ERROR, is_core=True)
KIND = Rule("kind-left-open", Severity.WARNING)
KIND_UNSUPPORTED = Rule("kind-unsupported", Severity.ERROR)
CONTROL = Rule("sequence-control", Severity.ERROR, is_core=True)
SHORT = Rule("time-too-short", Severity.ERROR)
UNSTORED = Rule("state-not-stored", Severity.ERROR)
STATE = Rule("sequence-state", Severity.ERROR, is_core=True)
EMBEDDED = Rule("sequence-in-own-backend", Severity.ERROR)
PASSIVE = Rule("passive-instances", Severity.ERROR)
METRICS = Rule("metric-control", Severity.ERROR, is_core=True)

# Backends of NVIDIA, and widespread backends of others. A name unlike all of them is taken for a user's own backend.
_BACKENDS = frozenset(PLATFORMS.values()).union(
    """armnn_tflite dali fastertransformer fil hps hugectr identity mlflow openvino paddle python repeat square stateful
    tensorflow1 tensorflow2 tensorrtllm vllm""".split()
)
_SHORT_IDLE = 10_000  # microseconds; the next request of a client is hardly ever sooner
_CLOSE = 0.8  # least difflib ratio of a misspelt name and the right one

_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")
_CORRELATION = "CONTROL_SEQUENCE_CORRID"
_CORRELATION_TYPES = {5: "UINT64", 9: "INT64", 4: "UINT32", 8: "INT32", 13: "STRING"}


def find(model: Model, repository: Repository) -> Findings:
    """Find scheduling settings that Triton's core refuses."""
    if not model.path.exists() and model.versions and not _is_guessed(model):
        yield BACKEND.at(
            Place(model.folder),
            f"Could not determine backend for model '{model.name}' with no backend in model configuration.",
            f'Write {model.name}/config.pbtxt with backend: "..."',
        )
    if model.message is None:
        return
    message = model.message
    if message.max_batch_size < 0:
        yield BATCH_SIZE.at(
            model.at("max_batch_size"),
            f"'max_batch_size' must be non-negative value for {model.name}; it is {message.max_batch_size}.",
            "Write 0 for a model whose tensors have no batch dimension.",
        )
    yield from _batcher(model)
    yield from _instances(model)
    yield from _cache(model, is_decoupled=repository.is_decoupled(model.name))
    yield from _backend(model)
    if not model.is_ensemble:
        yield from _spelling(model)
        if model.is_python and not _is_in_unreadable(model, repository):
            yield from _device(model)
        yield from _unsupported(model, repository)
    yield from _metrics(model)
    if message.HasField("sequence_batching"):
        yield from _sequences(model)
        yield from _embedded(model, repository)


def _embedded(model: Model, repository: Repository) -> Findings:
    """Find what shoal's own backends do not do. They give the files' models the declared inputs alone."""
    sequences = model.message.sequence_batching
    is_own = model.message.runtime.endswith(".py") or (repository.target and repository.target.is_embedded)
    if not is_own or model.backend not in PYTHON_BASED_BACKENDS:
        return
    for field, what in (("state", "implicit state"), ("control_input", "control tensors")):
        if len(getattr(sequences, field)):
            yield EMBEDDED.at(
                model.at("sequence_batching", field, 0),
                f"{model.name} has {what}, which shoal's own {model.backend} backend does not pass to the model.",
                "Serve it with the native backend in NVIDIA's container: --target 26.06. Or write a component.",
            )


def _batcher(model: Model) -> Findings:
    for field, name in (("dynamic_batching", "dynamic batching preferred size"), ("sequence_batching", "")):
        batching = getattr(model.message, field)
        path: tuple[str, ...] = (field,) if name else (field, "oldest")
        sizes = batching.preferred_batch_size if name else batching.oldest.preferred_batch_size
        for position, size in enumerate(sizes):
            if not 0 < size <= model.message.max_batch_size:
                most = "must be positive" if size <= 0 else "must be <= max batch size"
                yield PREFERRED.at(
                    model.at(*path, "preferred_batch_size", position),
                    f"{name or 'sequence batching preferred batch size'} {most} for {model.name}: it is {size}, and"
                    f" max_batch_size is {model.message.max_batch_size}.",
                    "Remove it: by default a batch grows up to max_batch_size.",
                )
                break
    batching = model.message.dynamic_batching
    if model.message.HasField("dynamic_batching"):
        yield from _priorities(model, model.message.dynamic_batching)
        queue, delay = batching.default_queue_policy, batching.max_queue_delay_microseconds
        if queue.timeout_action == queue.REJECT and 0 < queue.default_timeout_microseconds < delay:
            what = (
                f"A request that waits for others is refused after {queue.default_timeout_microseconds} µs, and waits"
            )
            place = model.at("dynamic_batching", "default_queue_policy", "default_timeout_microseconds")
            yield SHORT.at(
                place, f"{what} for {delay} µs.", "Make the time-out longer than max_queue_delay_microseconds."
            )


def _priorities(model: Model, batching: Any) -> Findings:
    levels = batching.priority_levels
    if levels and not 0 < batching.default_priority_level <= levels:
        yield PRIORITY.at(
            model.at("dynamic_batching", "priority_levels"),
            f"default priority level must be in range [1, {levels}] for {model.name};"
            f" it is {batching.default_priority_level}.",
            "Add default_priority_level: 1",
        )
    for key in sorted(batching.priority_queue_policy) if levels else ():
        if not 0 < key <= levels:
            yield PRIORITY.at(
                model.at_entry("dynamic_batching", "priority_queue_policy", key=str(key)),
                f"priority queue policy must have priority level in range [1, {levels}] for {model.name}; one policy"
                f" has level {key}.",
                "Levels count from 1.",
            )
    if not batching.preserve_ordering:
        return
    place = model.at("dynamic_batching", "preserve_ordering")
    if levels > 1:
        what = f"Only one priority level is allowed when 'preserve_ordering' is true for {model.name}; it has {levels}."
        yield ORDERING.at(place, what, "Remove one of the two.")
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(p.default_timeout_microseconds and p.timeout_action == p.DELAY for p in policies):
        yield ORDERING.at(
            place,
            f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {model.name}.",
            "Write timeout_action: REJECT",
        )


def _instances(model: Model) -> Findings:
    groups = model.message.instance_group
    if groups and all(group.passive for group in groups):
        what = f"All instances of {model.name} are passive: its requests wait forever."
        yield PASSIVE.at(model.at("instance_group", 0, "passive"), what, "Remove passive.")
    for index, group in enumerate(groups):
        kind = enum_name(group.Kind, group.kind)
        if group.gpus and kind in ("KIND_CPU", "KIND_MODEL"):
            yield INSTANCE_GPUS.at(
                model.at("instance_group", index, "gpus"),
                f"instance group {group.name or f'{model.name}_{index}'} of model {model.name} has kind {kind} but"
                f" specifies one or more GPUs: {list(group.gpus)}.",
                "Write kind: KIND_GPU, or remove gpus.",
            )
        if group.profile and model.backend != "tensorrt":
            yield PROFILE.at(
                model.at("instance_group", index, "profile"),
                f"instance group {group.name or f'{model.name}_{index}'} of model {model.name} specifies profile field"
                " which is only supported for TensorRT models.",
                "Remove profile.",
            )
        for gpu in (gpu for gpu in group.gpus if gpu < 0):
            yield INSTANCE_GPUS.at(
                model.at("instance_group", index, "gpus"),
                f"instance group {group.name or f'{model.name}_{index}'} of model {model.name} specifies invalid or"
                f" unsupported gpu id {gpu}.",
                "nvidia-smi -L lists the GPUs of a machine, from 0.",
            )


def _device(model: Model) -> Findings:
    """Find a Python model whose instance groups do not name a device: Triton chooses a GPU if the server has one."""
    groups = model.message.instance_group
    if not groups or any(enum_name(g.Kind, g.kind) == "KIND_AUTO" and not g.gpus for g in groups):
        yield KIND.at(
            model.at("instance_group"),
            f"{model.name} does not say where it runs.",
            "Add instance_group [ { kind: KIND_CPU } ], or KIND_GPU with the gpus it may use.",
        )


def _unsupported(model: Model, repository: Repository) -> Findings:
    """Find kinds of instances with which a component of shoal, or a backend of its embedded server, does not start."""
    assert model.config is not None
    is_embedded = repository.target is not None and repository.target.is_embedded
    codes = [text for _, text in served_sources(model) if is_component(text)]
    why = find_host_reason(model.config, EMBEDDED_TARGET if is_embedded else "")
    if why:
        yield from find_on_gpu(model, why)
    is_ours = bool(codes) or (is_embedded and model.backend in PYTHON_BASED_BACKENDS)
    for index, group in enumerate(model.message.instance_group):
        if is_ours and group.kind == group.KIND_MODEL and ENGINE_LIBRARY not in map(find_library, codes):
            yield KIND_UNSUPPORTED.at(
                model.at("instance_group", index),
                f"{model.name} computes with KIND_CPU or KIND_GPU, and does not start with KIND_MODEL.",
                "Write kind: KIND_CPU, or KIND_GPU with the gpus it may use.",
            )


def find_on_gpu(model: Model, why: str) -> Findings:
    """Find instance groups on GPUs of a model that computes on the host only; ``why`` is the reason, as a clause."""
    for index, group in enumerate(model.message.instance_group):
        if group.kind == group.KIND_GPU or (group.kind == group.KIND_AUTO and group.gpus):
            own = ", or compose for NVIDIA's container, whose backend has GPUs: --target 26.06"
            yield KIND_UNSUPPORTED.at(
                model.at("instance_group", index),
                f"{model.name} is placed on a GPU, and does not start there: {why}.",
                f"Write kind: KIND_CPU{own if not model.is_python else ''}.",
            )


def _is_in_unreadable(model: Model, repository: Repository) -> bool:
    """Whether an ensemble with a syntax error names the model; the ensemble's error should be fixed first."""
    return any(f'"{model.name}"' in text for text in repository.unreadable_ensembles)


def _cache(model: Model, *, is_decoupled: bool) -> Findings:
    if not model.message.response_cache.enable:
        return
    if is_decoupled or model.message.HasField("sequence_batching"):
        how = "'decoupled' transaction policy" if is_decoupled else "sequence batching scheduler"
        yield CACHE.at(
            model.at("response_cache"),
            f"Response Cache does not currently support model {model.name} with {how}.",
            "Remove response_cache.",
        )


def _backend(model: Model) -> Findings:
    message = model.message
    if not message.platform and not model.backend and not model.is_ensemble and not _is_guessed(model):
        yield BACKEND.at(
            model.at(), f"must specify 'platform' or 'backend' for '{model.name}'.", 'For example: backend: "python"'
        )
    expected = PLATFORMS.get(message.platform)
    if message.platform and not message.backend and not expected and not model.is_ensemble:
        yield PLATFORM.at(
            model.at("platform"),
            f"unexpected platform type '{message.platform}' for {model.name}.",
            f'Write backend: "{message.platform}" instead.',
        )
    if message.platform and message.backend in PLATFORMS.values() and message.backend != expected:
        yield PLATFORM.at(
            model.at("platform"),
            f"unexpected 'platform' and 'backend' pair, got:{message.platform}, {message.backend}.",
            f'Remove platform and write backend: "{expected or message.backend}".',
        )


def _spelling(model: Model) -> Findings:
    """Find a misspelt backend in ``backend``, or a misspelt ``model.py`` or backend library in ``runtime``."""
    backend, runtime = model.message.backend, model.message.runtime
    library = f"libtriton_{backend}.so"
    folders = [model.folder, *(model.folder / str(version) for version in model.versions)]
    opened = runtime or library
    if backend and backend not in _BACKENDS and not any(is_file(each / opened) for each in folders):
        close = difflib.get_close_matches(backend.lower(), _BACKENDS, 1, _CLOSE)
        if close:
            yield MISSPELT.at(
                model.at("backend"),
                f"unable to find backend library '{opened}' for model '{model.name}': its backend is '{backend}'.",
                f'Write backend: "{close[0]}"',
            )
    known = ("model.py", library)
    if runtime and runtime not in known and not any(is_file(each / runtime) for each in folders):
        close = difflib.get_close_matches(runtime.lower(), known, 1, _CLOSE)
        if close:
            yield MISSPELT.at(
                model.at("runtime"),
                f"unable to find backend library '{runtime}' for model '{model.name}'.",
                f'Write runtime: "{close[0]}", or remove it.',
            )


def _is_guessed(model: Model) -> bool:
    """Whether Triton guesses the backend, from a file name such as ``model.onnx`` or a model name ``NAME.BACKEND``."""
    kinds = ("py", "pt", "pt2", "onnx", "plan", "savedmodel", "graphdef", "xml")
    folders = [model.folder / str(version) for version in model.versions]
    return "." in model.name or any((folder / f"model.{kind}").exists() for folder in folders for kind in kinds)


def _metrics(model: Model) -> Findings:
    for index, control in enumerate(model.message.model_metrics.metric_control):
        conditions = (
            (control.HasField("metric_identifier"), "metric control must specify 'metric_identifier'"),
            (control.metric_identifier.family, "metric identifier must specify non-empty 'family'"),
            (control.HasField("histogram_options"), "metric control must specify 'histogram_options'"),
            (control.histogram_options.buckets, "histogram options must specify non-empty 'buckets'"),
        )
        missing = next((what for is_there, what in conditions if not is_there), "")
        if missing:
            yield METRICS.at(model.at("model_metrics", "metric_control", index), f"{missing}.", "Add it.")


def _sequences(model: Model) -> Findings:
    seen, kinds = set(), set()
    for index, tensor in enumerate(model.message.sequence_batching.control_input):
        place = model.at("sequence_batching", "control_input", index)
        if not tensor.name:
            what = f"sequence batching control tensor must have a name for {model.name}."
            yield CONTROL.at(place, what, 'Add name: "...".')
        elif tensor.name in seen:
            what = f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds"
            yield CONTROL.at(place, f"{what} for {model.name}.", "Give each kind a tensor of its own.")
        seen.add(tensor.name)
        for control in tensor.control:
            kind = enum_name(control.Kind, control.kind)
            if kind in kinds:
                what = f"sequence batching specifies multiple {kind} tensors for {model.name}."
                yield CONTROL.at(place, what, "Keep one.")
            kinds.add(kind)
            what, fix = _values(control, kind)
            if what:
                yield CONTROL.at(place, f"{what} for {kind} for {model.name}.", fix)
    yield from _states(model)
    slots = model.message.sequence_batching.direct.minimum_slot_utilization
    if not 0 <= slots <= 1:
        yield CONTROL.at(
            model.at("sequence_batching", "direct", "minimum_slot_utilization"),
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {model.name}; it is {slots}.",
            "Write a fraction of the slots, such as 0.5.",
        )


def _states(model: Model) -> Findings:
    """Find initial states that Triton refuses when it loads the model."""
    idle = model.message.sequence_batching.max_sequence_idle_microseconds
    if 0 < idle < _SHORT_IDLE:
        what = f"A sequence ends after {idle} µs without a request: sooner than the next one comes."
        fix = "Write microseconds: 1000000 is a second."
        yield SHORT.at(model.at("sequence_batching", "max_sequence_idle_microseconds"), what, fix)
    outputs = [state.output_name for state in model.message.sequence_batching.state]
    if model.is_python and any(name in text for name in outputs for _, text in model.sources):
        what = "The Python backend hands in a state, and does not store the one that model.py returns."
        yield UNSTORED.at(model.at("sequence_batching", "state", 0), what, "Keep it in self, by the correlation id.")
    seen = set[str]()
    for index, state in enumerate(model.message.sequence_batching.state):
        for initial in state.initial_state[:1]:
            what = _find_misfit(model, state, initial, seen)
            if what:
                place = model.at("sequence_batching", "state", index, "initial_state", 0)
                yield STATE.at(place, f"{what}.", "Give it the state's dtype and dims, a name, and zero_data: true.")
            seen.add(state.input_name)
        if len(state.initial_state) > 1:
            what = f"initial_state field for state input '{state.input_name}' has {len(state.initial_state)} elements"
            yield STATE.at(model.at("sequence_batching", "state", index), f"{what}.", "Keep one.")


def _find_misfit(model: Model, state: Any, initial: Any, seen: set[str]) -> str:
    name, dims, wanted = state.input_name, [*initial.dims], [*state.dims]
    if initial.data_type != state.data_type:
        return f"The data type used for 'initial_state' field of state '{name}' does not match the state data type"
    if not initial.name:
        return f"Field 'name' must be set when using initial_state for state input '{name}'"
    if name in seen:
        return f"State input name '{name}' specified more than once"
    if len(dims) != len(wanted):
        return (
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input"
            f" '{name}'. {len(dims)} != {len(wanted)}"
        )
    if -1 in dims:
        return f"'initial_state' field for state input name '{name}' contains variable dimensions"
    for dim, other in zip(dims, wanted, strict=True):
        if other not in (-1, dim):
            return (
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {dim} != {other}"
            )
    if not initial.WhichOneof("state_data"):
        return f"initial_state setting expects state'{name}' to have state_data set"
    file = f"initial_state/{initial.data_file}"
    if initial.data_file and not is_file(model.folder / file):
        return f"The initial state of '{name}' is in {file}, which is not there"
    return ""


def _values(control: Any, kind: str) -> tuple[str, str]:
    given = [name for name in _VALUES if len(getattr(control, name))]
    if kind == _CORRELATION:
        if given:
            return f"sequence batching must not specify {given[0]}", "Remove it; CORRID has a data_type."
        if control.data_type not in _CORRELATION_TYPES:
            return "unexpected data type", "Allowed are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING."
        return "", ""
    example = "int32_false_true: [ 0, 1 ]"
    if not given:
        names = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
        return f"sequence batching must specify either {names}", f"Add {example}."
    if len(given) > 1:
        return f"sequence batching specifies more than one from {' and '.join(given)}", f"Keep {given[0]}."
    if len(getattr(control, given[0])) != 2:
        return f"sequence batching control '{given[0]}' must have exactly 2 entries", f"For example: {example}"
    return "", ""

"""Batching, queues and instances: what Triton loads, and what costs time or memory unseen."""

from __future__ import annotations

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository, enum_name

UNBATCHED = Rule(
    "batching-without-batches",
    Severity.WARNING,
    "Dynamic batching needs max_batch_size above 1",
    "Triton loads it, and each request runs alone.",
    "server, docs/user_guide/model_configuration.md, Dynamic Batcher.",
    "max_batch_size: 0\ndynamic_batching { }",
    "max_batch_size: 8\ndynamic_batching { }",
)
NO_BATCHING = Rule(
    "no-dynamic-batching",
    Severity.WARNING,
    "A Python model that takes batches gets them only with dynamic_batching",
    "Without it `execute` gets one request at a time, whatever waits, and the queue has no limit that could be set.",
    "Tried on Triton 24.10: `execute` then never gets two requests.",
    'backend: "python"\nmax_batch_size: 8',
    'backend: "python"\nmax_batch_size: 8\ndynamic_batching { }',
)
QUEUE = Rule(
    "queue-without-limit",
    Severity.WARNING,
    "The queue of a model that is asked by itself has a limit",
    "Under overload requests wait for ever and memory grows; with a limit the surplus is told at once to come back"
    " (HTTP 503, gRPC UNAVAILABLE). An ensemble's steps are not meant: requests pile up before the slowest of them,"
    " while a limit on a quick one bounds nothing and costs time, since with it Triton prepares no batch while an"
    " instance runs, and a request that comes too early waits for the next one, or half a second. Of a model folder"
    " nobody knows yet whether an ensemble will call it.",
    "server, docs/user_guide/model_configuration.md, Queue Policy; core, src/scheduler_utils.cc: SupportPrefetching.",
    "dynamic_batching { }",
    "dynamic_batching { default_queue_policy { max_queue_size: 256 } }",
)
KIND = Rule(
    "kind-left-open",
    Severity.WARNING,
    "A Python model says where it runs",
    "Without `instance_group` (or with KIND_AUTO) it runs on the CPU here, and on a host with GPUs Triton starts one"
    " process for each GPU, each with a CUDA context if the code touches it.",
    "server issues 5889 and 2157; python_backend, src/python_be.cc: TRITONBACKEND_GetBackendAttribute.",
    'backend: "python"',
    'backend: "python"\ninstance_group [ { kind: KIND_CPU } ]',
)
RAGGED = Rule(
    "ragged-without-borders",
    Severity.WARNING,
    "Who takes ragged inputs is told where each request ends",
    "With `allow_ragged_batch` Triton joins requests of different shapes end to end. A Python model gets each request"
    " by itself; any other backend gets one flat tensor, and needs a `batch_input` that says how long each part is.",
    "server, docs/user_guide/ragged_batching.md.",
    'backend: "onnxruntime"\ninput { name: "X" allow_ragged_batch: true ... }',
    'backend: "onnxruntime"\ninput { name: "X" allow_ragged_batch: true ... }\n'
    'batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "INDEX" data_type: TYPE_FP32 source_input: "X" }',
)
RULES = (UNBATCHED, NO_BATCHING, QUEUE, KIND, RAGGED)

# Backends that get the requests of a batch as one tensor.
_FLAT = ("fil", "onnxruntime", "openvino", "pytorch", "tensorflow", "tensorrt")


def find(model: Model, repository: Repository) -> Findings:
    """What is likely not meant."""
    message = model.message
    if message is None or model.is_ensemble:
        return
    is_scheduled = message.HasField("dynamic_batching") or message.HasField("sequence_batching")
    if message.HasField("dynamic_batching") and message.max_batch_size < 2 and not model.is_completed:
        yield UNBATCHED.at(
            model.at("dynamic_batching"),
            f"{model.name} asks for dynamic batching with max_batch_size {message.max_batch_size}.",
            "Raise max_batch_size, or take dynamic_batching out.",
        )
    elif model.is_python and message.max_batch_size > 1 and not is_scheduled:
        if not message.model_transaction_policy.decoupled:
            yield NO_BATCHING.at(
                model.at("max_batch_size"),
                f"{model.name} takes up to {message.max_batch_size} rows, and gets one request at a time.",
                "Add dynamic_batching { default_queue_policy { max_queue_size: 256 } }",
            )
    elif message.HasField("dynamic_batching") and not (model.is_model_folder or _is_step(model, repository)):
        policies = [message.dynamic_batching.default_queue_policy]
        if not any(policy.max_queue_size for policy in policies):
            yield QUEUE.at(
                model.at("dynamic_batching"),
                f"The queue of {model.name} has no limit.",
                "Add default_queue_policy { max_queue_size: 256 } to its dynamic_batching.",
            )
    yield from _ragged(model)
    kinds = {enum_name(g.Kind, g.kind) for g in message.instance_group if not g.gpus}  # those with GPUs are told
    kinds |= {"KIND_GPU" for group in message.instance_group if group.gpus}
    if model.is_python and (not kinds or "KIND_AUTO" in kinds):
        yield KIND.at(
            model.at("instance_group"),
            f"{model.name} does not say where it runs.",
            "Add instance_group [ { kind: KIND_CPU } ], or KIND_GPU with the gpus it may use.",
        )


def _is_step(model: Model, repository: Repository) -> bool:
    """Whether an ensemble calls it."""
    messages = (other.message for other in repository.known.values() if other.message is not None)
    return any(step.model_name == model.name for message in messages for step in message.ensemble_scheduling.step)


def _ragged(model: Model) -> Findings:
    told = {name for entry in model.message.batch_input for name in entry.source_input}
    is_flat = model.backend in _FLAT and not model.message.runtime.endswith(".py")
    for index, tensor in enumerate(model.message.input):
        if is_flat and tensor.allow_ragged_batch and tensor.name not in told:
            yield RAGGED.at(
                model.at("input", index, "allow_ragged_batch"),
                f"{model.name} gets the requests of a batch end to end in {tensor.name}; nothing says where one ends.",
                "Take allow_ragged_batch out, or add a batch_input of kind BATCH_ACCUMULATED_ELEMENT_COUNT.",
            )

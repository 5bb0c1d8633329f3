"""Queues and instances: settings that Triton loads, and that silently cost time or memory."""

from __future__ import annotations

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository, enum_name

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
RULES = (QUEUE, KIND)


def find(model: Model, repository: Repository) -> Findings:
    """Find what is likely not meant."""
    message = model.message
    if message is None or model.is_ensemble:
        return
    if message.HasField("dynamic_batching") and not (model.is_model_folder or _is_step(model, repository)):
        policies = [message.dynamic_batching.default_queue_policy]
        if not any(policy.max_queue_size for policy in policies):
            yield QUEUE.at(
                model.at("dynamic_batching"),
                f"The queue of {model.name} has no limit.",
                "Add default_queue_policy { max_queue_size: 256 } to its dynamic_batching.",
            )
    kinds = {enum_name(g.Kind, g.kind) for g in message.instance_group if not g.gpus}  # with GPUs: explicit
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

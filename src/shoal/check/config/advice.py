"""Queues and instances: settings that Triton loads, and that silently cost time or memory."""

from __future__ import annotations

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository, enum_name

QUEUE = Rule("queue-without-limit", Severity.WARNING)
KIND = Rule("kind-left-open", Severity.WARNING)
RULES = (QUEUE, KIND)


def find(model: Model, repository: Repository) -> Findings:
    """Find what is likely not meant."""
    message = model.message
    if message is None or model.is_ensemble or _is_in_unreadable(model, repository):
        return
    is_batched = message.HasField("dynamic_batching") and message.max_batch_size > 1
    if is_batched and not (model.is_model_folder or _is_step(model, repository)):
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


def _is_in_unreadable(model: Model, repository: Repository) -> bool:
    """Whether an ensemble that cannot be read names it: what it needs is open until that one is corrected."""
    texts = (other.text for other in repository.known.values() if other.message is None)
    return any("ensemble" in text and f'"{model.name}"' in text for text in texts)

"""Proposed lines of a config.pbtxt."""

from __future__ import annotations

from typing import Any

from shoal.repository.config import ModelConfig


def add_instances(config: ModelConfig, more: int) -> tuple[str, str]:
    """Add at least ``more`` instances to the first group; return the new count in words, and the lines.

    A group's count is per GPU that it names, or per GPU of the machine if it names none.
    """
    message = _only(config, "instance_group")
    group = message.instance_group[0] if message.instance_group else message.instance_group.add()
    group.count = max(1, group.count) + -(-more // max(1, len(group.gpus)))
    if group.kind == group.KIND_GPU and not group.gpus:
        return f"{group.count} instances on each GPU", _text(message)
    total = sum(max(1, each.count) * max(1, len(each.gpus)) for each in message.instance_group)
    return f"{total} instances" + (f", {group.count} on each of its GPUs" if len(group.gpus) > 1 else ""), _text(
        message
    )


def drop_delay(config: ModelConfig) -> str:
    """Return the dynamic batching settings without the queue delay."""
    message = _only(config, "dynamic_batching")
    message.dynamic_batching.ClearField("max_queue_delay_microseconds")
    message.dynamic_batching.SetInParent()
    return _text(message)


def _only(config: ModelConfig, field: str) -> Any:
    """Copy the configuration with this field alone."""
    message = type(config.message)()
    message.CopyFrom(config.message)
    for other, _ in message.ListFields():
        if other.name != field:
            message.ClearField(other.name)
    return message


def _text(message: Any) -> str:
    from google.protobuf import text_format

    return str(text_format.MessageToString(message, as_utf8=True)).rstrip()

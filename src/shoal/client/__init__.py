"""Clients of a Triton server."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.client.aio import AsyncClient as AsyncClient
    from shoal.client.calls import Answer as Answer
    from shoal.client.client import Client as Client
    from shoal.client.copies import Copies as Copies
    from shoal.client.copies import read_metrics as read_metrics
    from shoal.client.streams import AsyncReplies as AsyncReplies
    from shoal.client.streams import Replies as Replies
    from shoal.component.spec import ModelSpec as ModelSpec
    from shoal.component.spec import TensorSpec as TensorSpec

__getattr__, __dir__, __all__ = face(__name__, __file__)

"""Reverse proxy that supervises Triton: HTTP and gRPC front ends, limits for clients, health checks, restarts."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.gateway.limits import Limits as Limits
    from shoal.gateway.limits import Options as Options
    from shoal.gateway.service import Addresses as Addresses
    from shoal.gateway.service import run_service as run_service

__getattr__, __dir__, __all__ = face(__name__, __file__)

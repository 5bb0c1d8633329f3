"""Reverse proxy that supervises Triton: HTTP and gRPC front ends, limits for clients, health checks, restarts."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.gateway.options import Addresses as Addresses
    from shoal.gateway.options import Limits as Limits
    from shoal.gateway.options import Options as Options
    from shoal.gateway.run import run_service as run_service

__getattr__, __dir__, __all__ = face(__name__, __file__)

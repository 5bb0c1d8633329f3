"""Reverse proxy that supervises Triton: HTTP and gRPC front ends, limits for clients, health checks, restarts."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.gateway.control.service import Addresses as Addresses
    from shoal.gateway.control.service import run_service as run_service
    from shoal.gateway.options import Limits as Limits
    from shoal.gateway.options import Options as Options

__getattr__, __dir__, __all__ = face(__name__, __file__)

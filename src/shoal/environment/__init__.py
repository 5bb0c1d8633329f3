"""Execution environments of Python models: build, inspect, unpack, and check against a stub and a server."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.environment.archive import unpack as unpack
    from shoal.environment.building import Built as Built
    from shoal.environment.building import build as build
    from shoal.environment.fit import Misfit as Misfit
    from shoal.environment.fit import check_fit as check_fit
    from shoal.environment.fit import find_misfits as find_misfits
    from shoal.environment.inspection import Environment as Environment
    from shoal.environment.inspection import inspect as inspect
    from shoal.environment.spec import Request as Request
    from shoal.environment.stub import Stub as Stub
    from shoal.environment.stub import read_stub as read_stub
    from shoal.environment.targets import Target as Target
    from shoal.environment.targets import find_target as find_target

__getattr__, __dir__, __all__ = face(__name__, __file__)

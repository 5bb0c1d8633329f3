"""Find, start and stop a Triton server on this machine."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.server.checks import check_start as check_start
    from shoal.server.container import container_command as container_command
    from shoal.server.launch import Server as Server
    from shoal.server.launch import serve as serve
    from shoal.server.orphans import clean_up as clean_up
    from shoal.server.runtime import Runtime as Runtime
    from shoal.server.runtime import find_runtime as find_runtime

__getattr__, __dir__, __all__ = face(__name__, __file__)

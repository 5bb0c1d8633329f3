"""Static checks of model repositories, by Triton's own rules (with its error messages) and by further rules."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.check.families import RULES as RULES
    from shoal.check.families import check as check
    from shoal.check.findings import Finding as Finding
    from shoal.check.findings import Place as Place
    from shoal.check.findings import Rule as Rule
    from shoal.check.findings import Severity as Severity

__getattr__, __dir__, __all__ = face(__name__, __file__)

"""Tree ensembles: reading, checking and running Treelite checkpoints."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.forests.checkpoints import Forest as Forest
    from shoal.forests.checkpoints import Task as Task
    from shoal.forests.checkpoints import read_forest as read_forest
    from shoal.forests.treelite import load_forest as load_forest
    from shoal.forests.treelite import round_forest as round_forest

__getattr__, __dir__, __all__ = face(__name__, __file__)

"""Data of a model repository: configurations, the graph of an ensemble, placement on CPU and GPUs, memory sizes."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.repository.config import ModelConfig as ModelConfig
    from shoal.repository.config import Step as Step
    from shoal.repository.config import read_config as read_config
    from shoal.repository.config import write_config as write_config
    from shoal.repository.graph import Graph as Graph
    from shoal.repository.manifest import check_manifest as check_manifest
    from shoal.repository.manifest import read_manifest as read_manifest
    from shoal.repository.model_folders import find_graph as find_graph
    from shoal.repository.model_folders import read_configs as read_configs
    from shoal.repository.placement import Instances as Instances
    from shoal.repository.placement import Plan as Plan
    from shoal.repository.placement import Tuning as Tuning
    from shoal.repository.placement import place as place
    from shoal.repository.sizes import Largest as Largest
    from shoal.repository.sizes import find_sizes as find_sizes

__getattr__, __dir__, __all__ = face(__name__, __file__)

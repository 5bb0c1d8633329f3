"""207 features of a text: statistics, and shares of frequent and rare words."""

from __future__ import annotations

import numpy as np

from shoal.blocks.zscores import normalise
from shoal.component.ledger import SETUP
from shoal.component.tensors import Array, Device
from shoal.readability.preprocess_config import NUM_LISTED, Bundle
from shoal.text.lexicon import Lexicon
from shoal.text.ragged import Ragged
from shoal.text.word_statistics import STATISTICS, count_features

FEATURE_NAMES = (
    *STATISTICS,
    *(f"frequent_{k}" for k in range(1, NUM_LISTED + 1)),
    *(f"rare_{k}" for k in range(1, NUM_LISTED + 1)),
)


class Features:
    """Token codes to the forest's input, as one bundle says."""

    def __init__(self, bundle: Bundle, device: Device) -> None:
        self.lexicon = Lexicon.build(bundle.stop_words, [*bundle.frequent, *bundle.rare], device)
        self._mean, self._std = (device.put(np.array(v), SETUP) for v in (bundle.mean, bundle.std))

    def __call__(self, codes: Ragged) -> Array:
        """FP32 ``[rows, 207]``, where the codes are."""
        return normalise(count_features(codes, self.lexicon), self._mean, self._std)

"""The forest's 207 features of a text: statistics, and shares of frequent and rare words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.blocks import normalise
from shoal.component.ledger import SETUP
from shoal.component.tensors import Array, Device
from shoal.readability.preprocess_config import NUM_LISTED, Bundle
from shoal.text.lexicon import Lexicon
from shoal.text.ragged import Ragged
from shoal.text.word_statistics import STATISTICS, TokenCounter, count_features, make_features

FEATURE_NAMES = (
    *STATISTICS,
    *(f"frequent_{k}" for k in range(1, NUM_LISTED + 1)),
    *(f"rare_{k}" for k in range(1, NUM_LISTED + 1)),
)


class Features:
    """Converter from token codes to the forest's input, with the word lists and z-scores of a bundle."""

    def __init__(self, bundle: Bundle, device: Device) -> None:
        self.lexicon = Lexicon.build(bundle.stop_words, [*bundle.frequent, *bundle.rare], device)
        self._count = TokenCounter(self.lexicon) if device.is_host else None
        self._mean, self._std = (device.put(np.array(v), SETUP) for v in (bundle.mean, bundle.std))

    def of_rows(self, rows: Sequence[Sequence[int]]) -> Array:
        """Compute features of rows of codes on the host: FP32 ``[rows, 207]``."""
        assert self._count is not None
        return normalise(make_features(*self._count(rows)), self._mean, self._std)

    def of_codes(self, codes: Ragged) -> Array:
        """Compute features on the codes' device: FP32 ``[rows, 207]``."""
        return normalise(count_features(codes, self.lexicon), self._mean, self._std)

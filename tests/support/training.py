"""Trainings of seconds."""

from __future__ import annotations

from shoal.readability.fit import EncoderSettings
from shoal.readability.train import Preset

FOLDS = Preset(num_folds=2, num_trees=20, encoder=EncoderSettings(max_epochs=4, learning_rate=1e-3, dropout=0.1))

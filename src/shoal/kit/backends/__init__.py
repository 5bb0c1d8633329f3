"""Python-based backends, which stand in for Triton's own in the embedded server: a ``model.py`` in a folder each."""

from pathlib import Path

BACKENDS = Path(__file__).parent

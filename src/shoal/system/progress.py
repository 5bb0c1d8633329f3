"""Type of progress callbacks."""

from collections.abc import Callable

OnProgress = Callable[[str, int, int], None]  # stage, steps done, steps in all

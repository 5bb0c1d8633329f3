"""How long work tells whoever waits for it how far it is."""

from collections.abc import Callable

OnProgress = Callable[[str, int, int], None]  # stage, steps done, steps in all

"""Entry point of the command ``shoal``, and of ``python -m shoal``."""

from __future__ import annotations

import os
import signal
from typing import Any


def _interrupt(*_: Any) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(130)


def main() -> None:
    """Run the command line. Ctrl-C while it is imported ends the process without a traceback."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _interrupt)
    from shoal.cli import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()

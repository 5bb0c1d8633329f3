"""Entry point of ``python -m shoal``."""

from shoal.cli import main

main()

"""Trial of a repository by a running server, for ``shoal check --load``."""

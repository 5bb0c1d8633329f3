"""Text processing: tokenization and word counts, on the host and on a GPU."""

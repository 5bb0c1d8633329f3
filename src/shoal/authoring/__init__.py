"""Model repositories: made, read and checked without a server."""

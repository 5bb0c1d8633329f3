"""A Triton server, and the gateway in front of it."""

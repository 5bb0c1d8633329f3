"""Find, start and stop a Triton server on this machine."""

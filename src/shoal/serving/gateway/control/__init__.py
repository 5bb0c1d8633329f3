"""The service: its start and stop, and the supervision of Triton."""

"""Clients of a Triton server."""

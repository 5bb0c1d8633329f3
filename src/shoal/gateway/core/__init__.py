"""Requests on their way to Triton: clients, limits, admission, and the connections to the active server."""

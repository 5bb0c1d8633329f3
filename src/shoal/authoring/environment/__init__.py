"""Execution environments of Python models: build, inspect, unpack, and check against a stub and a server."""

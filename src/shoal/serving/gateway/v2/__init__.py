"""Triton's own protocols: the HTTP and gRPC front ends of its inference API."""

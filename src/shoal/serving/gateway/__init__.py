"""Reverse proxy that supervises Triton: HTTP and gRPC front ends, limits for clients, health checks, restarts."""

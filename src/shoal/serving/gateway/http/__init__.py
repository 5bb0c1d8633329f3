"""The ports: connections, TLS, bodies and routes."""

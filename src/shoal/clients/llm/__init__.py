"""Clients of language models: text in, text out, whole or streamed."""

"""Clients of a server: of one request, of language models, in this process, of whole files."""

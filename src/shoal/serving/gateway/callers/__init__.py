"""Callers: keys, addresses, quotas, what each may use, and the log of their requests."""

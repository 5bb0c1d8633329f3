"""Performance advice derived from a measurement; each sentence gives the figures it is based on."""

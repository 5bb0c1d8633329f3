"""Data of a model repository: configurations, the graph of an ensemble, placement on CPU and GPUs, memory sizes."""

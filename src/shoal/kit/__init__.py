"""Code that runs in a model's process, and is copied beside its model.py."""

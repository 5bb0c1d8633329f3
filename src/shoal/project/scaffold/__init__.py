"""Skeletons of components, models and pipelines: working, tested, and the user's own from then on."""

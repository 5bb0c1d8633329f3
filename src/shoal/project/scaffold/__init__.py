"""Skeletons of components, models and pipelines: working, tested, and for the user to edit."""

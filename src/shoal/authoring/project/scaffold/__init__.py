"""Skeletons of components, models and pipelines. They work, have a test, and are for the user to edit."""

"""Measurements, comparisons and advice."""

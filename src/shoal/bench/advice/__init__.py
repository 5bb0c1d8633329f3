"""Advice that is drawn from a measurement, each sentence with the figures that it rests on."""

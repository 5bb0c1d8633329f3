"""Work of the hybrid client."""

from __future__ import annotations

import time

from shoal.clients.client.copies import Copies, read_metrics
from shoal.serving.server.launch import Server

TEXTS = ["The cat sat.", "", "It is nonetheless imperative that epistemology be considered.", "漢字 🐟"]


def settled(server: Server) -> Copies:
    """Return the metrics once they have caught up, which takes up to a second."""
    for _ in range(20):
        read = read_metrics(server.metrics_url)
        time.sleep(2)
        if read_metrics(server.metrics_url) == read:
            return read
    raise AssertionError("the metrics do not settle")

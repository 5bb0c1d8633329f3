"""Models of any library become model folders: nothing of their configuration is guessed in silence."""

"""Models that a user has, of whatever library, become leaves: nothing of their configuration is guessed in silence."""

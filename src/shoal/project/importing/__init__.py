"""Import of models as model folders, with a configuration derived from the model; nothing is guessed silently."""

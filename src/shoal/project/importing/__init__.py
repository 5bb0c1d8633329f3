"""Import of models as model folders. The configuration is derived from the model; notes to the user say from what."""

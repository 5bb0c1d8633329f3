"""Import of models as model folders. The configuration is derived from the model; notes for the user say how."""

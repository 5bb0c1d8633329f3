"""Static checks of model repositories, by Triton's own rules (with its error messages) and by further rules."""

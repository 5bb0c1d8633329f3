"""Component API: base class for a ``model.py``, and access to the component's arrays, parameters and artifacts."""

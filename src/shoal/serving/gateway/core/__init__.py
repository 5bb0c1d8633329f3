"""One request on its way to Triton: admission, fair turns, the connections to the active server, resending."""

"""Sessions, workers and the wires between them."""

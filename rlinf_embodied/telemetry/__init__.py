"""What happened: spans, metrics, the run folder, the live view."""

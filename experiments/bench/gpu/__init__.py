"""Every check and measurement that needs a GPU."""

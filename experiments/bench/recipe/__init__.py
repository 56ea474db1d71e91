"""The demo's recipe on seeds that tuning never saw."""

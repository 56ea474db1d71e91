"""Runs a workflow's plan on a session."""

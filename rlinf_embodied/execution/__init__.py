"""Runs a plan tree of a workflow on a session."""

"""Workflows and plans as plain data (no torch, no ray)."""

"""Policies in a dataset's units: their losses and actions are those of a plain policy on normalised data."""

from __future__ import annotations

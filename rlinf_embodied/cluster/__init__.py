"""Devices and cores as plain values."""

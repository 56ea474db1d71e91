"""Goldens of the OpenVLA reference code, and what the networks here make of the same inputs."""

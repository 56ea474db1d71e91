"""Pins the process of the tests: named by `-p` in pyproject.toml, so before plugins that import numpy."""

from rlinf_embodied import portable

portable.pin()

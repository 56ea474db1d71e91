"""Pins the test process; pyproject.toml loads it by `-p`, before plugins that import numpy."""

from rlinf_embodied import portable

portable.pin()

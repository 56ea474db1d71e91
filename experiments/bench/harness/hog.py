"""A process that keeps one core busy, for measurements of what that does to others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_COMMAND = "import os; os.sched_setaffinity(0, {%d})\nwhile True: pass"


@contextmanager
def busy_core() -> Iterator[int]:
    """Keeps the first core that this process may use busy; yields its number."""
    core = min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", _COMMAND % core]) as process:
        try:
            yield core
        finally:
            process.kill()

"""Takes repairs out of a copy of the repository, one at a time, and demands that the test of each then fails.

python -m tests.mutants           all mutants of table.txt; exit code 1: one survives
python -m tests.mutants 1.7 KL    those whose names contain one of these words

Without a mutant the tests have to pass.  Libraries are imported once: each run of pytest is a fork of this process.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.table import ROOT, Mutant, mutants

_LIBRARIES = ("torch", "gymnasium", "hydra", "hypothesis", "beartype", "pytest")
_OUTCOMES = {0: "SURVIVED", 1: "killed"}  # by pytest's exit code


def in_a_copy(words: list[str]) -> int:
    """Copies what git tracks, as it is in the working tree, runs this command there, and returns its exit code."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, Path(folder) / name)
        command = [sys.executable, "-m", "tests.mutants", "--here", *words]
        variables = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=folder, env=variables, check=False).returncode


def run(tests: set[str]) -> tuple[int, str]:
    """Returns pytest's exit code in a forked process, and its output."""
    with tempfile.NamedTemporaryFile("r") as log:
        if (child := os.fork()) == 0:
            for stream in (1, 2):
                os.dup2(os.open(log.name, os.O_WRONLY | os.O_APPEND), stream)
            os._exit(importlib.import_module("pytest").main(["-qx", "--tb=short", "-p", "no:cacheprovider", *tests]))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log.read()


def outcome(mutant: Mutant, number: int) -> tuple[str, str]:
    """Returns whether the mutant was killed, and the first error."""
    path = ROOT / mutant.file
    before, text = path.stat(), path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    os.utime(path, (number, number))  # a time that no compiled file has, by which Python tells whether to use it
    code, log = run({mutant.test})
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return _OUTCOMES.get(code, f"BROKEN {code}"), next((s for s in log.splitlines() if s.startswith("E  ")), "")[4:]


def check(words: list[str]) -> int:
    """Runs the mutants in the copy that this file is part of; returns the exit code."""
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.name for word in words)]
    portable = importlib.import_module("rlinf_embodied.portable")
    assert Path(portable.__file__).is_relative_to(ROOT), f"{portable.__file__} is not the copy's"
    portable.pin()
    for name in [name for name in sys.modules if name.startswith("rlinf_embodied")]:
        del sys.modules[name]
    for name in _LIBRARIES:
        importlib.import_module(name)
    code, log = run({mutant.test for mutant in chosen})
    if code:
        sys.exit(f"{log}\nWithout a mutant the tests have to pass.")
    left = 0
    for number, mutant in enumerate(chosen, 1):
        start = time.monotonic()
        found, why = outcome(mutant, number)
        left += found != "killed"
        print(f"{mutant.name:<36} {found:<8} {time.monotonic() - start:6.1f} s  {mutant.test}  {why[:60]}", flush=True)
    print(f"{len(chosen) - left} of {len(chosen)} mutants were killed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(check(sys.argv[2:]) if sys.argv[1:2] == ["--here"] else in_a_copy(sys.argv[1:]))

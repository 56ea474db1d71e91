"""Takes repairs out of a copy of the repository, one at a time, and demands that the test of each then fails.

python -m tests.mutants           all mutants of table.txt; exit code 1: one survives
python -m tests.mutants 1.7 KL    those whose names contain one of these words
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

import pytest

from rlinf_embodied import portable
from tests.mutants.table import ROOT, mutants


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
    """Returns pytest's exit code in a fork of this process, which has imported the libraries, and its output."""
    with tempfile.TemporaryFile("w+") as log:
        if (child := os.fork()) == 0:
            code = -1
            try:
                os.dup2(log.fileno(), 1)
                code = pytest.main(["-qx", "--tb=short", "-p", "no:cacheprovider", *tests])
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        log.seek(0)
        return code, log.read()


def check(words: list[str]) -> int:
    """Runs the mutants in the copy that this file is part of; returns the exit code."""
    assert Path(portable.__file__).is_relative_to(ROOT), f"{portable.__file__} is not the copy's"
    portable.pin()
    for name in [name for name in sys.modules if name.startswith("rlinf_embodied")]:
        del sys.modules[name]  # a fork imports them, one of them changed
    for name in ("torch", "gymnasium", "hydra", "hypothesis", "beartype", "transformers.modeling_utils"):
        importlib.import_module(name)
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.name for word in words)]
    code, log = run({mutant.test for mutant in chosen})
    if code:
        sys.exit(f"{log}\nWithout a mutant the tests have to pass.")
    left = 0
    for number, (file, name, test, old, new) in enumerate(chosen, 1):
        start, path, text = time.monotonic(), ROOT / file, (ROOT / file).read_text()
        path.write_text(text.replace(old, new))
        os.utime(path, (number, number))  # a time that no compiled file has, by which Python tells whether to use it
        code, log = run({test})
        path.write_text(text)
        found, why = {0: "SURVIVED", 1: "killed"}.get(code, f"BROKEN {code}"), log.partition("\nE  ")[2].split("\n")[0]
        left += code != 1
        print(f"{name:<36} {found:<8} {time.monotonic() - start:6.1f} s  {test}  {why.strip()[:60]}", flush=True)
    print(f"{len(chosen) - left} of {len(chosen)} mutants were killed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(check(sys.argv[2:]) if sys.argv[1:2] == ["--here"] else in_a_copy(sys.argv[1:]))

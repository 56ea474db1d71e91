"""Programs of a model: honest ones run, hostile ones are contained, whoever owns the sandbox."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from experiments.examples.code_tests import passes_tests
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reasoning import sandbox as sandbox_module
from rlinf_embodied.reasoning.sandbox import Result, Sandbox
from rlinf_embodied.tools.disturbances import descendants

ROOT = Path(__file__).resolve().parents[2]
TRIED = (
    "\nfor attempt in attempts:\n    try: print('done', attempt())\n    except OSError as error: print(error.errno)\n"
)
FOREVER = "\nimport time\ntime.sleep(60)"
CALLS = "import ctypes, os\ncall = ctypes.CDLL(None).syscall\n"
# PORT, HOME (with a file `secret`), PID (of the owner) are replaced
HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "bytearray(1 << 34)",
    "memory of many": f"import os\nfor _ in range(3):\n    if not os.fork(): break\nx = b'x' * (90 << 20){FOREVER}",
    "memory beside": f"import os\n{CALLS}print(call(29, 0, 1 << 20, 950), call(319, b'', 0))",  # shmget, memfd_create
    "big files": "def fill(size):\n    for k in range(99): open(f'{k}', 'wb').write(bytes(size))\n"
    f"attempts = [lambda: fill(17 << 20), lambda: fill(1 << 20)]{TRIED}",
    "reads": f"attempts = [lambda p=p: open(p).read() for p in ('/etc/shadow', 'HOME/secret', '/proc/1/mem')]{TRIED}",
    "writes": "import os, sys\nplaces = '/', '/usr', '/dev', sys.prefix, sys.base_prefix\n"
    f"attempts = [lambda p=p: open(p + '/x', 'w') for p in places]{TRIED}",
    "sockets": "import socket as s\nkinds = (s.AF_INET, 1), (s.AF_INET, s.SOCK_DGRAM), (s.AF_UNIX, 1)\n"
    f"attempts = [lambda: s.create_connection(('127.0.0.1', PORT)), *(lambda k=k: s.socket(*k) for k in kinds)]{TRIED}",
    "sleep": FOREVER,
    "daemon": f"import os\n{CALLS}read, write = os.pipe()\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n"
    f"        call(157, 15, b'outliver'), os.write(write, b'x')\n        __import__('time').sleep(60)\n"
    "    os._exit(0)\nprint(os.read(read, 1))",
    # ptrace, process_vm_readv, then signals
    "kills": f"{CALLS}import signal\nprint(call(101, 16, 1, 0, 0), call(310, 1, 0, 0, 0, 0, 0))\n"
    "try: os.kill(PID, 9)\nexcept OSError as error: print(error.errno)\n"
    "os.kill(1, signal.SIGKILL), os.kill(1, signal.SIGINT)",
    "namespaces": f"{CALLS}print(call(272, 0x10000000), call(272, 0x20000), call(56, 0x10000011, 0, 0, 0, 0))",
    "flood": "while True: print('x' * 1000)",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef deeper(): deeper()\ndeeper()",
    "huge integer": "9**9**9",
    "environment": "import os, pathlib\nprint(sorted(os.environ), os.path.exists('/proc'))",
}
REFUSED_4, VARIABLES = "1\n1\n1\n1\n", "['HOME', 'LC_CTYPE', 'OMP_NUM_THREADS', 'PATH', 'PYTHONHASHSEED', 'PYTHONUTF8']"
CONTAINED = {  # by program: the statuses and the output that it may have
    "fork bomb": (("cpu_s",), ""),
    "memory": (("exit 1",), ""),
    "memory of many": (("memory_bytes",), ""),
    "memory beside": (("ok",), "-1 -1\n"),
    "big files": (("ok",), "27\n28\n"),  # EFBIG, ENOSPC
    "reads": (("ok",), "2\n2\n2\n"),
    "writes": (("ok",), "30\n30\n30\n30\n30\n"),  # EROFS
    "sockets": (("ok",), REFUSED_4),
    "sleep": (("wall_s",), ""),
    "daemon": (("ok",), "b'x'\n"),
    "kills": (("ok",), "-1 -1\n3\n"),
    "namespaces": (("ok",), "-1 -1 -1\n"),
    "flood": (("output_bytes",), None),
    "recursion": (("memory_bytes", "cpu_s", "exit 1", "signal 11"), ""),
    "huge integer": (("cpu_s",), ""),
    "environment": (("ok",), f"{VARIABLES} False\n"),
}
# runs a table of programs from its standard input, as its owner
OWNER = """
import dataclasses, json, sys
from rlinf_embodied.reasoning.sandbox import Limits, Sandbox
limits = {"": (0.5, 60.0), "sleep": (0.5, 1.0), "memory of many": (10.0, 60.0)}  # processor time, and of the clock
boxes = {n: Sandbox(Limits(cpu_s=cpu, wall_s=wall, memory_bytes=256 << 20)) for n, (cpu, wall) in limits.items()}
found = {name: boxes.get(name, boxes[""]).run(code) for name, code in json.load(sys.stdin).items()}
print(json.dumps({name: dataclasses.asdict(result) for name, result in found.items()}))
"""


def comms() -> set[str]:
    """Returns the names of all processes of the machine."""
    return {path.read_text().strip() for path in Path("/proc").glob("[0-9]*/comm") if path.exists()}


@pytest.fixture(scope="module", params=["this user", "an ordinary user"])
def results(request, tmp_path_factory) -> dict[str, Result]:
    home, python, user = tmp_path_factory.mktemp("home"), sys.executable, {}
    (home / "secret").write_text("secret")
    if request.param == "an ordinary user":
        if os.geteuid():
            pytest.skip("this user is one")
        python, user = "/usr/bin/python3", {"user": 1000, "group": 1000, "extra_groups": []}
        probe = "import sys; sys.exit(sys.version_info < (3, 11))"
        if not os.path.exists(python) or subprocess.run([python, "-c", probe], check=False).returncode:
            pytest.skip(f"{python} is no Python 3.11, and users may not read this one")
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(home), "SECRET": "secret"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        replaced = {"PORT": str(server.getsockname()[1]), "HOME": str(home), "PID": str(os.getpid())}
        programs = dict(HOSTILE)
        for word, value in replaced.items():
            programs = {name: code.replace(word, value) for name, code in programs.items()}
        done = subprocess.run(
            [python, "-c", OWNER], input=json.dumps(programs), stdout=-1, text=True, env=environment, check=True, **user
        )
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not {name for name in comms() if "outliver" in name}
    return {name: Result(**found) for name, found in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_contained(results, name):
    statuses, stdout = CONTAINED[name]
    assert results[name].status in statuses, results[name]
    assert results[name].stdout == (results[name].stdout[: 64 << 10] if stdout is None else stdout)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox()
    yield made
    made.close()


def test_an_honest_program_runs_as_python_runs_it(sandbox):
    code = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nprint(A(int(input())), __name__)"
    assert sandbox.run(code, "7\n") == Result("A(x=7) __main__\n", "", "ok")
    failed = sandbox.run("print(1)\nraise SystemExit(3)")
    assert failed == Result("1\n", "", "exit 3")
    assert sandbox.run("1 / 0").stderr.splitlines()[1:3] == ['  File "program.py", line 1, in <module>', "    1 / 0"]
    assert sandbox.run("open('kept', 'w').write('x'); import atexit; atexit.register(print, 'bye')").stdout == "bye\n"
    assert sandbox.run("import os; print(os.listdir('/tmp'))").stdout == "[]\n"  # nothing passes to the next program
    threads = "from concurrent.futures import *\nprint(*ThreadPoolExecutor(2).map(abs, [-1, -2]))"
    assert sandbox.run(threads).stdout == "1 2\n"


@pytest.mark.parametrize("number", range(4), ids=["server", "watcher", "init", "program"])
def test_a_program_that_was_killed_from_outside_is_run_again(number):
    with closing(Sandbox()) as made, ThreadPoolExecutor(1) as threads:
        server = made._idle[0].pid
        assert server is not None
        running = threads.submit(made.run, "import time\ntime.sleep(0.5)\nprint(input())", "7\n")
        while len(found := [server, *descendants(server)]) < 4:
            time.sleep(0.001)
        os.kill(found[number], signal.SIGKILL)
        assert running.result() == Result("7\n", "", "ok")
        assert made.run("import os\nos.kill(os.getpid(), 9)").status == "signal 9"


def test_where_programs_cannot_be_isolated_none_runs(monkeypatch, tmp_path):
    source = (
        Path(sandbox_module._WORKER).read_text().replace("getattr(_LIBC, name)(*arguments) < 0", "name == 'unshare'")
    )
    (tmp_path / "sandbox_worker.py").write_text(source)
    monkeypatch.setattr(sandbox_module, "_WORKER", tmp_path / "sandbox_worker.py")
    with pytest.raises(ConfigError, match=r"cannot be isolated on this machine \(.*unshare.*allow user namespaces"):
        Sandbox()


def test_the_pages_tool_runs():
    (code,) = re.findall(r"```python\n# my_tool.py\n(.*?)```", (ROOT / "docs/own_reward.md").read_text(), re.DOTALL)
    exec(code, {})


SQUARE = "def square(x):\n    return x * x\n"
STATEMENTS = ["assert square(3) == 9", "assert square(5) == 25"]
PAIRS = [{"input": "3\n", "output": "9\n"}, {"input": "5\n", "output": "25"}]


@pytest.mark.parametrize(
    ("completion", "tests", "earned"),
    [
        (f"So:\n```python\nx = 1\n```\nor\n```python\n{SQUARE}```\nDone.", STATEMENTS, 1.0),
        (SQUARE.replace("* x", "+ x"), STATEMENTS, 0.0),
        (SQUARE + "import os\nprint('all passed')\nos._exit(0)", STATEMENTS, 0.0),
        (SQUARE + "raise SystemExit", STATEMENTS, 0.0),
        ("print(int(input()) ** 2, '  ')", PAIRS, 1.0),
        ("print(9)", PAIRS, 0.0),
        ("no program", PAIRS, 0.0),
    ],
)
def test_a_program_earns_by_its_problems_tests(completion, tests, earned):
    assert passes_tests(completion, Problem(0, "Square.", "-", None, "text", "own", {"tests": tests})) == earned


@pytest.mark.parametrize(("columns", "given"), [({}, "None"), ({"tests": []}, r"\[\]")])
def test_a_problem_without_tests_is_named(columns, given):
    with pytest.raises(ConfigError, match=rf"tests of 'Square\.' is {given}, but a code problem has the column"):
        passes_tests("", Problem(0, "Square.", "-", None, "text", "own", columns))

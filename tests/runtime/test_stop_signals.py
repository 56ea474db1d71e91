"""A request to stop is heard once as a request, the second time as an order, and never where it is to be ignored."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlinf_embodied.runtime.stop_signals import Stopped, ends_at_once, ends_when_asked

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize(("number", "code"), CODES.items())
def test_the_first_one_is_noted_and_the_second_one_raises(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with ends_when_asked() as request:
        assert not request.asked
        signal.raise_signal(number)
        assert (request.asked, request.exit_code) == (True, code)
        with pytest.raises(Stopped) as caught:
            signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("number", "code"), CODES.items())
def test_where_nothing_is_under_way_the_first_one_raises(number: int, code: int) -> None:
    with pytest.raises(Stopped) as caught, ends_at_once():
        signal.raise_signal(number)
    assert caught.value.exit_code == code


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_at_once(), ends_when_asked() as request:
            signal.raise_signal(signal.SIGHUP)
            assert not request.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_while_files_are_closed_ends_the_process() -> None:
    program = (
        "import signal\nfrom rlinf_embodied.runtime.stop_signals import ends_at_once\nwith ends_at_once():\n"
        "    try:\n        signal.raise_signal(signal.SIGTERM)\n"
        "    finally:\n        signal.raise_signal(signal.SIGHUP)\n        print('closed')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (129, "")


def test_a_run_whose_terminal_is_closed_goes_on_to_its_checkpoint(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom rlinf_embodied.runtime.stop_signals import ends_when_asked\n"
        "with ends_when_asked() as stop:\n    print('running', flush=True)\n"
        "    while not stop.asked:\n        time.sleep(0.02)\n"
        "    print('a line for the terminal', flush=True)\n    Path(sys.argv[1]).write_text('saved')\n"
        "sys.exit(stop.exit_code)\n"
    )
    done = tmp_path / "checkpoint"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", program, str(done)])
    assert b"running" in os.read(terminal, 100)
    os.close(terminal)  # which the kernel tells the group by SIGHUP
    for _ in range(1200):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    assert os.waitstatus_to_exitcode(status) == 129
    assert done.read_text() == "saved"

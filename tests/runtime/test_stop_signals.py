"""A request to stop is heard once as a request, the second time as an order, and never where it is to be ignored."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rlinf_embodied.runtime.stop_signals import Stopped, ends_at_once, ends_when_asked

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


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
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ends_at_once(), ends_when_asked() as request:
            signal.raise_signal(signal.SIGINT)
            assert not request.asked
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_while_files_are_closed_ends_the_process() -> None:
    program = (
        "import signal\nfrom rlinf_embodied.runtime.stop_signals import ends_at_once\nwith ends_at_once():\n"
        "    try:\n        signal.raise_signal(signal.SIGINT)\n"
        "    finally:\n        signal.raise_signal(signal.SIGTERM)\n        print('closed')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (143, "")

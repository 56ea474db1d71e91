"""The doctor tells a machine on which a run would fail from one on which it would only be slow."""

import sys

import pytest

from experiments import doctor


def test_what_is_broken_decides_the_exit_code(capsys):
    ok = doctor.Finding("Python", doctor.State.ok, "3.11")
    slow = doctor.Finding("Threads", doctor.State.slow, "2 cores", "set OMP_NUM_THREADS")
    broken = doctor.Finding("Vulkan", doctor.State.broken, "no device", "make setup")
    assert doctor.verdict([ok, slow]) == 0
    assert "set OMP_NUM_THREADS" in capsys.readouterr().out
    assert doctor.verdict([ok, broken]) == 1
    assert "problems: Vulkan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rendering", "hint", "state"),
    [
        (("NVIDIA H100", ""), "", "ok"),
        (("llvmpipe (LLVM 15)", ""), "", "ok"),
        (("llvmpipe (LLVM 15)", ""), "An NVIDIA GPU is here", "slow"),
        (("", "no device"), "", "broken"),
    ],
)
def test_software_rendering_is_slow_only_where_a_gpu_could_do_it(monkeypatch, rendering, hint, state):
    monkeypatch.setattr("experiments.doctor.probe_rendering", lambda picture: rendering)
    monkeypatch.setattr("experiments.doctor.nvidia_hint", lambda: hint)
    found = doctor.check_vulkan()
    assert found.state == state
    assert hint in found.fix


def test_where_a_library_is_missing_nothing_that_needs_it_is_tried(monkeypatch):
    monkeypatch.setattr(doctor, "LIBRARIES", ("no-such-library",))
    first, *others = doctor.examine()
    assert (first.state, first.found) == ("broken", "no-such-library is not installed")
    assert [found.part for found in others] == ["Memory", "Disk"]


def test_a_process_that_dies_is_reported_not_raised():
    assert doctor.ask("import os; os.abort()") == ("", "the process ended with code -6")
    assert doctor.ask("raise OSError('no driver')") == ("", "OSError: no driver")
    assert doctor.ask("import time; time.sleep(60)", timeout_s=0.2) == ("", "no answer within 0 s")
    assert doctor.ask("print('noise'); print('2 threads')") == ("2 threads", "")


@pytest.mark.parametrize(("version", "state"), [((3, 11, 7), "ok"), ((3, 13, 0), "broken"), ((3, 10, 1), "broken")])
def test_the_interpreter_must_be_a_supported_one(monkeypatch, version, state):
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(doctor, "LIBRARIES", ())
    assert doctor.check_libraries().state == state

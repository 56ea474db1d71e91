"""A user's env that cannot be built is named with its config path, its error and its author's own lines."""

from __future__ import annotations

from runs import tiny_overrides
from scripts import call

BROKEN = """
import json

class Arm:
    def __init__(self, port):
        self.calibration = open(port + 1)

def make_env(config, num_envs, device="cpu", render_final=False):
    return Arm("/dev/arm0")
"""


def test_a_training_says_in_one_error_what_the_env_raised_and_where(monkeypatch, capsys, tmp_path) -> None:
    (module := tmp_path / "arm_without_port.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = ["env._target_=arm_without_port.make_env", f"run.dir={tmp_path / 'run'}"]
    code, _, err = call(monkeypatch, capsys, "train_vla", *tiny_overrides(*chosen))
    assert code == 2
    first, *frames, action = err.splitlines()
    assert first.startswith("error: env._target_ is 'arm_without_port.make_env', but building its")
    assert 'raised TypeError: can only concatenate str (not "int") to str' in first
    assert "(env.task=PointReach-v0)" in first
    assert frames == [
        f'  {module}, line 9, in make_env: return Arm("/dev/arm0")',
        f"  {module}, line 6, in __init__: self.calibration = open(port + 1)",
    ]
    assert action.startswith("Fix it there, or the keys of env.* that it reads")

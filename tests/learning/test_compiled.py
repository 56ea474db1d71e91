"""Passes compiled by torch: the same sums, the same weights under every plan, compiled once whatever was sampled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import REPOSITORY
from control_runs import small
from runs import tiny
from torch import Tensor, nn

from rlinf_embodied.algorithms.batch import TrainingBlock
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.learning.compiled import compiled, require_compiler
from rlinf_embodied.learning.gradients import LossSums, differentiated

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with a C++ compiler")
LEARNERS = {"ppo": 2, "grpo": 1, "sac": 2}  # each with a pass of its own


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    """What tests/compiled_runs.py prints."""
    command = [sys.executable, str(REPOSITORY / "tests/compiled_runs.py")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@needs_compiler
@pytest.mark.parametrize("name", LEARNERS)
def test_training_is_the_same_but_for_rounding_and_under_every_plan(found, name: str) -> None:
    eager, one, apart = (found[name][arm] for arm in ("eager", "compiled", "apart"))
    assert (apart["digest"], apart["metrics"]) == (one["digest"], one["metrics"])
    assert one["graphs"] == LEARNERS[name], "a pass is compiled once, however many rows its minibatches have"
    assert one["digest"] != eager["digest"], "kernels round otherwise; if not, nothing was compiled"
    for ours, theirs in zip(one["metrics"], eager["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def weigh(net: nn.Module, rows: Tensor, scale: Tensor) -> LossSums:
    loss = (net(rows)[:, 0].tanh() * scale).sum()
    return LossSums(loss, loss.new_tensor(float(len(rows))), loss.detach()[None])


@needs_compiler
def test_a_pass_reads_its_arguments_and_the_weights_of_now() -> None:
    net, differentiate = nn.Linear(3, 1), compiled("cpu")
    parameters = list(net.parameters())
    for scale in (1.0, 2.5):
        run = partial(weigh, net, torch.randn(5, 3), torch.tensor(scale))
        torch.testing.assert_close(differentiate(run, parameters), differentiated(run, parameters))
        with torch.no_grad():
            net.weight.add_(0.3)


ONE_PASS = """
import torch
from functools import partial
from rlinf_embodied.learning.compiled import compiled
from rlinf_embodied.learning.gradients import LossSums, differentiated
torch.manual_seed(0)
net, rows = torch.nn.Linear(17, 64), torch.randn(64, 17)
def weigh(rows):
    loss = net(rows).tanh().exp().sum()
    return LossSums(loss, loss.new_tensor(1.0), loss.detach()[None])
run, parameters = partial(weigh, rows), list(net.parameters())
torch.testing.assert_close(compiled("cpu")(run, parameters), differentiated(run, parameters), rtol=1e-4, atol=1e-3)
"""


@needs_compiler
def test_kernels_of_other_instructions_are_not_taken_from_torchs_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for level in (None, "avx2"):  # None: the best that this machine has
        monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        if level is not None:
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", level)
        run = subprocess.run(
            [sys.executable, "-c", ONE_PASS], capture_output=True, text=True, cwd=REPOSITORY, check=False
        )
        assert run.returncode == 0, run.stderr


def unfit(net: nn.Module, rows: Tensor) -> LossSums:
    return weigh(net, rows, torch.tensor(1.0 if float(rows.sum()) > 0 else 2.0))


@needs_compiler
def test_a_pass_that_cannot_be_compiled_says_what_to_set() -> None:
    net = nn.Linear(3, 1)
    with pytest.raises(ConfigError, match=r"algorithm\.compile is true, but torch cannot compile .*compile=false"):
        compiled("cpu")(partial(unfit, net, torch.randn(5, 3)), list(net.parameters()))


@pytest.mark.parametrize(
    ("kind", "cxx", "said"),
    [("cpu", "/nowhere/g++", "no C.. compiler here: install g"), ("npu", None, "of the kind npu")],
)
def test_what_cannot_compile_is_refused_at_once(kind: str, cxx: str | None, said: str) -> None:
    import torch._inductor.config

    cluster, said = Cluster("test", kind, 1, 1, 0), f"algorithm.compile is true, but .*{said}.*algorithm.compile=false"
    with torch._inductor.config.patch({"cpp.cxx": (cxx,)}), pytest.raises(ConfigError, match=said):
        require_compiler(compile=True, cluster=cluster)
    require_compiler(compile=False, cluster=cluster)


@pytest.mark.parametrize(
    "words", [["run.exact=off", "algorithm.sharding=fsdp2"], ["run.exact=portable"]], ids=lambda words: words[-1]
)
def test_what_compiled_passes_do_not_go_with_is_named(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.compile is True"):
        tiny("algorithm.compile=true", *words)
    with pytest.raises(ConfigError, match=r"algorithm\.compile is True, .*run\.exact=exact"):
        small("algorithm.compile=true")


def test_rows_of_padding_count_for_nothing() -> None:
    number, three = torch.arange(3.0), torch.ones(3, 2)
    block = TrainingBlock(
        features={"state": number[:, None]},
        record={"drawn": number[:, None]},
        old_log_probs=three[..., None],
        valid=three > 0,
        advantages=three,
        weights=three,
        privileged=None,
        values=None,
        returns=three * 2,
    )
    padded = block.padded(5)
    assert padded.features["state"][:, 0].tolist() == [0, 1, 2, 0, 0]
    assert padded.valid.sum(1).tolist() == [2, 2, 2, 0, 0]
    assert padded.weights.sum(1).tolist() == [2, 2, 2, 0, 0]
    assert padded.returns is not None
    assert len(padded.returns) == len(padded) == 5

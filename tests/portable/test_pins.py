"""What is pinned where: variables, numpy, ATen; and what happens where pinning is impossible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlinf_embodied import portable
from rlinf_embodied.compose import compose_train
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.portable import library, pins
from rlinf_embodied.runtime.ray_cluster import worker_variables

REPOSITORY = Path(__file__).resolve().parents[2]


def run(code: str, **variables: str) -> subprocess.CompletedProcess:
    names = {*pins.VARIABLES, "LD_PRELOAD", "RLINF_PORTABLE_LIBRARY"}
    environment = {key: value for key, value in os.environ.items() if key not in names} | variables
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_tests_run_pinned() -> None:
    assert portable.is_pinned()
    portable.require()
    assert torch.backends.cpu.get_cpu_capability() == "AVX2"
    assert portable.describe()["variables"] == pins.VARIABLES


def test_numpy_uses_avx2_at_most() -> None:
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    wide = [name for name in __cpu_dispatch__ if name not in ("X86_V3",)]
    assert set(wide) <= set(pins.VARIABLES["NPY_DISABLE_CPU_FEATURES"].split())
    assert not any(__cpu_features__[name] for name in wide)


def test_workers_start_with_the_pins_of_the_driver(monkeypatch) -> None:
    assert pins.VARIABLES.items() <= worker_variables(1).items()
    assert os.environ["RLINF_PORTABLE_LIBRARY"] in worker_variables(1)["LD_PRELOAD"]
    assert not {*pins.VARIABLES, "LD_PRELOAD"} & set(worker_variables(1, "cuda:0"))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert not portable.is_pinned()
    assert "LD_PRELOAD" not in worker_variables(1)
    with pytest.raises(ConfigError, match=r"run.exact is 'portable'.*not pinned.*run.exact=exact"):
        portable.require()


def test_pinning_after_torch_is_refused(monkeypatch) -> None:
    monkeypatch.delenv("RLINF_PORTABLE_LIBRARY")
    with pytest.raises(ConfigError, match=r"torch is imported already.*run.exact=exact"):
        portable.pin()


def test_a_worker_without_the_library_says_so(monkeypatch) -> None:
    monkeypatch.setenv("RLINF_PORTABLE_LIBRARY", "/nowhere.so")
    monkeypatch.setattr(pins, "_num_products", lambda: 0)
    with pytest.raises(ConfigError, match=r"does not call /nowhere.so"):
        portable.verify()


def test_a_missing_compiler_is_named(monkeypatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -x")
    with pytest.raises(ConfigError, match=r"no C compiler no-such-compiler.*run.exact=exact"):
        library.compiled()


def test_a_default_that_is_impossible_falls_back_and_a_wish_is_refused() -> None:
    code = (
        "import sys; sys.argv = ['x', 'env=point_reach'{wish}]\n"
        "from rlinf_embodied.command_line import main\n"
        "from rlinf_embodied.config import TrainConfig\n"
        "main(lambda config: print(config.run.exact.value), TrainConfig)"
    )
    done = run(code.format(wish=""), CC="no-such-compiler")
    assert (done.stdout.strip(), done.returncode) == ("exact", 0)
    assert "no C compiler" in done.stderr
    done = run(code.format(wish=", 'run.exact=portable'"), CC="no-such-compiler")
    assert (done.stdout.strip(), done.returncode) == ("", 2)


def test_a_command_is_pinned_before_it_imports_an_algorithm_and_an_env_that_import_torch(tmp_path) -> None:
    path = tmp_path / "filtered.yaml"
    path.write_text("_target_: own_algorithm.FilteredCloningConfig\n")
    words = [f"algorithm={path}", "env=point_reach", "policy=soft_actor", "env.chunk=1", "env.auto_reset=true"]
    code = (
        f"import sys; sys.argv = ['x', *{words!r}, 'env.chunks_per_rollout=50', 'env.cameras=[]']\n"
        "from rlinf_embodied import command_line, config, portable\n"
        "def work(config):\n"
        "    portable.require()\n"
        "    print(config.run.exact.value, type(config.algorithm).__name__)\n"
        "command_line.main(work, config.TrainConfig)"
    )
    done = run(code, PYTHONPATH=os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")]))
    assert (done.stdout, done.stderr) == ("portable FilteredCloningConfig\n", "")


@pytest.mark.slow
def test_a_file_that_somebody_else_put_into_the_cache_is_not_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(tmp_path))
    made = library.compiled()
    assert made.parent.parent == tmp_path / "portable"
    assert library.compiled() == made
    honest = made.read_bytes()
    made.write_bytes(b"not what was compiled")
    with pytest.raises(ConfigError, match="is not what was compiled for you: remove"):
        library.compiled()
    made.write_bytes(honest)
    assert library.is_trusted(made)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # another user's cache
    assert not library.is_trusted(made)
    monkeypatch.undo()
    made.chmod(0o666)
    assert not library.is_trusted(made)


def test_a_process_of_a_run_on_accelerators_is_not_pinned(monkeypatch) -> None:
    pinned = []
    monkeypatch.setattr(portable, "pin", lambda: pinned.append(True))
    for device, expected in (("cuda", []), ("cpu", [True])):
        compose_train([f"cluster.torch_device={device}"])
        assert pinned == expected

"""What all tests share: array types checked while they run, and skips that name what the machine lacks."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

from experiments.setup.rendering import probe_rendering

REPOSITORY = Path(__file__).resolve().parents[1]
_FUNCTIONS = ("advantages", "iql", "log_probs", "losses")
CHECKED_PACKAGES = [*(f"rlinf_embodied.algorithms.{name}" for name in _FUNCTIONS), "rlinf_embodied.interfaces"]
MANY_MODULES = 200
_SET_ASIDE = pytest.StashKey[int]()  # modules that were imported when garbage was last set aside

settings.register_profile("no deadlines", deadline=None)  # a slow machine is not a defect
settings.load_profile("no deadlines")

# Before any test imports them: the check costs 60 microseconds a call, so only tests pay for it.
install_import_hook(CHECKED_PACKAGES, "beartype.beartype")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what tests/envs/test_env_contract.py and tests/policies/test_policy_contract.py read."""
    parser.addoption("--env", metavar="YAML", help="a custom section `env`, to be held to the contract of envs")
    parser.addoption("--policy", metavar="YAML", help="a custom section `policy`, likewise, on that env")


def pytest_configure() -> None:
    """Hears Ctrl-C, and lets child processes hear it, where a runner in the background ignores it.

    Before torch is imported: one thread per process, as the Makefile has it, on which bits and speed depend.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files without a Ray test unread where only such are asked for: imports take longer than the tests do."""
    only_ray = (config.option.markexpr or "").startswith("ray")
    is_test = collection_path.is_file() and collection_path.name.startswith("test_")
    return True if only_ray and is_test and "mark.ray" not in collection_path.read_text() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs hardware or a renderer that is not here; asks only where such a test was collected."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    sim = [item for item in items if item.get_closest_marker("sim")]
    if gpu and not _has_gpu():
        _skip(gpu, "needs a CUDA device")
    accelerated = [item for item in items if item.get_closest_marker("accelerator")]
    if accelerated and (reason := _missing_accelerator()):
        _skip(accelerated, reason)
    if sim and (reason := _missing_renderer()):
        _skip(sim, reason)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Makes the simulated accelerator known before the first backward pass of the process; see `_set_aside`."""
    if any(item.get_closest_marker("accelerator") for item in session.items) and not _missing_accelerator():
        importlib.import_module("simulated_accelerator")
    _set_aside(session.config)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Sets aside what the tests themselves import where it is much: transformers with the policies, ManiSkill."""
    if len(sys.modules) > item.config.stash[_SET_ASIDE] + MANY_MODULES:
        _set_aside(item.config)


def _set_aside(config: pytest.Config) -> None:
    """Lets garbage be looked for among other things than modules: runs and ManiSkill ask for it, 0.2 s a time."""
    gc.collect()
    gc.freeze()
    config.stash[_SET_ASIDE] = len(sys.modules)


def _skip(items: list[pytest.Item], reason: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _missing_accelerator() -> str:
    from sim_library import missing

    return missing()


def _missing_renderer() -> str:
    """Returns why SAPIEN cannot render here, an empty text if it can; under RLINF_REQUIRE_SIM=1 it must."""
    _, why = probe_rendering()
    if not why:
        return ""
    reason = f"SAPIEN finds no Vulkan device ({why}): run make setup"
    if os.environ.get("RLINF_REQUIRE_SIM") == "1":
        raise pytest.UsageError(reason)
    return reason


@pytest.fixture(scope="session", autouse=True)
def clones_of_their_own(tmp_path_factory):
    """Tests neither find nor leave cached clones; those of one session are shared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLINF_EMBODIED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def nothing_starts(monkeypatch):
    """Fails if a session is opened: with it Ray would start."""

    def refuse(config: object) -> None:
        raise AssertionError("a session was opened")

    monkeypatch.setattr("rlinf_embodied.runtime.session.make_session", refuse)
    monkeypatch.setattr("rlinf_embodied.training.trainer.make_session", refuse)


@pytest.fixture
def import_library(monkeypatch):
    """A function that imports a client or library of .venv-agents, or skips the test; packages of runs come first."""
    from envs.foreign.adapter import folder_of

    site = folder_of("agents") / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    return functools.partial(pytest.importorskip, reason="python -m experiments.setup.foreign env=agents")


@pytest.fixture
def no_group_stays():
    """Removes the process group of torch that sharding makes."""
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def ray_cluster():
    """One Ray for all `ray` tests of this process."""
    import ray

    from rlinf_embodied.runtime.ray_cluster import start_ray

    start_ray(256 << 20, [])
    yield
    ray.shutdown()


@pytest.fixture
def new_ray_session(ray_cluster):
    """A session on the shared Ray, for workers that are not on cores."""
    from rlinf_embodied.runtime.ray_session import RaySession

    session = RaySession()
    yield session
    session.close()


@pytest.fixture(scope="session")
def workers_on_cores(ray_cluster):
    """A session whose workers start once for all tests of this process: each imports torch for seconds."""
    from rlinf_embodied.runtime.ray_session import RaySession

    session = RaySession()
    yield session
    session.close()


@pytest.fixture
def ray_session(workers_on_cores):
    """The session of workers on cores, without stages."""
    yield workers_on_cores
    workers_on_cores.clear()

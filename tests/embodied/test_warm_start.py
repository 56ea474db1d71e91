"""Warm starts: a behaviour-cloned or a new policy is made once, the same under every plan, and found again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from recordings import point_episodes, write_recording
from runs import SFT, TINY, clone, cluster, tiny, train

from rlinf_embodied.compose import compose_export
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.export import export_dataset
from rlinf_embodied.embodied.fine_tuning import FineTuningLearner
from rlinf_embodied.embodied.sources import sources_of
from rlinf_embodied.embodied.warm_start import clone_folder, starting_policy
from rlinf_embodied.runtime.session import SerialSession

STATE = ["policy=state", "algorithm=ppo_dense", "env.cameras=[]", "env.chunk=1", "env.chunks_per_rollout=12"]
SHORT = ["warm_start.num_demos=4", "warm_start.head_epochs=0"]


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch, tmp_path) -> Callable[[], Path]:
    """Returns a function that empties the cache by moving on to another folder."""
    numbers = iter(range(100))

    def renew() -> Path:
        folder = tmp_path / f"cache{next(numbers)}"
        monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(folder))
        return folder

    renew()
    return renew


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def new(config: TrainConfig) -> Path:
    return starting_policy(config, SerialSession(), cluster(1), lambda *progress: None)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "demos.h5", point_episodes(tiny().env, 20))


# ------------------------------------------------------------------------------------------------- the same everywhere
@pytest.mark.slow
@pytest.mark.parametrize("of_files", [False, True])
def test_the_clone_has_the_same_bytes_for_every_number_of_workers(recording: Path, fresh_cache, of_files) -> None:
    config = tiny(*([f"warm_start.demonstrations={recording}"] if of_files else []))
    expected = files(clone(config))
    assert {"config.json", "model.safetensors", "dataset_statistics.json", "evaluation.json"} <= set(expected)
    for devices in (2, 3, 4):
        fresh_cache()
        assert files(clone(config, devices=devices)) == expected


def test_a_warm_start_is_a_fine_tuning_run_with_the_same_numbers(tmp_path: Path) -> None:
    weights = files(clone(tiny("warm_start.head_epochs=3")))["model.safetensors"]
    rest = ["algorithm.held_out=0", "algorithm.batch_size=32", f"run.dir={tmp_path / 'run'}"]
    train(tiny(*SFT, *rest))
    assert (tmp_path / "run/checkpoints/latest/model.safetensors").read_bytes() == weights


def test_a_new_policy_is_a_function_of_the_seed_and_knows_the_scale_of_its_inputs(fresh_cache) -> None:
    first = files(new(tiny(*STATE)))
    fresh_cache()
    assert files(new(tiny(*STATE))) == first
    assert files(new(tiny(*STATE, "run.seed=4")))["model.safetensors"] != first["model.safetensors"]
    columns = json.loads(first["dataset_statistics.json"])["PointReach-v0"]["privileged"]
    assert all(0.1 <= std < 2 for std in columns["std"])
    seeing = json.loads(files(new(tiny("warm_start.from_scratch=true")))["dataset_statistics.json"])
    assert {"vision", "proprio"} <= set(seeing["PointReach-v0"])


# ------------------------------------------------------------------------------------------------------------ the cache
def test_a_cached_clone_starts_no_worker() -> None:
    class NoWorkers(SerialSession):
        def start(self, workers) -> None:
            raise AssertionError("a worker was started")

    folder = clone(tiny(*SHORT))
    assert clone(tiny(*SHORT), session=NoWorkers()) == folder
    with pytest.raises(AssertionError, match="a worker was started"):
        clone(tiny("warm_start.num_demos=8", "warm_start.head_epochs=0"), session=NoWorkers())


def test_the_cache_knows_what_a_clone_is_a_function_of() -> None:
    def where(*overrides: str, kind: str = "cpu") -> Path:
        return clone_folder(tiny(*overrides), kind)

    same = ["policy.temperature=1.0", "env.num_envs=8", "env.hold_steps=0", "env.reward=sparse", "env.success_bonus=0"]
    same += ["run.exact=false", "env.rows_per_call=4"]
    other = ["run.seed=4", "env.obs_size=32", "warm_start.lr=1", "warm_start.noise=[0]", "policy.options.num_bins=5"]
    other += ["env.chunk=3"]
    assert {where(override) for override in same} == {where()}
    assert len({where(), *(where(override) for override in other)}) == 1 + len(other)
    pick, batched = ["env=maniskill_pick"], ["env=maniskill_pick", "env.options.backend=batched"]
    assert where(*pick, kind="cuda") != where(*pick, kind="npu")  # where PhysX does not run a CPU simulates
    assert where(*batched, kind="cuda") == where(*batched, kind="npu")


def test_the_cache_knows_a_file_by_what_it_holds(recording: Path, tmp_path: Path) -> None:
    def where(path: Path) -> Path:
        return clone_folder(tiny(f"warm_start.demonstrations={path}"), kind="cpu")

    other = write_recording(tmp_path / "elsewhere/other name.h5", point_episodes(tiny().env, 8))
    before = where(recording)
    assert before not in (clone_folder(tiny(), kind="cpu"), where(other))
    for suffix in (".h5", ".json"):
        other.with_suffix(suffix).write_bytes(recording.with_suffix(suffix).read_bytes())
    assert where(other) == before
    recording.with_suffix(".json").write_text(recording.with_suffix(".json").read_text() + "\n")
    assert where(recording) != before


@pytest.mark.parametrize("key", ["env._target_", "env.options.adapter", "policy._target_"])
def test_a_clone_is_trained_again_once_custom_code_has_changed(tmp_path, monkeypatch, key) -> None:
    source = tmp_path / "own_code_of_a_clone.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code_of_a_clone", raising=False)
    given = [f"{key}=own_code_of_a_clone.Mine"]
    given += ["env._target_=envs.foreign.env.make_env"] if key == "env.options.adapter" else []
    folders = set()
    for body in ("...", "slow = True"):
        source.write_text(f"from envs.foreign.adapter import Adapter\nclass Mine(Adapter): {body}")
        folders.add(clone_folder(tiny(*given), "cpu"))
    assert len(folders) == 2


def test_what_stops_on_the_way_leaves_nothing_in_the_cache(fresh_cache, monkeypatch) -> None:
    for method in ("run", "save_policy"):
        root = fresh_cache()

        def stop(self, step_context, folder):
            if isinstance(folder, str):  # not the epochs
                Path(folder).mkdir(parents=True)
                (Path(folder) / "config.json").write_text("{")
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(FineTuningLearner, method, stop)
            with pytest.raises(KeyboardInterrupt):
                clone(tiny(*SHORT))
        assert [path for path in root.rglob("*") if path.is_file()] == []
    assert (clone(tiny(*SHORT)) / "config.json").exists()


def test_a_clone_reports_every_demonstration_and_epoch_and_leaves_no_stages_in_the_workers() -> None:
    seen: list[tuple[str, int, int]] = []
    config, session = (
        tiny("warm_start.num_demos=18", "warm_start.epochs=2", "warm_start.head_epochs=3"),
        SerialSession(),
    )
    note = lambda what, done, total, remark: seen.append((what, done, total))  # noqa: E731
    starting_policy(config, session, cluster(1), note)
    assert seen[:2] == [("demonstrations", n, 18) for n in (16, 18)]
    assert seen[2:] == [("fine-tuning", n, 5) for n in (1, 2, 3, 4, 5)]
    assert [host.stages for host in session._hosts.values()] == [{}]


# ------------------------------------------------------------------------------------------------------ whole trainings
def test_a_state_policy_is_recorded_with_cameras_for_a_student_that_sees(tmp_path: Path) -> None:
    latest = tmp_path / "run/checkpoints/latest"
    train(tiny(*STATE, "run.num_iterations=1", f"run.dir={tmp_path / 'run'}"))
    assert json.loads((latest / "evaluation.json").read_text())["fingerprint"]["cameras"] == []
    env = [f"{key}={value}" for key, value in TINY.items() if key.startswith("env")]
    words = [f"checkpoint={latest}", f"out={tmp_path / 'set'}", "num_episodes=8", "successes_only=false", *env]
    assert export_dataset(compose_export(words), lambda *_: None)["written"] == 8
    (source,) = sources_of(tiny(f"warm_start.demonstrations={tmp_path / 'set'}"))
    assert source.num_episodes == 8

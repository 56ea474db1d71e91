"""plan=auto in the launch path: what it measures, what it says, and that neither profiling nor switching shows in the
weights."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import faulty_reach
import pytest
from hierarchical_runs import two_levels
from runs import clone, cluster, metric_rows, tiny, train

from rlinf_embodied.cluster.hardware import Cluster, NodeGroup
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.env_stage import EnvStage
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.embodied.learner import PolicyLearner
from rlinf_embodied.embodied.rollout_stage import RolloutStage
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.errors import ConfigError, PlanError
from rlinf_embodied.execution import profiler
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.planning.profile import FORMAT, Profile, load_profile
from rlinf_embodied.runtime import host as host_module
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.planning import Planning

APART = "auto: env on 0 | policy on 1 in 2 shards > actor on 0"


def profile_file(folder: Path, **stages: dict) -> Path:
    """Says that policy and actor lose by a second device, so that only a slow env makes the rollout use both."""
    loop = {"items_per_device": [2, 4], "devices": [1], "s_per_chunk_step": [[0.001], [0.002]]}
    policy = {"items_per_device": [2, 4], "devices": [1, 2], "s_per_chunk_step": [[0.001, 0.0035], [0.002, 0.007]]}
    actor = {"items_per_device": [2, 4], "devices": [1, 2], "s_per_call": [[0.03, 0.08], [0.06, 0.16]]}
    held = {"env": loop, "policy": policy, "actor": actor} | stages
    path = folder / "told.json"
    path.write_text(json.dumps({"format": FORMAT, "name": "told", "device_kind": "cpu", "stages": held}))
    return path


def run(folder: Path, *overrides: str) -> TrainConfig:
    given = [f"run.dir={folder / 'run'}", f"warm_start.checkpoint={clone(tiny())}", "eval.num_episodes=2"]
    return tiny(*given, "cluster.num_devices=2", *overrides)


@pytest.fixture
def slowness() -> Iterator[int]:
    """A number for env.options.once, whose trace is removed."""
    number = os.getpid()
    yield number
    (Path(tempfile.gettempdir()) / f"slow_reach_{number}").unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------- the profiler
@pytest.fixture(scope="module")
def measured() -> tuple[SerialSession, Profile, list[tuple]]:
    """The session that was used, the profile, and the progress that was shown."""
    seen: list[tuple] = []
    session, workflow = SerialSession(), training_workflow(tiny(), str(clone(tiny())))
    told = lambda *progress: seen.append(progress)  # noqa: E731
    profile = profiler.measure(workflow, session, cluster(2), "tiny", {"config": "x"}, told, budget_s=0.5)
    return session, profile, seen


def test_a_profile_holds_every_stage_edge_and_weight_of_the_workflow(measured, tmp_path) -> None:
    _, profile, seen = measured
    profiler.store_profile(tmp_path / "p.json", profile)
    assert load_profile(tmp_path / "p.json").to_dict() == profile.to_dict()
    for stage in ("env", "policy", "actor"):
        assert (profile.stages[stage].seconds > 0).all()
    # 4 rows of a block x 16 x 16 pixels x 3 colours, proprioception and privileged state on top
    assert 4 * 16 * 16 * 3 < profile.edge_bytes_per_item["env", "policy"] < 4 * 16 * 16 * 3 + 500
    assert profile.edge_bytes_per_item["policy", "env"] == 4 * 4 * 2 * 4  # rows, chunk, action dimensions, float32
    assert profile.edge_bytes_per_item["policy", "actor"] > profile.edge_bytes_per_item["env", "actor"] > 0
    weights = profile.weights["actor", "policy"]
    assert weights.export_s > 0
    assert weights.bytes == pytest.approx((clone(tiny()) / "model.safetensors").stat().st_size, rel=0.2)
    assert "2 blocks on a device" in profile.sources["probes"]
    done = [number for _, number, _, _ in seen]
    assert done == sorted(done)
    assert seen[-1][1] == seen[-1][2]


def test_a_profile_measures_whole_updates() -> None:
    job = EmbodiedJob(tiny("algorithm.target_kl=1e-9"))
    limits = [job.workflow("", profiled).stages["actor"].config.algorithm.target_kl for profiled in (False, True)]
    assert limits == [1e-9, None]
    stages = EmbodiedJob(two_levels("hierarchy.algorithm.target_kl=1e-9")).workflow("", profiled=True).stages
    assert [spec.config.algorithm.target_kl for name, spec in stages.items() if "actor" in name] == [None, None]


def test_profiles_are_found_again_until_something_that_matters_changes(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(tmp_path))
    key = lambda config, devices=2: profiler.fingerprint(cluster(devices), EmbodiedJob(config).planning_parts())  # noqa: E731
    path = lambda config, devices=2: profiler.cached_path("x", "t", key(config, devices))  # noqa: E731
    profiler.store_profile(path(tiny()), load_profile(profile_file(tmp_path)))
    same = tiny("run.seed=9", "run.num_iterations=7", "eval.num_episodes=9")
    assert path(same).exists()
    others = [tiny("env.num_envs=32"), tiny("policy.options.hidden_size=64"), tiny("algorithm.epochs=3")]
    assert not any(path(other).exists() for other in others)
    assert not path(tiny(), devices=3).exists()


def test_a_profile_is_measured_again_once_the_code_of_what_it_measured_has_changed(tmp_path, monkeypatch) -> None:
    source = tmp_path / "own_reward_env.py"
    source.write_text("class Env: ...")
    monkeypatch.syspath_prepend(tmp_path)
    adapted = {"_target_": "envs.foreign.env.make_env", "options": {"adapter": "own_reward_env.Env"}}
    parts = {"env": adapted, "policy": {"_target_": None}}
    key = lambda parts=parts: profiler.fingerprint(cluster(2), parts)["code"]  # noqa: E731
    before = key()
    assert (key(), key({"env": {}})) == (before, key({}))
    assert before != key({})
    source.write_text("class Env: slow = True")
    assert key() != before


# ------------------------------------------------------------------------------------------------------- the launch
def test_one_device_or_one_process_needs_no_measuring(tmp_path, capsys) -> None:
    summary = train(run(tmp_path, "cluster.num_devices=1", "run.num_iterations=1"))
    assert (summary["plan"], summary["predicted_s_per_iteration"]) == ("collocated", None)
    assert "plan collocated: there is one device, so nothing is measured" in capsys.readouterr().out
    train(run(tmp_path / "two", "run.num_iterations=1"))
    assert "one process runs one stage at a time under every plan" in capsys.readouterr().out
    assert not (tmp_path / "run/profile.json").exists()


def test_a_profile_makes_a_plan_a_prediction_and_a_table(tmp_path, capsys) -> None:
    summary = train(run(tmp_path, f"plan.profile={profile_file(tmp_path)}", "plan.replan=false"))
    assert summary["plan"] == APART
    # 4 chunk-steps whose (2 + 2) ms overlap in two shards, then 60 ms
    assert summary["predicted_s_per_iteration"] == pytest.approx(0.076, abs=0.01)
    shown = capsys.readouterr().out
    assert "plans of embodied on local, predicted:" in shown
    assert "seconds per iteration, predicted and measured (medians):" in shown
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert len(plan["ranked"]) >= 3
    assert plan["ranked"][0]["why not"] == "the best"
    assert (tmp_path / "run/profile.json").read_bytes() == profile_file(tmp_path).read_bytes()
    (period,) = json.loads((tmp_path / "run/plan_report.json").read_text())["periods"]
    assert set(period["error"]) == {"iteration", "env", "policy", "actor"}
    assert period["error"]["actor"] == pytest.approx(0.06 / period["measured_s"]["actor"] - 1, rel=1e-3)
    again = train(run(tmp_path / "again", f"plan={tmp_path / 'run/plan.json'}"))
    assert (again["plan"], again["weights_sha256"]) == (APART, summary["weights_sha256"])


def test_on_what_is_left_a_plan_stays_if_it_fits_and_is_made_again_otherwise(tmp_path) -> None:
    def moved(number: int, *overrides: str) -> list[str]:
        config = run(tmp_path, *overrides)
        planning = Planning(EmbodiedJob(config), Cluster("four", "cpu", 4, 4, 10**12))
        assert planning.move(Cluster("four", "cpu", 4, 4, 10**12), 0) is None  # none was chosen
        plan, _ = planning.choose("", SerialSession(), RunFolder(tmp_path / "run"), lambda *p: None, 0)
        left = planning.move(Cluster("left", "cpu", number, number, 10**12), 3)
        assert left is planning.plan
        assert planning.periods[-1].first_iteration == 3
        assert max(left.devices()) < number
        return [plan.name, left.name]

    assert moved(2, "plan=disaggregated") == ["disaggregated", "disaggregated"]
    assert moved(1, "plan=disaggregated") == ["disaggregated", "collocated"]
    apart, left = moved(2, f"plan.profile={profile_file(tmp_path)}")
    assert (apart.startswith("auto: "), left) == (True, APART)


def test_devices_of_a_kind_without_a_time_are_named_before_a_run(tmp_path) -> None:
    one = NodeGroup(kind="cpu", num_nodes=1, devices_per_node=1, memory_bytes=1e12, cores_per_node=1)
    groups = (one, replace(one, kind="h200"))
    config = run(tmp_path, f"plan.profile={profile_file(tmp_path)}")
    planning = Planning(EmbodiedJob(config), Cluster("two", "cpu", 2, 2, 10**12, groups=groups))
    plan, why = planning.choose("", SerialSession(), RunFolder(tmp_path / "run"), lambda *p: None, 0)
    assert plan.devices() == (0,)
    assert "no plan uses the devices of kind h200, on which this profile measured nothing" in why


# ------------------------------------------------------------------------------------------------------- staleness
def test_rollouts_that_run_ahead_do_so_until_the_end(tmp_path) -> None:
    """Rollout and actor take 60 ms each on a device, and no less on two: 120 ms fresh, 60 ms an iteration ahead."""
    stages = {
        name: {"items_per_device": [2, 4], "devices": [1], key: [[seconds]] * 2}
        for name, key, seconds in (
            ("env", "s_per_chunk_step", 0.0075), ("policy", "s_per_chunk_step", 0.0075), ("actor", "s_per_call", 0.06)
        )
    }  # fmt: skip
    profile = f"plan.profile={profile_file(tmp_path, **stages)}"

    def planned(*overrides: str, resumed: int | None = None) -> Planning:
        config = run(tmp_path, profile, *overrides)
        planning = Planning(EmbodiedJob(config), Cluster("two", "cpu", 2, 2, 10**12), resumed)
        _, told = planning.choose("", SerialSession(), RunFolder(tmp_path / "run"), lambda *p: None, 0)
        assert ("staleness" in told) is (planning.plan.staleness > 0)
        return planning

    assert planned().plan.staleness == 0
    stale = ("plan.max_staleness=2", "algorithm.tis_cap=2.0")
    assert planned(*stale, resumed=0).plan.staleness == 0  # a run keeps what it learns from
    assert planned(*stale, resumed=2).plan.staleness == 2
    planning = planned(*stale)
    assert planning.plan.staleness == 1
    assert planning.predicted_s == pytest.approx(0.06, rel=0.1)
    assert json.loads((tmp_path / "run/plan.json").read_text())["staleness"] == 1
    with pytest.raises(ConfigError, match=r"its staleness is 1, but the resumed run has 0.*new run in another"):
        planned(f"plan={tmp_path / 'run/plan.json'}", *stale, resumed=0)
    far = {"env": 0.3, "policy": 0.03, "actor": 0.06}
    told = [planning.observe(k, 0.4, far, {"env": 1, "policy": 1}, remaining=9, switch_s=0.0) for k in range(8)]
    assert told == [(None, "")] * 8  # a plan is not replaced where weights would show it
    left = planning.move(Cluster("left", "cpu", 1, 1, 10**12), 8)
    assert left is not None
    assert (left.staleness, left.devices()) == (1, (0,))


def test_the_simulators_of_evaluations_take_memory_from_plans(tmp_path) -> None:
    env = {"items_per_device": [2, 4], "devices": [1], "s_per_chunk_step": [[0.001], [0.002]], "resident_bytes": 10e9}
    config = run(tmp_path, f"plan.profile={profile_file(tmp_path, env=env)}")  # one block of episodes, on device 0

    def chosen() -> Plan:
        planning = Planning(EmbodiedJob(config), Cluster("two", "cpu", 2, 2, 30 * 10**9))
        return planning.choose("", SerialSession(), RunFolder(tmp_path / "run"), lambda *p: None, 0)[0]

    assert chosen().places()["env"].devices == (1,)
    config.eval.num_envs = config.eval.num_episodes = 8  # two blocks of episodes
    with pytest.raises(PlanError, match=r"has 5.00 GB next to evaluations, 5.00 GB short"):
        chosen()


# ----------------------------------------------------------------------------------------------------- planned again
def slower_half_way(folder: Path, slowness: int, *overrides: str) -> TrainConfig:
    """From the third iteration on a row's step costs a millisecond: 256 ms on one device, 128 on each of two.

    A rollout has 16 steps.
    """
    slow = {"slow_row_s": 0.001, "slow_from_step": 33, "number": slowness}
    options = ["env._target_=faulty_reach.make_env", *(f"env.options.{name}={value}" for name, value in slow.items())]
    told = f"plan.profile={profile_file(folder)}"
    return run(folder, told, *options, "run.num_iterations=9", "checkpoint.every=0", *overrides)


def switched(folder: Path, expected: dict, output: str) -> None:
    summary = json.loads((folder / "run/summary.json").read_text())
    periods = json.loads((folder / "run/plan_report.json").read_text())["periods"]
    assert periods[0]["plan"] == APART
    assert summary["plan"] == periods[-1]["plan"]
    plan = json.loads((folder / "run/plan.json").read_text())
    assert plan["items"][0].startswith(("env+policy on 0-1", "env on 0-1"))
    told = next(line for line in output.splitlines() if line.startswith("planned again"))
    assert "env takes" in told
    assert f"switched to {summary['plan']}" in output
    assert summary["weights_sha256"] == expected["weights_sha256"]
    assert metric_rows(folder / "run") == expected["rows"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same training under one plan, by whether episodes are carried over."""

    def made(*overrides: str) -> dict:
        folder = tmp_path_factory.mktemp("undisturbed")
        short = ["plan=collocated", "run.num_iterations=9", "checkpoint.every=0"]
        return train(run(folder, *short, *overrides)) | {"rows": metric_rows(folder / "run")}

    return made


class Clock:
    """Time in which only stages and sleeps take any: each block of a call as long as the profile says."""

    seconds = ((EnvStage, "step", 0.0005), (RolloutStage, "step", 0.0005), (PolicyLearner, "run", 0.015))

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        monkeypatch.setattr(host_module, "time", self)
        monkeypatch.setattr(faulty_reach, "time", self)
        for stage, method, seconds in self.seconds:
            monkeypatch.setattr(stage, method, self._lasting(getattr(stage, method), seconds))

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def _lasting(self, method: Callable[..., object], seconds: float) -> Callable[..., object]:
        def lasting(stage: object, step_context: StepContext, blocks: Mapping[int, object]) -> object:
            self.now += seconds * len(blocks)
            return method(stage, step_context, blocks)

        return lasting


def test_a_simulator_that_becomes_slower_gets_another_plan_and_the_weights_do_not_notice(
    tmp_path, slowness, undisturbed, capsys, monkeypatch
) -> None:
    Clock(monkeypatch)
    expected = undisturbed("env.carry_over=true")
    train(slower_half_way(tmp_path, slowness, "env.carry_over=true"))
    switched(tmp_path, expected, capsys.readouterr().out)

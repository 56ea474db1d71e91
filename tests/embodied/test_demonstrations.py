"""Demonstrations of the expert, a teacher and files: what is kept, and what is refused before anything is learned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from recordings import point_episodes, record_maniskill, write_recording
from runs import SFT, cluster, tiny
from torch import Tensor

from envs.point_reach import STEP
from rlinf_embodied.algorithms.demonstrations import Demonstrations
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.data.frame_cache import FrameCache
from rlinf_embodied.embodied.demonstrations import demonstrator, for_demonstrations
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.fine_tuning import FineTuningLearner, fine_tuning_stage
from rlinf_embodied.embodied.policy_folder import load_policy
from rlinf_embodied.embodied.sources import NUM_DATA_BLOCKS, require_actions, sources_of
from rlinf_embodied.embodied.warm_start import fine_tuning_of, starting_policy
from rlinf_embodied.errors import ConfigError, DataError, SimulatorError
from rlinf_embodied.runtime.host import StepContext, solo_context
from rlinf_embodied.runtime.session import SerialSession
from tests.observations import stacked


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Twenty solved episodes, and one whose actions lead nowhere."""
    solved = point_episodes(tiny().env, 20)
    return write_recording(tmp_path / "demos.h5", [*solved, (500, np.full((6, 2), 0.01, np.float32))])


def from_files(path: Path, *overrides: str) -> TrainConfig:
    return tiny(f"warm_start.demonstrations={path}", *overrides)


def collected(config: TrainConfig) -> tuple[FineTuningLearner, dict[str, int]]:
    """Runs all rounds of a warm start in one worker; returns the stage and the sums of its answers."""
    tuned, one = fine_tuning_of(config), cluster(1)
    folder = starting_policy(tuned, SerialSession(), one, lambda *progress: None)
    stage = FineTuningLearner(fine_tuning_stage(tuned, sources_of(tuned), str(folder)))
    stage.setup(solo_context(range(NUM_DATA_BLOCKS)))
    answers = [stage.collect(StepContext(number)) for number in range(stage.open_sources(StepContext(0)))]
    return stage, {name: sum(answer[name] for answer in answers) for name in answers[0]}


def shown(stage: FineTuningLearner) -> list[Demonstrations]:
    """Returns all demonstrations, block by block."""
    return [part for block in range(NUM_DATA_BLOCKS) for _, part in sorted(stage._found[block, False].items())]


def expert(observation_proprio: Tensor) -> Tensor:
    """What envs/point_reach.py's expert does where proprioception is (point, goal)."""
    return ((observation_proprio[:, 2:] - observation_proprio[:, :2]) / STEP).clamp(-1, 1)


# ----------------------------------------------------------------------------------------------------------- the expert
def test_labels_are_the_clean_actions_while_noisy_ones_were_executed() -> None:
    noisy = shown(collected(tiny("warm_start.noise=[0.5]"))[0])
    for part in noisy:
        assert torch.equal(part.actions[:, 0], expert(part.observation.proprio))
    # without noise, four steps of the expert lead from one observation to the next; with it they do not
    assert largest_surprise(shown(collected(tiny("warm_start.noise=[0.0]"))[0])) < 1e-5
    assert largest_surprise(noisy) > 0.02


def test_chunks_of_an_expert_start_at_every_policy_call() -> None:
    """With chunks of 4 actions of which 2 are executed they overlap: the policy is called where it saw an example."""
    overlapping = shown(collected(tiny("env.execute_steps=2", "env.chunks_per_rollout=6"))[0])
    single = shown(collected(tiny("env.chunk=2", "env.chunks_per_rollout=6"))[0])
    assert sum(map(len, overlapping)) == sum(map(len, single)) > 0
    masked = 0
    for part, pairs in zip(overlapping, single, strict=True):
        assert torch.equal(part.observation.proprio, pairs.observation.proprio)
        assert torch.equal(part.actions[:, :2], pairs.actions)
        inside = ~part.is_pad[:, 2:].any(1)
        later = pairs.actions.roll(-1, 0)
        assert torch.equal(part.actions[inside, 2:], later[inside])
        assert not part.is_pad[:, :2].any()
        masked += int((~inside).sum())
    assert masked == 32  # the last chunk of every episode, whose last two actions lie beyond its end


def largest_surprise(data: list[Demonstrations]) -> float:
    """How far any chunk ended from where its labels lead."""
    worst = 0.0
    for part in (part for part in data if len(part) > 1):
        point = part.observation.proprio[:-1, :2].clone()
        for k in range(part.actions.shape[1]):
            point = (point + part.actions[:-1, k] * STEP).clamp(-1, 1)
        worst = max(worst, float((point - part.observation.proprio[1:, :2]).abs().max()))
    return worst


def test_failed_episodes_are_dropped_and_the_others_end_with_the_chunk_that_solves_them() -> None:
    config = tiny("env.horizon=8", "warm_start.noise=[0.0]", "warm_start.num_demos=40")  # too short for long ways
    stage, counts = collected(config)
    assert 0 < counts["used"] < counts["episodes"] == 40
    for part in shown(stage):
        first = part.observation.proprio
        steps = ((first[:, 2:] - first[:, :2]).abs() / STEP).amax(1)
        assert float(steps.max()) <= 8 + 1.5  # those farther away than 8 steps and the goal's radius are not there


def test_a_block_without_any_success_is_an_error_of_the_expert() -> None:
    stage, _ = collected(tiny("env.horizon=1", "env.chunk=1", "warm_start.num_demos=4"))
    with pytest.raises(SimulatorError, match=r"episodes from expert solves PointReach-v0 here: check a task.s expert"):
        stage.prepare(StepContext(0))


def test_slow_experts_need_longer_and_their_episodes_are_whole() -> None:
    def episodes(*overrides: str) -> list[Demonstrations]:
        return shown(collected(tiny("warm_start.noise=[0.0]", *overrides))[0])

    fast, slow = episodes(), episodes("warm_start.speeds=[1.0,0.25]")
    assert len(fast) == len(slow)  # whoever is slow may take more steps than env.horizon
    unchanged = [torch.equal(one.actions, other.actions) for one, other in zip(fast, slow, strict=True)]
    assert sum(unchanged) == len(fast) / 2
    for one, other, same in zip(fast, slow, unchanged, strict=True):
        assert torch.equal(one.observation.proprio[0], other.observation.proprio[0])
        assert same or float(other.actions.abs().max()) == 0.25
    assert sum(map(len, slow)) > 1.5 * sum(map(len, fast))


def test_inputs_are_standardised_by_the_demonstrations() -> None:
    stage, _ = collected(tiny())
    proprio = torch.cat([part.observation.proprio for part in shown(stage)])
    stage.prepare(StepContext(0))
    scale = stage.shared.policy.module.get_submodule("proprio_scale")
    torch.testing.assert_close(scale.get_buffer("mean"), proprio.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scale.get_buffer("std"), proprio.std(0, correction=0), rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------- ManiSkill recordings
def test_a_recording_is_replayed_chunk_by_chunk_and_what_does_not_solve_the_task_is_left_out(recording: Path) -> None:
    config = from_files(recording)
    episodes = point_episodes(config.env, 20)
    stage, counts = collected(config)
    assert counts == {"episodes": 21, "used": 20}
    for part, (seed, actions) in zip(shown(stage), episodes, strict=True):
        assert len(part) == len(actions)  # a chunk starts at every step
        first = make_env(config.env, 1, "cpu").reset([seed])
        assert torch.equal(part.observation.proprio[:1], first.proprio)
        assert torch.equal(stacked(part.observation)[:1], stacked(first))
        for step in range(len(actions)):
            ahead, is_pad = part.actions[step].numpy(), part.is_pad[step].numpy()
            number = min(config.env.chunk, len(actions) - step)
            assert np.array_equal(ahead[:number], actions[step : step + number])
            assert (ahead[number:] == actions[-1]).all()
            assert is_pad.tolist() == [k >= number for k in range(config.env.chunk)]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"task": "PushCube-v1"}, ConfigError, "recorded with 'PushCube-v1': use that"),
        ({"bad": np.nan}, DataError, r"action 1 of step 2 of traj_3 is nan, .* finite"),
        ({"bad": 1.5}, DataError, r"action 1 of step 2 of traj_3 is 1.5, .* set policy.normalise_actions"),
        ({"number": 3}, DataError, "holds 3 episodes, .* record more"),
        ({"steps": 13}, ConfigError, r"has episodes of up to 13 env steps, .*: set env.horizon=13"),
    ],
)
def test_a_recording_that_does_not_fit_is_refused(tmp_path: Path, change, error, words) -> None:
    number = change.pop("number", 6)
    episodes = [(k, np.full((change.get("steps", 4), 2), 0.1, np.float32)) for k in range(number)]
    if "bad" in change:
        episodes[3][1][2, 1] = change["bad"]
    kind = {name: value for name, value in change.items() if name == "task"}
    with pytest.raises(error, match=rf"(?s)warm_start.demonstrations.*{words}"):
        sources_of(from_files(write_recording(tmp_path / "demos.h5", episodes, **kind)))


def test_a_recording_of_another_control_mode_is_refused(tmp_path: Path) -> None:
    kind = {"task": "PickCube-v1", "control_mode": "pd_joint_pos"}
    path = write_recording(tmp_path / "demos.h5", [(1, np.full((4, 7), 0.1, np.float32))], **kind)
    config = compose_train(["env=maniskill_pick", f"warm_start.demonstrations={path}"])
    with pytest.raises(ConfigError, match=r"env.options.control_mode is 'pd_ee_delta_pose'.*replay_traj"):
        sources_of(config)


def test_a_path_that_holds_no_demonstrations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no demonstrations")
    for name, error, words in (
        ("none.h5", ConfigError, r"data is '.*none.h5', but there is nothing: give a trajectory file"),
        ("notes.txt", DataError, r"data is '.*notes.txt', but a file is known by its ending .h5: give"),
        ("empty", DataError, r"data is '.*empty', but .*info.json cannot be read .*: give the folder"),
    ):
        with pytest.raises(error, match=words):
            sources_of(tiny(*SFT, f"data={tmp_path / name}"))


# ------------------------------------------------------------------------------------------------------ LeRobot folders
def dataset(folder: Path, config: TrainConfig, video: bool = False, **change) -> Path:
    """Writes what point_reach's expert does and sees, frame by frame."""
    from rlinf_embodied.data.lerobot import LeRobotEpisode
    from rlinf_embodied.data.lerobot_writer import write_dataset

    env = make_env(for_demonstrations(replace(config.env, chunk=1)), 1, "cpu")
    episodes = []
    for seed, actions in point_episodes(config.env, 8):
        seen = [env.reset([seed])]
        for action in actions[:-1]:
            seen.append(env.step_chunk(torch.from_numpy(action)[None, None]).observation)
        state = torch.cat([o.proprio for o in seen]).numpy()
        images = torch.cat([stacked(o) for o in seen if o.images]).numpy()
        cameras = {name: images[:, k] for k, name in enumerate(config.env.cameras)}
        fields = {"actions": actions, "state": state, "images": cameras} | {k: v(actions) for k, v in change.items()}
        episodes.append(LeRobotEpisode("move the point to the goal", **fields))
    write_dataset(folder, episodes, 20, "point", video)
    return folder


def test_a_dataset_gives_the_same_demonstrations_as_the_replay_of_its_episodes(tmp_path: Path) -> None:
    config = tiny()
    recorded = write_recording(tmp_path / "demos.h5", point_episodes(config.env, 8))
    images, replayed = (collected(from_files(path))[0] for path in (dataset(tmp_path / "set", config), recorded))
    for recorded, theirs in zip(shown(images), shown(replayed), strict=True):
        ours = recorded.rows(range(len(recorded)))
        assert torch.equal(ours.is_pad, theirs.is_pad)
        assert torch.equal(ours.actions, theirs.actions)
        assert torch.equal(stacked(ours.observation), stacked(theirs.observation))
        assert torch.equal(ours.observation.proprio, theirs.observation.proprio)
        assert ours.observation.instruction == theirs.observation.instruction
        assert ours.object_positions is None


def test_a_dataset_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "set", tiny())
    for overrides, words in (
        (["env.cameras=[base_camera,wrist]"], r"env.cameras is .* images of base_camera: name cameras"),
        (["env.cameras=[]"], r"env.cameras is \[\], but"),
        (["env.obs_size=32"], r"env.obs_size is 32, .* is 16 x 16: set env.obs_size=16"),
    ):
        with pytest.raises(ConfigError, match=words):
            sources_of(from_files(folder, *overrides))
    with pytest.raises(ConfigError, match=r"env.instruction is 'go', .* set env.instruction='move the point"):
        collected(from_files(folder, "env.instruction=go"))
    nan = dataset(tmp_path / "nan", tiny(), actions=lambda a: np.full_like(a, np.nan))
    with pytest.raises(DataError, match=r"action 0 of step 0 of episode 0 is nan"):
        collected(from_files(nan))
    with pytest.raises(DataError, match=r"action 0 of step 0 of it is 3.0, and those of a policy lie in \[-1, 1\]"):
        require_actions("data is 'x'", "it", np.array([[3.0], [np.nan]]), bounded=True)
    for name, change, words in (
        ("wide", {"actions": lambda a: np.zeros((len(a), 3), np.float32)}, "whose action have 3 dimensions, .* have 2"),
        ("state", {"state": lambda a: np.zeros((len(a), 5), np.float32)}, "observation.state have 5 dimensions, .* 4"),
    ):
        with pytest.raises(DataError, match=words):
            collected(from_files(dataset(tmp_path / name, tiny(), **change)))


@pytest.mark.parametrize("policy", ["tiny_vla", "flow_vla"])
def test_actions_and_states_in_degrees_are_learned_and_chosen(tmp_path: Path, policy: str) -> None:
    degrees = {"actions": lambda a: a * 90, "state": lambda a: np.linspace(-180, 180, 4 * len(a)).reshape(-1, 4)}
    folder = dataset(tmp_path / "set", tiny(), **degrees)
    with pytest.raises(DataError, match=r"is -?\d+.*lie in \[-1, 1\]: .* set policy.normalise_actions=min_max"):
        collected(from_files(folder))
    settings = [f"policy={policy}", "policy.normalise_actions=min_max", "policy.normalise_state=quantiles"]
    config = from_files(folder, "policy.critic=observation", "warm_start.epochs=8", *settings)
    stage, _ = collected(config)
    stage.prepare(StepContext(0))
    losses = [stage.run(StepContext(epoch), {}).report["losses/imitation_loss"] for epoch in range(8)]
    assert losses[-1] < losses[0]
    stage.save_policy(StepContext(0), str(tmp_path / "saved"))
    again = load_policy(config.policy, str(tmp_path / "saved"), "cpu").policy
    part = stage._data[0].rows([0, 1, 2])
    for made in (stage.shared.policy, again):
        chosen = made.act(made.encode(part.observation), None, 1.0).actions
        assert 5 < chosen.abs().max() <= 200
    assert torch.equal(
        made.encode(part.observation)["proprio"], stage.shared.policy.encode(part.observation)["proprio"]
    )
    written = json.loads((tmp_path / "saved/policy_postprocessor.json").read_text())["steps"][0]
    assert (written["registry_name"], written["config"]["norm_map"]["ACTION"]) == ("unnormalizer_processor", "MIN_MAX")
    recorded = from_files(write_recording(tmp_path / "demos.h5", point_episodes(config.env, 8)), *settings[1:])
    with pytest.raises(ConfigError, match=r"policy.normalise_state is 'quantiles', but the data has no observ"):
        starting_policy(recorded, SerialSession(), cluster(1), lambda *progress: None)


# ------------------------------------------------------------------------------------------------------------ ManiSkill
@pytest.mark.slow
@pytest.mark.sim
def test_a_recording_of_stock_maniskill_replays_in_the_batched_simulator_with_our_cameras(tmp_path: Path) -> None:
    path = record_maniskill(tmp_path / "pick.h5", "PickCube-v1", range(5))
    pick = ["env=maniskill_pick", "env.chunk=5", "env.horizon=50", "env.chunks_per_rollout=10", "env.obs_size=16"]
    config = from_files(path, *pick)
    env = make_env(replace(for_demonstrations(config.env), chunk=1), 5, "cpu")
    spec = replace(env.spec, chunk=config.env.chunk)
    found = demonstrator(sources_of(config)[0], env, spec, config.warm_start, 0, FrameCache(0))(range(5))
    env.close()
    for part in found:
        assert part is not None
        assert stacked(part.observation).shape[1:] == (2, 16, 16, 3)
        assert stacked(part.observation).float().std() > 5  # something is seen

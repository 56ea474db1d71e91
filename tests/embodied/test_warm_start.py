"""Demonstrations and cloning: what is kept, what is learned, and when the work is not done again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import clone, cluster, tiny
from torch import Tensor

from envs.point_reach import STEP
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.warm_start import cache_folder, warm_start
from rlinf_embodied.embodied.warm_start_stage import (
    NUM_DATA_BLOCKS,
    Demonstrations,
    WarmStartStage,
    WarmStartStageConfig,
)
from rlinf_embodied.errors import ConfigError, SimulatorError
from rlinf_embodied.runtime.host import StepContext, solo_context
from rlinf_embodied.runtime.session import SerialSession


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path):
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


def stage_config(config: TrainConfig) -> WarmStartStageConfig:
    return WarmStartStageConfig((config.env,), config.policy, config.warm_start, config.run.seed)


def collected(config: WarmStartStageConfig) -> tuple[WarmStartStage, dict[int, list[Demonstrations]]]:
    """Runs all rounds of demonstrations in one worker."""
    stage = WarmStartStage(config)
    rounds = stage.setup(solo_context(range(NUM_DATA_BLOCKS)))
    attempts = sum(stage.collect(StepContext(number))["episodes"] for number in range(rounds))
    assert attempts == config.warm_start.num_demos
    return stage, stage._data


def expert(observation_proprio: Tensor) -> Tensor:
    """What envs/point_reach.py's expert does where proprioception is (point, goal)."""
    return ((observation_proprio[:, 2:] - observation_proprio[:, :2]) / STEP).clamp(-1, 1)


# ------------------------------------------------------------------------------------------------------------- clones
@pytest.mark.slow
def test_the_clone_has_the_same_bytes_for_every_number_of_workers(fresh_cache) -> None:
    config = tiny()
    expected = files(clone(config))
    assert {"config.json", "model.safetensors", "dataset_statistics.json", "evaluation.json"} <= set(expected)
    for devices in (2, 3, 4):
        fresh_cache()
        assert files(clone(config, devices=devices)) == expected
    fresh_cache()
    other = files(clone(tiny("run.seed=4")))
    assert other["model.safetensors"] != expected["model.safetensors"]


def test_a_cached_clone_starts_no_worker() -> None:
    class NoWorkers(SerialSession):
        def start(self, workers) -> None:
            raise AssertionError("a worker was started")

    folder = clone(tiny())
    assert clone(tiny(), session=NoWorkers()) == folder
    with pytest.raises(AssertionError, match="a worker was started"):
        clone(tiny("warm_start.num_demos=8"), session=NoWorkers())


def test_the_cache_knows_what_a_clone_is_a_function_of(fresh_cache) -> None:
    def where(*overrides: str) -> Path:
        return cache_folder(stage_config(tiny(*overrides)), "cpu")

    same = [
        "policy.temperature=1.0",
        "env.num_envs=8",
        "env.hold_steps=0",
        "env.reward=sparse",
        "env.success_bonus=0",
        "run.exact=false",
    ]
    other = [
        "run.seed=4",
        "env.obs_size=32",
        "warm_start.lr=1",
        "warm_start.noise=[0]",
        "policy.options.num_bins=5",
        "env.chunk=3",
    ]
    assert {where(override) for override in same} == {where()}
    assert len({where(), *(where(override) for override in other)}) == 1 + len(other)


@pytest.mark.parametrize("key", ["env._target_", "env.options.adapter", "policy._target_"])
def test_a_clone_is_trained_again_once_custom_code_has_changed(fresh_cache, tmp_path, monkeypatch, key) -> None:
    source = tmp_path / "own_code_of_a_clone.py"
    monkeypatch.syspath_prepend(tmp_path)
    folders = set()
    for content in ("class Mine: ...", "class Mine: slow = True"):
        source.write_text(content)
        folders.add(cache_folder(stage_config(tiny(f"{key}=own_code_of_a_clone.Mine")), "cpu"))
    assert len(folders) == 2


def test_what_stops_on_the_way_leaves_nothing_in_the_cache(fresh_cache, monkeypatch) -> None:
    for method in ("fit", "save"):
        root = fresh_cache()

        def stop(self, step_context, folder):
            if isinstance(folder, str):  # not the epochs
                Path(folder).mkdir(parents=True)
                (Path(folder) / "config.json").write_text("{")
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(WarmStartStage, method, stop)
            with pytest.raises(KeyboardInterrupt):
                clone(tiny("warm_start.num_demos=4", "warm_start.head_epochs=0"))
        assert [path for path in root.rglob("*") if path.is_file()] == []
    assert (clone(tiny("warm_start.num_demos=4", "warm_start.head_epochs=0")) / "config.json").exists()


def test_a_clone_that_is_made_leaves_no_stages_in_the_workers(fresh_cache) -> None:
    session = SerialSession()
    warm_start(stage_config(tiny("warm_start.num_demos=4")), session, cluster(2), lambda *_: None)
    assert [host.stages for host in session._hosts.values()] == [{}, {}]


def test_progress_counts_every_demonstration_and_epoch(fresh_cache) -> None:
    seen: list[tuple[str, int, int]] = []
    config = stage_config(tiny("warm_start.num_demos=18", "warm_start.epochs=2", "warm_start.head_epochs=3"))
    warm_start(config, SerialSession(), cluster(1), lambda what, done, total, remark: seen.append((what, done, total)))
    assert [item for item in seen if item[0] == "demonstrations"] == [("demonstrations", n, 18) for n in (16, 18)]
    assert seen[2:] == [("cloning", n, 2) for n in (1, 2)] + [("cloning the head", n, 3) for n in (1, 2, 3)]


# ----------------------------------------------------------------------------------------------------- demonstrations
def test_labels_are_the_clean_actions_while_noisy_ones_were_executed() -> None:
    config = tiny("warm_start.noise=[0.5]")
    _, noisy = collected(stage_config(config))
    for parts in noisy.values():
        for part in parts:
            assert torch.equal(part.actions[:, 0], expert(part.observation.proprio))
    # without noise, four steps of the expert lead from one observation to the next; with it they do not
    _, clean = collected(stage_config(tiny("warm_start.noise=[0.0]")))
    assert largest_surprise(clean) < 1e-5
    assert largest_surprise(noisy) > 0.02


def largest_surprise(data: dict[int, list[Demonstrations]]) -> float:
    """How far any chunk ended from where its labels lead."""
    worst = 0.0
    for part in (part for parts in data.values() for part in parts if len(part) > 1):
        point = part.observation.proprio[:-1, :2].clone()
        for k in range(part.actions.shape[1]):
            point = (point + part.actions[:-1, k] * STEP).clamp(-1, 1)
        worst = max(worst, float((point - part.observation.proprio[1:, :2]).abs().max()))
    return worst


def test_the_largest_noise_only_disturbs_the_beginning() -> None:
    stage = WarmStartStage(stage_config(tiny("warm_start.noise=[0.1,0.3]", "warm_start.noise_steps=5")))
    like = torch.zeros(1)
    assert stage._noise_levels([0, 1, 2, 3], 4, like)[:, 0].tolist() == pytest.approx([0.1, 0.3, 0.1, 0.3])
    assert stage._noise_levels([0, 1, 2, 3], 5, like)[:, 0].tolist() == pytest.approx([0.1, 0.0, 0.1, 0.0])


def test_failed_episodes_are_dropped_and_the_others_end_with_the_chunk_that_solves_them() -> None:
    config = tiny("env.horizon=8", "warm_start.noise=[0.0]", "warm_start.num_demos=40")  # too short for long ways
    stage, _ = collected(stage_config(config))
    counts = stage.prepare(StepContext(0))
    assert 0 < counts["successes"] < counts["attempts"] == 40
    for block in stage._blocks_data.values():
        first = block.observation.proprio
        steps = ((first[:, 2:] - first[:, :2]).abs() / STEP).amax(1)
        assert float(steps.max()) <= 8 + 1.5  # those farther away than 8 steps and the goal's radius are not there


def test_a_block_without_any_success_is_an_error_of_the_expert() -> None:
    config = tiny("env.horizon=1", "env.chunk=1", "warm_start.num_demos=4")
    stage, _ = collected(stage_config(config))
    with pytest.raises(SimulatorError, match=r"expert of PointReach-v0 solved none .* or give warm_start.checkpoint"):
        stage.prepare(StepContext(0))


@pytest.mark.parametrize("number", [4, 5, 6, 9, 32, 41])
def test_every_demonstration_is_in_one_block_and_blocks_are_alike(number: int) -> None:
    config = stage_config(tiny(f"warm_start.num_demos={number}"))
    blocks = [list(config.demonstrations(block)) for block in range(NUM_DATA_BLOCKS)]
    assert [n for block in blocks for n in block] == list(range(number))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


def test_fewer_demonstrations_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"warm_start.num_demos is 3, .* at least one: use 480"):
        tiny("warm_start.num_demos=3")


def test_demonstrations_of_a_region_begin_there_and_those_that_did_before_are_the_same() -> None:
    def starts(*overrides: str) -> list[list[float]]:
        _, data = collected(stage_config(tiny("warm_start.noise=[0.0]", *overrides)))
        return [part.object_positions[0].tolist() for parts in data.values() for part in parts]

    everywhere, corner = starts(), starts("warm_start.region=[0.0,1.0,-1.0,0.2]")
    inside = [x >= 0.0 and y <= 0.2 for x, y, _ in everywhere]
    assert 0 < sum(inside) < len(everywhere)
    assert len(corner) == len(everywhere)
    assert all(x >= 0.0 and y <= 0.2 for x, y, _ in corner)
    assert [place for place, holds in zip(everywhere, inside, strict=True) if holds] == [
        place for place, holds in zip(corner, inside, strict=True) if holds
    ]


def test_a_region_where_nothing_begins_or_that_is_none_is_refused() -> None:
    with pytest.raises(
        SimulatorError, match=r"warm_start.region is \[3.0, 4.0, 0.0, 1.0\], but .* use a larger region"
    ):
        collected(stage_config(tiny("warm_start.region=[3.0,4.0,0.0,1.0]")))
    with pytest.raises(ConfigError, match=r"warm_start.region is \[1.0, 0.0, 0.0, 1.0\], but it is a rectangle"):
        tiny("warm_start.region=[1.0,0.0,0.0,1.0]")


def test_several_envs_share_the_demonstrations_and_none_is_forgotten() -> None:
    config = tiny("warm_start.num_demos=50", "warm_start.noise=[0.0]")
    envs = tuple(replace(config.env, instruction=f"do {word}") for word in ("this", "that", "these"))
    stage = stage_config(config)
    _, data = collected(replace(stage, envs=envs))
    told = [part.observation.instruction[0] for parts in data.values() for part in parts]
    assert {text: told.count(text) for text in set(told)} == {"do this": 17, "do that": 17, "do these": 16}


def test_inputs_are_standardised_by_the_demonstrations() -> None:
    stage, data = collected(stage_config(tiny()))
    proprio = torch.cat([part.observation.proprio for parts in data.values() for part in parts])
    stage.prepare(StepContext(0))
    scale = stage._policy.module.get_submodule("proprio_scale")
    torch.testing.assert_close(scale.get_buffer("mean"), proprio.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scale.get_buffer("std"), proprio.std(0, correction=0), rtol=1e-3, atol=1e-4)


def test_cloning_lowers_the_loss_in_both_phases() -> None:
    stage, _ = collected(stage_config(tiny()))
    stage.prepare(StepContext(0))
    for whole, epochs in ((True, 4), (False, 4)):
        assert stage.begin_phase(StepContext(0), whole) >= 1
        losses = [stage.fit(StepContext(epoch), (epoch, epoch + 1)) for epoch in range(epochs)]
        assert losses[-1] < losses[0]

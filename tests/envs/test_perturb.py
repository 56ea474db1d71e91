"""env.perturb changes what it names and nothing else, for every episode by its own seed, and never demonstrations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from runs import tiny

from envs.point_reach import make_env as make_point
from rlinf_embodied.config import EnvConfig, PerturbConfig
from rlinf_embodied.embodied.demonstrations import for_demonstrations
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.warm_start import clone_folder
from rlinf_embodied.errors import ConfigError

POINT = EnvConfig(
    _target_="envs.point_reach.make_env", num_envs=4, block_size=4, chunk=3, horizon=6, hold_steps=0, obs_size=8
)
ACTIONS = torch.linspace(-0.6, 0.9, 4 * 3 * 2).view(4, 3, 2)


def executed(how: PerturbConfig, rows: int = 4, seeds: tuple[int, ...] = (1, 2, 3, 4)) -> torch.Tensor:
    """Returns the actions [N, 3, 2] that a simulator gets of the first rows of ACTIONS."""
    env, seen = make_point(replace(POINT, perturb=how), rows), []
    env.reset(seeds[:rows])
    step = env.simulator.step
    env.simulator.step = lambda actions, rows: (seen.append(actions.clone()), step(actions, rows))
    env.step_chunk(ACTIONS[:rows])
    return torch.stack(seen, 1)


def test_actions_come_late_and_with_noise_that_depends_on_the_episode_alone() -> None:
    assert torch.equal(executed(PerturbConfig()), ACTIONS)
    late = executed(PerturbConfig(delay=1))
    assert torch.equal(late[:, 1:], ACTIONS[:, :2])
    assert not late[:, 0].any()
    noise = executed(PerturbConfig(noise=0.1)) - ACTIONS
    assert 0.05 < noise.std() < 0.15
    assert torch.equal(executed(PerturbConfig(noise=0.1), rows=2), (ACTIONS + noise)[:2])


def shown(how: PerturbConfig, chunk: int, rows: int = 4) -> list[torch.Tensor]:
    """Returns proprioception and images [N, P + 192] of the first five env steps, those that a policy sees."""
    env = make_point(replace(POINT, chunk=chunk, perturb=how), rows)
    seen, actions = [env.reset((1, 2, 3, 4)[:rows])], ACTIONS.repeat(1, 2, 1)[:rows]
    seen += [env.step_chunk(actions[:, k : k + chunk]).observation for k in range(0, 5 - chunk + 1, chunk)]
    return [torch.cat([now.proprio, now.images["base_camera"].flatten(1) / 255], 1) for now in seen]


def test_observations_come_late() -> None:
    steps = shown(PerturbConfig(), 1)
    for late in (1, 2):
        how = PerturbConfig(observation_delay=late)
        assert all(torch.equal(now, steps[max(0, k - late)]) for k, now in enumerate(shown(how, 1)))
        assert torch.equal(
            shown(how, 3)[1], steps[3 - late]
        )  # of the steps of a chunk, those that are seen are rendered
    how = PerturbConfig(observation_delay=1, observation_jitter=1)
    drawn, ages = shown(how, 1), set()
    for k, now in enumerate(drawn[2:], 2):
        ages |= {(k - 1 if torch.equal(now[row], steps[k - 1][row]) else k - 2) - k for row in range(4)}
        assert all(
            torch.equal(now[row], steps[k - 1][row]) or torch.equal(now[row], steps[k - 2][row]) for row in range(4)
        )
    assert ages == {-1, -2}
    assert all(torch.equal(two, four[:2]) for two, four in zip(shown(how, 1, rows=2), drawn, strict=True))


def test_initial_steps_and_paraphrases_are_functions_of_the_seed_and_runs_can_be_restored() -> None:
    late = {"delay": 1, "observation_delay": 2, "observation_jitter": 1}
    env = make_point(replace(POINT, perturb=PerturbConfig(initial_steps=3, instruction=True, noise=0.1, **late)), 4)
    seen = env.reset([5, 6, 7, 5])
    assert torch.equal(seen.proprio[0], seen.proprio[3])
    plain = make_point(POINT, 4).reset([5, 6, 7, 5])
    assert (seen.proprio != plain.proprio).any(1).all()
    assert all(old in new != old for old, new in zip(plain.instruction, seen.instruction, strict=True))
    after = env.step_chunk(ACTIONS).observation
    other = make_point(replace(POINT, perturb=env._config.perturb), 4)
    again = other.restore(env.running())
    assert torch.equal(again.proprio, after.proprio)
    assert torch.equal(again.images["base_camera"], after.images["base_camera"])


def test_demonstrations_know_nothing_of_it_nor_does_the_name_of_a_cached_clone() -> None:
    assert not for_demonstrations(replace(POINT, perturb=PerturbConfig(noise=1.0))).perturb.axes
    assert clone_folder(tiny("env.perturb.noise=0.1"), "cpu") == clone_folder(tiny(), "cpu")


def test_what_an_env_cannot_perturb_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env.perturb.camera is 0.1, but .* can perturb instruction, delay, noise"):
        make_env(replace(POINT, perturb=PerturbConfig(camera=0.1)), 1, "cpu")
    with pytest.raises(ConfigError, match=r"env.perturb.light is 0.5, but it changes images only"):
        replace(POINT, cameras=[], perturb=PerturbConfig(light=0.5))


@pytest.mark.sim
@pytest.mark.parametrize("backend", ["batched", "stock"])
def test_images_show_it_and_states_do_not(backend: str) -> None:
    from envs.maniskill import make_env as make_maniskill

    def seen(how: PerturbConfig) -> tuple[torch.Tensor, torch.Tensor]:
        config = EnvConfig(num_envs=1, block_size=1, obs_size=32, options={"backend": backend}, perturb=how)
        env = make_maniskill(config, 1)
        env.reset([1])  # scenes are recreated
        now = env.reset([9000])
        env.close()
        return now.images["base_camera"].float(), now.proprio

    hows = ({"camera": 0.05}, {"camera": 0.05, "seed": 1}, {"camera_turn": 5.0}, {"light": 0.5}, {"texture": True})
    images, states = zip(*(seen(PerturbConfig(**how)) for how in ({}, *hows, {})), strict=True)
    assert all(torch.equal(state, states[0]) for state in states)
    assert torch.equal(images[0], images[-1])  # nothing of it stays in the process
    assert all((a - b).abs().mean() > 2 for k, a in enumerate(images[:-1]) for b in images[:k])

"""pi0, pi0.5 and SmolVLA as policies: small folders act, are fine-tuned and trained, restored and refused by name."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from runs import SFT, tiny_overrides, train, weights_of
from safetensors.torch import load_file, save_file

from experiments.examples.small_pi import Options, write_small
from policies.flow import Flow
from policies.pi.config import Family
from policies.pi.policy import PiPolicy
from policies.pi.processors import RelativeActions
from rlinf_embodied.compose import compose, compose_evaluate, compose_train
from rlinf_embodied.config import Critic, EnvConfig, PolicyConfig, TrainConfig
from rlinf_embodied.data.lerobot import LeRobotDataset
from rlinf_embodied.embodied.evaluate import evaluate_command
from rlinf_embodied.embodied.sources import DemonstrationSource, Kind, statistics_of
from rlinf_embodied.embodied.warm_start import NewPolicyConfig, NewPolicyStage
from rlinf_embodied.errors import CheckpointError, ConfigError, DataError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.learning.checkpoint import weights_sha256
from tests.observations import env_spec, observed
from tests.policy_contract import require_contract

pytestmark = pytest.mark.usefixtures("no_group_stays")

FAMILIES = [family.value for family in Family]
ROWS, CHUNK, ACTION = 3, 4, 2
ENV = env_spec("PointReach-v0", ROWS, CHUNK, 12, ACTION, 4, 9, 16, ("base_camera",))
TASKS = ("pick up the cube", "move", "pick up the red cube")


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Callable[[str], Path]:
    """Returns the folder of a family, for a robot of two dimensions."""
    place = tmp_path_factory.mktemp("published")

    def folder(family: str) -> Path:
        out = place / family
        sizes = Options(family=family, out=str(out), action_dim=ACTION, proprio_dim=4, chunk=CHUNK, hidden_size=16)
        return out if out.exists() else write_small(sizes)

    return folder


def policy_of(folder: Path, critic: Critic = Critic.privileged, env: EnvSpec = ENV, **options: object) -> PiPolicy:
    target = f"{PiPolicy.__module__}.PiPolicy"
    return PiPolicy.from_folder(folder, env, PolicyConfig(_target_=target, name="pi", critic=critic, options=options))


def drawn(policy: PiPolicy, seed: int = 0) -> torch.Tensor:
    """What fine-tuning draws."""
    assert policy.imitation_noise is not None
    return policy.imitation_noise.draw(seed, "test", range(ROWS))


def seen() -> Observation:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (ROWS, 1, 20, 28, 3), generator=draw, dtype=torch.uint8)
    state = torch.rand(ROWS, 4, generator=draw) * 2 - 1
    return observed(state, TASKS, images, torch.randn(ROWS, 9, generator=draw))


# ----------------------------------------------------------------------------------------------------------- the policy
@pytest.mark.parametrize(
    "options",
    [{}, {"stochastic_steps": "all", "expert_only": False}, {"noise": "flow_noise"}],
    ids=["one", "all", "noise"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_training_asks_of_a_policy(published, family: str, options: dict) -> None:
    for critic in Critic:
        policy = policy_of(published(family), critic, **options)
        require_contract(policy, policy.config, ENV, seen())


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_integrates_from_noise_and_what_is_cached_changes_nothing(published, family: str) -> None:
    policy, plain = policy_of(published(family)), policy_of(published(family), cache_prefix=False)
    assert policy.spec.greedy_noise is not None
    noise = policy.spec.greedy_noise.draw(0, "evaluate", range(ROWS))
    features = policy.encode(seen())
    actions = policy.act(features, noise, 0.0).actions
    torch.testing.assert_close(plain.act(plain.encode(seen()), noise, 0.0).actions, actions, atol=1e-5, rtol=0)
    prefix, x, steps = policy._prefix(features), noise[:, 0], policy.flow.steps
    for k in range(steps):  # time runs from noise (1) to actions (0) in the network
        x = x - policy.module.model.velocity(prefix, x, torch.full((ROWS,), 1 - k / steps)) / steps
    expected = policy.checkpoint.processors.robot_actions(x[..., :ACTION], features["proprio"])
    torch.testing.assert_close(actions, expected.clamp(-1, 1), atol=1e-5, rtol=0)
    dark = {"base_camera": torch.zeros_like(seen().images["base_camera"])}
    other = policy.act(policy.encode(replace(seen(), images=dark)), noise, 0.0)
    assert (other.actions - actions).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_its_imitation_loss_is_the_mean_over_real_dimensions_and_steps_of_the_episode(published, family: str) -> None:
    policy = policy_of(published(family))
    features, actions = policy.encode(seen()), torch.rand(ROWS, CHUNK, ACTION) - 0.5
    given = drawn(policy)
    is_pad = torch.arange(CHUNK) >= torch.tensor([[4], [2], [3]])
    noise = given[:, :-1].view(ROWS, CHUNK, 32)
    time = 0.001 + 0.999 * (0.5 * (1 + torch.erf(given[:, -1] / math.sqrt(2)))) ** (2 / 3)  # Beta(1.5, 1)
    wanted = torch.zeros(ROWS, CHUNK, 32)
    wanted[..., :ACTION] = policy.checkpoint.processors.normalised_actions(actions, features["proprio"])
    x = time[:, None, None] * noise + (1 - time)[:, None, None] * wanted
    v = policy.module.model.velocity(policy._prefix(features), x, time)
    squares = (v - (noise - wanted))[..., :ACTION].square()
    kept = ~is_pad if family == "smolvla" else torch.ones_like(is_pad)
    expected = ROWS * squares[kept].mean()
    found = policy.imitation_loss(features, actions, {"noise": given, "action_is_pad": is_pad})
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"expert_only": False, "freeze_vision": False}, {"lora": {"rank": 2}}])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_gets_a_gradient_and_nothing_else(published, family: str, options: dict) -> None:
    policy = policy_of(published(family), **options)
    noise = drawn(policy)
    policy.imitation_loss(policy.encode(seen()), torch.zeros(ROWS, CHUNK, ACTION), {"noise": noise}).backward()
    named = {name: parameter for name, parameter in policy.module.named_parameters() if parameter.grad is not None}
    assert {id(parameter) for parameter in named.values()} == {id(p) for p in policy.policy_parameters()}
    whole = not options.get("expert_only", True)
    assert any(".vision_" in name for name in named) is whole
    assert any(".language_model." in name or ".text_model." in name for name in named) is whole


# ------------------------------------------------------------------------------------------------------------ log-probs
def test_the_log_prob_of_one_stochastic_step_is_the_density_of_where_it_leads() -> None:
    flow = Flow(chunk=1, action_dim=1, steps=4, one_step=True)
    field = lambda x, time: (torch.sin(2 * x) + time[:, None, None], None)  # noqa: E731
    rows, level, start = 40_000, 0.8, 0.3
    noise = flow.spec("flow").noise.draw(0, "test", range(rows))
    noise[:, 0] = start
    noise[:, -1] = 0.1  # the third step, by a uniform of 0.54
    at_once = torch.zeros(rows, dtype=torch.long)
    output = flow.act(field, noise, level, at_once)
    before, after = output.record["chain"][:, 0, 0, 0], output.record["chain"][:, 1, 0, 0]
    assert set(output.record["step"].tolist()) == {2}
    assert before.std() < 1e-6  # up to there the chain is the solution of an ordinary equation
    grid = torch.linspace(-3, 5, 4001)
    scored = {"step": torch.full((4001,), 2), "chain": torch.stack([before[:1].expand(4001), grid], 1)[..., None, None]}
    density = flow.evaluate(field, scored, level, at_once[:4001]).log_probs[:, 0, 0].exp()
    assert float(torch.trapezoid(density, grid)) == pytest.approx(1.0, abs=1e-4)
    inside = (grid > 0.5) & (grid < 0.9)
    share = ((after > 0.5) & (after < 0.9)).float().mean()
    assert float(torch.trapezoid(density[inside], grid[inside])) == pytest.approx(float(share), abs=0.01)
    assert torch.allclose(flow.evaluate(field, output.record, level, at_once).log_probs, output.log_probs, atol=1e-4)


@pytest.mark.parametrize("late", [0, 1])
def test_what_is_not_executed_follows_the_ordinary_equation_and_is_not_scored(late: int) -> None:
    flow = Flow(chunk=3, action_dim=2, steps=5, width=4, executed=2)
    field = lambda x, time: (x.flip(2) - x.mean((1, 2), keepdim=True), None)  # noqa: E731
    noise = flow.spec("flow").noise.draw(0, "test", range(ROWS))
    output = flow.act(field, noise, 0.7, torch.full((ROWS,), late))
    chain = output.record["chain"]
    for k in range(5):
        straight = chain[:, k] + field(chain[:, k], torch.zeros(ROWS))[0] / 5
        torch.testing.assert_close(chain[:, k + 1, :, 2:], straight[..., 2:])
        idle = 0 if late else 2  # of actions 0, 1 and 2
        torch.testing.assert_close(chain[:, k + 1, idle], straight[:, idle])
    acts = noise[:, 1, late : late + 2, :2]
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(acts).sum(-1) - 2 * math.log(0.7 / 5**0.5)
    torch.testing.assert_close(output.log_probs[:, :2, 0], expected, atol=1e-4, rtol=0)
    assert torch.equal(output.log_probs[:, 2], torch.zeros(ROWS, 5))


# ------------------------------------------------------------------------------------------------------------- training
def run(family: str, folder: Path, out: Path, *overrides: str) -> TrainConfig:
    own = [f"policy={family}", "policy.options.critic_hidden_size=8", f"run.dir={out}", f"env.chunk={CHUNK}"]
    start = [f"warm_start.checkpoint={folder}", "warm_start.num_demos=8", "eval.num_episodes=2", "eval.num_envs=2"]
    return compose_train(tiny_overrides(*own, *start, *overrides))


@pytest.mark.parametrize("family", ["pi0", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])])
def test_a_folder_is_fine_tuned_then_trained_and_continues(published, tmp_path, family: str) -> None:
    clone, whole, parts = tmp_path / "clone", tmp_path / "whole", tmp_path / "parts"
    short = [*SFT, "algorithm.head_epochs=0", "run.num_iterations=1", "algorithm.batch_size=8"]
    first = train(run(family, published(family), clone, *short))
    start = clone / "checkpoints/latest"
    assert weights_sha256(PiPolicy.from_folder(start).module.state_dict()) == first["weights_sha256"]
    rl = ["run.num_iterations=2", "algorithm.critic_warmup_iterations=0", "algorithm.ratio_tolerance=1e-3"]
    straight = train(run(family, start, whole, *rl))
    assert straight["weights_sha256"] != first["weights_sha256"]
    train(run(family, start, parts, *rl, "run.num_iterations=1"))
    assert train(run(family, start, parts, *rl, "resume=auto"))["weights_sha256"] == weights_of(whole)
    again = [
        f"checkpoint={whole}/checkpoints/latest",
        "eval.num_episodes=2",
        "eval.num_envs=2",
        "cluster=serial",
        "run.seed=3",
    ]
    found = evaluate_command(compose_evaluate([*again, "eval.record_video=false", f"run.dir={tmp_path}/evaluation"]))
    assert found["success_once"] == straight["after"]["success_once"]


@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 2}, "noise": "flow_noise"}], ids=["weights", "adapters"])
def test_what_is_saved_is_restored(published, tmp_path, options: dict) -> None:
    policy = policy_of(published("pi05"), **options)
    with torch.no_grad():
        for parameter in policy.policy_parameters():
            parameter.add_(0.01)
    source = published("pi05")
    files = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}
    policy.save(tmp_path)
    assert {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()} == files
    again = PiPolicy.from_folder(tmp_path)
    before, after = policy.module.state_dict(), again.module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert policy.spec.greedy_noise is not None
    noise = policy.spec.greedy_noise.draw(0, "evaluate", range(ROWS))
    left, right = (each.act(each.encode(seen()), noise, 0.0).actions for each in (policy, again))
    assert torch.equal(left, right)


# --------------------------------------------------------------------------------------------------------------- errors
def changed(folder: Path, out: Path, edit: Callable[[dict], None]) -> Path:
    """A copy of a folder whose weights were edited."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    edit(tensors)
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.state_proj.bias"), r"1 missing, first state_proj.bias"),
        (lambda t: t.update({"model.more": torch.zeros(1)}), r"1 unknown, first more"),
        (lambda t: t.update({"model.state_proj.bias": torch.zeros(3)}), r"state_proj.bias \[3\] instead of \[8\]"),
        (lambda t: t["model.state_proj.bias"].fill_(math.nan), r"values of model.state_proj.bias are NaN"),
    ],
)
def test_weights_that_do_not_fit_are_refused(published, tmp_path, edit, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        policy_of(changed(published("pi0"), tmp_path / "changed", edit))


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_other_versions_are_read(published, tmp_path, family: str) -> None:
    def edit(tensors: dict) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
            if "embed_tokens" not in name or family == "smolvla":
                tensors[name.replace("time_mlp", "action_time_mlp") if family == "pi05" else name] = tensor
            if "embed_tokens" in name and family != "smolvla":
                kept[name] = tensor
        more = {"pi05": "state_proj.weight", "smolvla": "normalize_inputs.buffer_observation_state.mean"}
        if family in more:
            tensors[more[family]] = torch.zeros(3)
        if kept:
            tensors["paligemma_with_expert.paligemma.lm_head.weight"] = next(iter(kept.values()))

    kept: dict[str, torch.Tensor] = {}
    here = policy_of(published(family)).module.model.state_dict()
    there = policy_of(changed(published(family), tmp_path / "changed", edit)).module.model.state_dict()
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here if "lm_head" not in name)


def test_the_first_commands_of_the_page_run_one_after_the_other(tmp_path, monkeypatch) -> None:
    block = (REPOSITORY / "docs/pi.md").read_text().split("```sh\n")[1].split("```")[0]
    commands = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    monkeypatch.chdir(tmp_path)
    small = ["cluster=serial", "env.num_envs=4", "env.block_size=4", "env.horizon=10", "env.chunks_per_rollout=2"]
    evaluation = ["eval.num_episodes=2", "eval.num_envs=2", "eval.record_video=false"]
    small += [*evaluation, "warm_start.num_demos=4"]
    shorter = {"algorithm=sft": ["algorithm.epochs=1"], "algorithm=ppo_finetune": ["run.num_iterations=1"]}
    for script, *words in commands:
        if script == "-m":
            write_small(compose(Options, words[1:]))
        elif script == "experiments/train_vla.py":
            more = [text for word in words for text in shorter.get(word, [])]
            summary = train(compose_train([*words, *small, *more]))
        elif script == "experiments/evaluate.py":
            again = evaluate_command(compose_evaluate([*words, "cluster=serial", *evaluation]))
    assert again["success_once"] == summary["after"]["success_once"]
    assert script == "experiments/serve_policy.py"  # it serves until it is stopped: tests/embodied/test_serving.py


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (replace(ENV, chunk=5), {}, r"env.chunk is 5, but the policy predicts chunks of 4 actions.*: set env.chunk=4"),
        (
            replace(ENV, action_dim=3),
            {},
            r"PointReach-v0: numbers in actions is 3, but the policy in .* is of a robot with 2,",
        ),
        (
            ENV,
            {"cameras": {"wrist": "base_camera"}},
            r"env.cameras is \['base_camera'\], but the policy sees base_camera",
        ),
        (ENV, {"stepz": 3}, r"policy.options.stepz is 3, but"),
    ],
)
def test_what_does_not_fit_the_env_is_refused(published, env: EnvSpec, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_of(published("pi0"), env=env, **options)


def test_a_base_model_takes_the_env_s_robot_and_the_statistics_of_a_dataset(published, tmp_path) -> None:
    shutil.copytree(published("pi0"), base := tmp_path / "base")
    for file in base.glob("policy_*"):
        file.unlink()
    env = env_spec("PointReach-v0", ROWS, CHUNK, 12, 3, 6, 9, 16, ("base_camera",))
    policy = policy_of(base, env=env, clip_actions=False)
    assert policy.checkpoint.config.action_dim == 3
    of = lambda size, std: {"mean": torch.ones(size), "std": torch.full((size,), std)}  # noqa: E731
    with pytest.raises(ConfigError, match=r"data is \['action'\], but a base model has no statistics"):
        policy.normalise_by({"action": of(3, 4.0)})
    policy.normalise_by({"observation.state": of(6, 2.0), "action": of(3, 4.0)})
    policy.save(tmp_path / "saved")
    made = PiPolicy.from_folder(tmp_path / "saved").checkpoint.processors
    torch.testing.assert_close(made.normalised_state(torch.full((1, 6), 3.0)), torch.ones(1, 6))
    actions = made.robot_actions(torch.ones(1, CHUNK, 3), torch.zeros(1, 6))
    torch.testing.assert_close(actions, torch.full((1, CHUNK, 3), 5.0))
    with pytest.raises(ConfigError, match=r"numbers in proprio is 6, but .* its statistics are of 5"):
        policy.normalise_by({"observation.state": of(5, 2.0), "action": of(3, 4.0)})


def test_relative_actions_are_normalised_by_statistics_of_relative_chunks(tmp_path) -> None:
    place, joints = REPOSITORY / "tests/oracles/lerobot/datasets/images", ["a", "b", "c", "d", "e", "gripper"]
    sizes = Options(family="pi0", out=str(tmp_path), action_dim=6, proprio_dim=6, chunk=8, hidden_size=16)
    policy = policy_of(write_small(sizes), env=env_spec("arm", ROWS, 8, 16, 6, 6, 9, 16, ("front",)))
    relative = RelativeActions(enabled=True, action_names=joints)
    policy.checkpoint = replace(policy.checkpoint, processors=replace(policy.checkpoint.processors, relative=relative))
    source = DemonstrationSource(Kind.recorded, 2, str(place), named="data")
    config = NewPolicyConfig(EnvConfig(), policy.config, 0, sources=(source,))
    NewPolicyStage(config)._normalise(policy)
    wanted = LeRobotDataset(place).relative_action_statistics(
        8, [True] * 5 + [False]
    )  # tests compare it with LeRobot's
    for kind in ("mean", "std", "q01", "q99"):
        np.testing.assert_allclose(policy.normalisation["action"].statistics[kind], wanted[kind], rtol=1e-5)
    with pytest.raises(DataError, match=r"longest episode has \d+ frames, and a chunk 900 actions"):
        LeRobotDataset(place).relative_action_statistics(900, [True] * 6)
    with pytest.raises(ConfigError, match="relative to the state, which a trajectory file does not hold"):
        statistics_of([replace(source, kind=Kind.maniskill)], [True] * 6, 8)


def test_a_folder_without_its_tokenizer_says_what_to_copy(published, tmp_path) -> None:
    shutil.copytree(published("pi0"), tmp_path / "folder")
    (tmp_path / "folder/backbone/tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"copy the files of the backbone's tokenizer there, or name"):
        policy_of(tmp_path / "folder")

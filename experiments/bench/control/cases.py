"""The trainings behind docs/control.md and docs/hierarchy.md: each algorithm on a cheap task.

case       task                       learns from
sac        Pendulum-v1                its own transitions
iql, bc    Pendulum-v1                all transitions of `sac` of the same seed, its first uniform actions included
dagger     PickCube-v1 on its state   the expert's actions in states that the policy reaches
hg_dagger  the same                   the expert's actions where it took over from the policy
rlpd       point_reach on its state   a reward of 1 at the end of a solved episode, and episodes of the expert
grasp      PickCube-v1 on its state   the same; two critics, one update for two env steps, as ManiSkill's quick setting

corrected  point_reach with a wall    HG-DAgger: demonstrations and rare corrections
recap      the same, from images      these and its own actions, labelled by their advantage
unlabelled the same                   the same data with one label: all of it is positive
negative   the same                   nothing: the policy of `recap` acts with the text of the other label

and two levels of policies, of which the lower one is frozen, with the weights of another case of the same seed:

           task                       lower level                                  the higher level chooses
gap        point_reach with a wall    `low_gap`, which moves straight to its goal  a goal every 2 chunk-steps
target     Reacher-v5                 `low_target`, which reaches its target       a target every 10 steps
pick       PickCube-v1 on its state   `dagger`                                     a place for the cube every 10 steps
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Case:
    """One training."""

    text: str  # the words of the command
    source: str = ""  # the case whose checkpoint it begins with; "": none
    given: str = "data"  # the word that takes this checkpoint

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def unit(self) -> str:
        """What is counted while it learns."""
        return "updates" if self.source and self.given == "data" else "env steps"


UNSEEN = "6201,6202,6203"  # seeds that no setting was chosen by
COMMON = ("cluster=serial", "eval.num_episodes=100", "eval.sampled_episodes=0", "checkpoint.keep=1")
_PENDULUM = """env=gymnasium policy=soft_actor env.id=Pendulum-v1 env.horizon=200 env.block_size=8
    policy.options.hidden_size=64 algorithm.lr=1e-3"""
_CRITICS = "algorithm.critic_hidden_size=64 algorithm.value_lr=1e-3"
_PICK = """env=maniskill_pick policy=soft_actor env.cameras=[] env.options.robot=null
    env.options.objects_in_proprio=true"""
_DAGGER = f"""{_PICK} algorithm=dagger algorithm.expert_steps=3200 algorithm.updates_per_step=2 algorithm.lr=1e-3
    run.num_iterations=95"""
_HIGH = """warm_start.from_scratch=false hierarchy.algorithm.lr=1e-3 hierarchy.algorithm.epochs=6
    hierarchy.algorithm.num_minibatches=4"""
_POINT = """env=point_reach policy=actor_critic env.cameras=[] env.chunk=4 env.horizon=40
    env.chunks_per_rollout=10"""
_REACHER = """env=gymnasium env.id=Reacher-v5 policy=actor_critic algorithm=ppo_mujoco env.horizon=50
    env.num_envs=32 env.block_size=16 env.chunks_per_rollout=100 env.carry_over=false run.num_iterations=60"""
_WEIGHTS = "warm_start.checkpoint"
# a horizon of 40 and 320 steps of the expert are one episode of each row
_CORRECTED = """env=point_reach env.obs_size=16 env.options.gap=0.7 env.horizon=40 env.block_size=8
    policy=tiny_vla policy.options.hidden_size=32 policy.options.num_layers=1 policy.options.num_heads=2
    policy.options.stem_width=16 policy.options.keypoints=8 policy.options.num_bins=17 warm_start.from_scratch=true
    algorithm=hg_dagger algorithm.expert_steps=320 algorithm.warmup_steps=0 algorithm.tolerance=1
    algorithm.batch_size=64 algorithm.updates_per_step=0.5 algorithm.lr=2e-3 run.num_iterations=10"""
_RECAP = f"""{_CORRECTED.replace("hg_dagger", "recap")} algorithm.value_lr=2e-3 algorithm.capacity=6400"""
CASES: dict[str, Case] = {
    "sac": Case(f"{_PENDULUM} {_CRITICS} algorithm=sac algorithm.warmup_steps=500 run.num_iterations=90"),
    "iql": Case(
        f"""{_PENDULUM} {_CRITICS} algorithm=iql algorithm.advantage_scale=0.1 algorithm.expectile=0.8
        run.num_iterations=6""",
        "sac",
    ),
    "bc": Case(f"{_PENDULUM} algorithm=bc run.num_iterations=4", "sac"),
    "dagger": Case(_DAGGER),
    "hg_dagger": Case(_DAGGER.replace("dagger", "hg_dagger")),
    # its authors' ten critics of 256 units and twenty updates per step are too much for a core
    "rlpd": Case("""env=point_reach policy=soft_actor env.cameras=[] env.reward=sparse env.horizon=20 env.block_size=8
        algorithm=rlpd algorithm.expert_steps=1000 algorithm.warmup_steps=500 algorithm.batch_size=128
        algorithm.updates_per_step=4 algorithm.policy_period=4 algorithm.num_critics=5
        algorithm.critic_hidden_size=64 policy.options.hidden_size=64 run.num_iterations=80"""),
    "grasp": Case(f"""{_PICK} algorithm=rlpd env.reward=sparse env.hold_steps=1 run.exact=exact algorithm.compile=true
        algorithm.num_critics=2 algorithm.target_critics=2 algorithm.policy_period=1 algorithm.gamma=0.9
        algorithm.updates_per_step=0.5 algorithm.expert_steps=20000 algorithm.warmup_steps=1600
        env.num_envs=32 env.block_size=32 env.chunks_per_rollout=10 run.num_iterations=400"""),
    "corrected": Case(_CORRECTED),
    "recap": Case(_RECAP),
    "unlabelled": Case(f"{_RECAP} algorithm.positive_share=1"),
    "negative": Case(
        f"{_RECAP} warm_start.from_scratch=false run.num_iterations=0 'policy.prompt_suffix=Advantage: negative'",
        "recap",
        _WEIGHTS,
    ),
    "low_gap": Case(f"""{_POINT} algorithm.target_kl=null algorithm.lr=1e-3 algorithm.epochs=6
        algorithm.num_minibatches=4 algorithm.gamma=0.95 algorithm.bootstrap_at_timeout=true
        algorithm.critic_warmup_iterations=0 run.num_iterations=40"""),
    "gap": Case(
        f"""{_POINT} env.options.gap=0.7 env.reward=sparse env.num_envs=128 env.block_size=32 {_HIGH}
        hierarchy.every=2 hierarchy.columns=[2,3] hierarchy.goal_low=[-1,-1] hierarchy.goal_high=[1,1]
        run.num_iterations=80""",
        "low_gap",
        _WEIGHTS,
    ),
    "low_target": Case(_REACHER),
    # columns 4 and 5 are the target, 8 and 9 the finger's place minus it
    "target": Case(
        f"""{_REACHER} hierarchy.every=10 hierarchy.columns=[4,5] hierarchy.way_columns=[8,9]
        hierarchy.way_to_goal=false hierarchy.goal_low=[-0.2,-0.2] hierarchy.goal_high=[0.2,0.2] {_HIGH}""",
        "low_target",
        _WEIGHTS,
    ),
    # columns 16 to 18 are the goal, 19 to 21 the way to it
    "pick": Case(
        f"""{_PICK} env.chunk=1 env.num_envs=64 env.block_size=32 {_HIGH} env.chunks_per_rollout=50 env.reward=dense
        env.success_bonus=0 env.hold_steps=0 hierarchy.every=10 hierarchy.columns=[16,17,18]
        hierarchy.way_columns=[19,20,21] hierarchy.goal_low=[-0.1,-0.1,0.02] hierarchy.goal_high=[0.1,0.1,0.32]
        hierarchy.policy.options.initial_std=0.5 run.num_iterations=150""",
        "dagger",
        _WEIGHTS,
    ),
}


def place_of(folder: Path, name: str, seed: int) -> Path:
    return folder / name / f"seed_{seed}"


def words_of(name: str, seed: int, folder: Path, overrides: Sequence[str]) -> list[str]:
    """Returns the words of a case's training; its start is stored below `folder` too."""
    case = CASES[name]
    begun = [f"{case.given}={place_of(folder, case.source, seed)}/checkpoints/latest"] if case.source else []
    return [*case.words, *COMMON, *begun, *overrides, f"run.seed={seed}", f"run.dir={place_of(folder, name, seed)}"]

"""Trains twice, once undisturbed and once while workers are killed, stopped and made to fail, and compares the weights.

python experiments/chaos.py workflow=embodied faults=20 seed=7 run.dir=runs/chaos
python experiments/chaos.py workflow=reasoning faults=20 seed=7 run.dir=runs/chaos
python experiments/chaos.py workflow=episodes faults=20 seed=7 run.dir=runs/chaos

A schedule drawn from the seed says which worker fails in which phase (rlinf_embodied/tools/chaos.py).  Other keys are
those of the training, for example plan=collocated.  Exit code 0: all faults occurred, and the weights are the same, bit
for bit; 1: otherwise; 2: wrong input.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlinf_embodied import train
from rlinf_embodied.command_line import main
from rlinf_embodied.compose import compose_math, compose_train, split
from rlinf_embodied.config import ClusterConfig, MathConfig, RunConfig, TrainConfig
from rlinf_embodied.config.checks import require, require_numbers, require_one_of
from rlinf_embodied.tools.chaos import Chaos, disturbed, report, schedule

SMALL = {  # trainings of seconds
    "embodied": """
        env=point_reach env.num_envs=16 env.block_size=4 env.obs_size=16 env.chunk=4 env.horizon=12
        env.chunks_per_rollout=4 env.carry_over=true policy.options.hidden_size=32 policy.options.num_layers=1
        policy.options.num_heads=2 policy.options.stem_width=16 policy.options.keypoints=4 policy.options.num_bins=9
        policy.options.critic_hidden_size=16 policy.options.instruction_length=4 algorithm.epochs=2
        algorithm.num_minibatches=2 algorithm.value_epochs=2 algorithm.lr=1e-3 algorithm.target_kl=null
        warm_start.num_demos=32 warm_start.epochs=1 warm_start.head_epochs=16 warm_start.head_batch_size=16
        warm_start.head_lr=5e-3 eval.num_envs=4 eval.record_video=false eval.num_episodes=4 eval.every=1""",
    "reasoning": """
        data.level=sum1-2-9 policy.hidden_size=32 policy.num_layers=1 policy.num_heads=2 policy.intermediate_size=64
        policy.context_length=40 generation.max_new_tokens=20 generation.rows_per_block=8 generation.rows_per_batch=16
        generation.max_num_seqs=16 algorithm.prompts_per_iteration=8 algorithm.group_size=4 algorithm.lr=1e-3
        algorithm.tokens_per_microbatch=256 warm_start.steps=240 warm_start.chain_of_thought_share=0.2
        warm_start.num_examples=1024 warm_start.lr=1e-2 eval.num_problems=16 eval.num_samples=1
        eval.problems_per_block=8 eval.every=1""",
}
SMALL["episodes"] = f"""
    {SMALL["reasoning"]} tool._target_=experiments.examples.python_tool.evaluate warm_start.tool_share=0.5
    warm_start.num_examples=256"""
_COMMON = """
    plan=disaggregated cluster=local cluster.num_devices=2 cluster.hang_after_s=10 checkpoint.every=1
    recovery.max_restarts=1000 recovery.snapshot_share=1 run.seed=3 run.dir=runs/chaos"""
_MORE_ITERATIONS = 3  # than faults


@dataclass(slots=True, kw_only=True)
class Options:
    """Keys in addition to those of the training."""

    workflow: str = "embodied"  # reasoning, or episodes: with a tool that runs programs in a process
    faults: int = 20
    seed: int = 7  # of the schedule

    def __post_init__(self) -> None:
        require_one_of(self, "", "workflow", *SMALL)
        require_numbers(self, "", "faults")


@dataclass(slots=True, kw_only=True)
class ChaosConfig(Options):
    """A comparison: the training that is run twice, and its faults."""

    training: Any  # a TrainConfig or MathConfig; its run.dir is where both runs go

    @property
    def run(self) -> RunConfig:
        return self.training.run

    @property
    def cluster(self) -> ClusterConfig:
        return self.training.cluster

    @property
    def folder(self) -> Path:
        return Path(str(self.run.dir)) / f"{self.workflow}-{self.seed}"

    def training_in(self, name: str) -> TrainConfig | MathConfig:
        """Returns the training in a folder of the comparison, with a separate cache."""
        folder = self.folder / name
        start = replace(self.training.warm_start, cache_dir=str(folder / "cache"))
        return replace(self.training, run=replace(self.run, dir=str(folder)), warm_start=start)


def compose_chaos(words: Sequence[str]) -> ChaosConfig:
    """Returns a comparison: its training is small, unless overridden, and has an iteration for each fault."""
    own, overrides = split(Options, words)
    small = [*SMALL[own.workflow].split(), *_COMMON.split(), f"run.num_iterations={own.faults + _MORE_ITERATIONS}"]
    compose = compose_train if own.workflow == "embodied" else compose_math
    return ChaosConfig(**asdict(own), training=compose([*small, *overrides]))


def compare(config: ChaosConfig) -> bool:
    """Makes both runs, prints what each fault cost; returns whether all faults occurred and the weights are the same.

    Raises:
        ConfigError: the folder holds an earlier comparison.
    """
    rule = f"it has {config.folder}, of an earlier comparison"
    require(not config.folder.exists(), "run.dir", config.run.dir, rule, "use another run.dir, or remove it")
    straight = train(config.training_in("straight"))["weights_sha256"]
    shares = config.training.plan.name in ("auto", "collocated")  # a worker: nothing is transferred
    missing = ["transfer"] * shares + ["tool"] * (config.workflow != "episodes")
    chaos = Chaos(schedule(config.faults, config.seed, missing))
    digest = disturbed(config.training_in("chaos"), chaos)
    print(report(chaos, config.folder / "chaos"))
    print(f"undisturbed {straight}\ndisturbed   {digest}: {'equal' if straight == digest else 'NOT EQUAL'}")
    return len(chaos.come) == len(chaos.faults) and straight == digest


if __name__ == "__main__":
    main(lambda config: int(not compare(config)), Options, compose_chaos)

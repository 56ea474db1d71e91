"""What is compared: the arguments, and a small training of either workflow.  Imports nothing that computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_embodied import portable
from rlinf_embodied.compose import compose_math, compose_train
from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.errors import ConfigError

STORE_BYTES = 128 << 20  # of each node
SMALL = {
    "embodied": (
        *("env=point_reach", "env.num_envs=16", "env.block_size=4", "env.obs_size=16", "env.chunk=4", "env.horizon=12"),
        *("env.chunks_per_rollout=4", "env.carry_over=true", "policy.hidden_size=32", "policy.num_layers=1"),
        *("policy.num_heads=2", "policy.stem_width=16", "policy.keypoints=4", "policy.num_bins=9"),
        *("policy.critic_hidden_size=16", "policy.instruction_length=4", "algorithm.epochs=2"),
        *("algorithm.num_minibatches=2", "algorithm.value_epochs=2", "algorithm.lr=1e-3", "algorithm.target_kl=null"),
        *("warm_start.num_demos=32", "warm_start.epochs=1", "warm_start.head_epochs=16"),
        *("warm_start.head_batch_size=16", "warm_start.head_lr=5e-3", "eval.num_envs=4", "eval.record_video=false"),
        *("eval.num_episodes=4", "eval.every=1"),
    ),
    "reasoning": (
        *("data.level=sum1-2-9", "policy.hidden_size=32", "policy.num_layers=1", "policy.num_heads=2"),
        *("policy.intermediate_size=64", "policy.context_length=40", "generation.max_new_tokens=20"),
        *("generation.rows_per_block=8", "generation.rows_per_batch=16", "generation.max_num_seqs=16"),
        *("algorithm.prompts_per_iteration=8", "algorithm.group_size=4", "algorithm.lr=1e-3"),
        *("algorithm.tokens_per_microbatch=256", "warm_start.steps=240", "warm_start.chain_of_thought_share=0.2"),
        *("warm_start.num_examples=1024", "warm_start.lr=1e-2", "eval.num_problems=16", "eval.num_samples=1"),
        *("eval.problems_per_block=8", "eval.every=1"),
    ),
}
_COMMON = (
    *("plan=disaggregated", "cluster=local", "cluster.num_devices=2", "cluster.hang_after_s=10"),
    *("checkpoint.every=1", "recovery.max_restarts=1000", "recovery.snapshot_share=1", "run.seed=3"),
    *(f"cluster.object_store_bytes={STORE_BYTES}",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of the comparison."""

    workflow: str = "embodied"
    faults: int = 20
    seed: int = 7
    nodes: int = 1


def configure(own: Options, overrides: Sequence[str], folder: Path) -> TrainConfig | MathConfig:
    """Returns the config of a run: small, unless told otherwise, and with a cache of its own.

    Raises:
        ConfigError: there is no such workflow, or an override is wrong.
    """
    if own.workflow not in SMALL:
        raise ConfigError(f"workflow is {own.workflow!r}, but it is {' or '.join(SMALL)}: use one of these")
    iterations = max(3, own.faults // 2)
    given = dict(text.split("=", 1) for text in (*SMALL[own.workflow], *_COMMON, f"run.num_iterations={iterations}"))
    given |= dict(text.split("=", 1) for text in overrides)
    given |= {"run.dir": str(folder), "warm_start.cache_dir": str(folder / "cache")}
    compose = compose_train if own.workflow == "embodied" else compose_math
    return compose([f"{key}={value}" for key, value in given.items()])


def pinned(overrides: Sequence[str]) -> list[str]:
    """Pins this process, before torch is imported, and returns the overrides.

    Where it cannot be pinned and nobody asked for it, run.exact=exact is added: the processor compares with itself.

    Raises:
        ConfigError: run.exact=portable is asked for, and this process cannot be pinned.
    """
    asked = [text for text in overrides if text.startswith("run.exact=")]
    if asked and asked[-1] != "run.exact=portable":
        return list(overrides)
    try:
        portable.pin()
    except ConfigError:
        if asked:
            raise
        return [*overrides, "run.exact=exact"]
    return list(overrides)

"""Measures the stages of a training job in real workers, prints what they cost, and writes the profile.

python experiments/profile_stages.py env=maniskill_pick policy=tiny_vla run.dir=runs/profile
python experiments/profile_stages.py workflow=reasoning algorithm=ppo run.dir=runs/profile_math
python experiments/profile_stages.py env=maniskill_pick block_sizes=8,16,32 run.dir=runs/sizes

The keys are those of train_vla.py, or with workflow=reasoning those of train_llm_math.py.  The profile goes to
<run.dir>/profile.json and to the cache, where plan=auto finds it as long as hardware, library versions and the sections
that the stages' times depend on stay as they are.  It is always measured again.  `block_sizes` measures with each of
these sizes of blocks instead, and compares the best plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_embodied.command_line import main
from rlinf_embodied.compose import compose_math, compose_train, split
from rlinf_embodied.config import MathConfig, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Keys in addition to those of the training."""

    workflow: str = "embodied"  # or reasoning
    block_sizes: str = ""  # rows, such as 8,16,32


if __name__ == "__main__":
    sizes: list[str] = []

    def compose_job(words: Sequence[str]) -> TrainConfig | MathConfig:
        own, overrides = split(Options, words)
        sizes.extend([own.block_sizes] if own.block_sizes else [])
        return compose_math(overrides) if own.workflow == "reasoning" else compose_train(overrides)

    def profile(config: TrainConfig | MathConfig) -> None:
        # it imports torch: only once the rest of the input is known to be right
        from rlinf_embodied.tools.stage_profiles import profile_stages, sizes_in

        profile_stages(config, sizes_in(sizes))

    main(profile, TrainConfig, compose_job)

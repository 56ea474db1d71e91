"""Measures the stages of a training job in real workers, prints what they cost, and writes the profile.

python experiments/profile_stages.py env=maniskill_pick policy=tiny_vla run.dir=runs/profile
python experiments/profile_stages.py workflow=reasoning algorithm=ppo run.dir=runs/profile_math
python experiments/profile_stages.py env=maniskill_pick block_sizes=8,16,32 run.dir=runs/sizes

The keys are those of train_vla.py, or with workflow=reasoning those of train_llm_math.py.  The profile goes to
<run.dir>/profile.json and to the cache, where plan=auto finds it as long as hardware, library versions and the sections
that the stages' times depend on stay as they are.  It is measured anew each time.  `block_sizes` measures with each of
these sizes of blocks instead, and compares the best plans.
"""

import sys
from collections.abc import Callable

from rlinf_embodied.command_line import math_main, train_main
from rlinf_embodied.config import MathConfig, TrainConfig

REASONING, SIZES = "workflow=reasoning", "block_sizes="


def profile(given: list[str]) -> Callable[[TrainConfig | MathConfig], None]:
    def work(config: TrainConfig | MathConfig) -> None:
        # it imports torch: only once the rest of the input is known to be right
        from rlinf_embodied.tools.stage_profiles import profile_stages, sizes_in

        profile_stages(config, sizes_in(given))

    return work


if __name__ == "__main__":
    sizes = [word.removeprefix(SIZES) for word in sys.argv if word.startswith(SIZES)]
    sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith(SIZES)]
    if REASONING in sys.argv:
        sys.argv.remove(REASONING)
        math_main(profile(sizes))
    train_main(profile(sizes))

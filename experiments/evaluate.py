"""Evaluates a checkpoint, the scripted expert or random actions on held-out episodes, with videos.

python experiments/evaluate.py checkpoint=runs/demo/checkpoints/latest eval.num_episodes=100 eval.record_video=true
python experiments/evaluate.py policy=expert env=maniskill_push
"""

from rlinf_embodied.command_line import evaluate_main
from rlinf_embodied.config import EvaluateConfig


def evaluate(config: EvaluateConfig) -> int:
    from rlinf_embodied.embodied.evaluate import evaluate_command  # imports torch

    return evaluate_command(config)


if __name__ == "__main__":
    evaluate_main(evaluate)

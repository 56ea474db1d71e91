"""Evaluates a checkpoint on what is held out: episodes, with videos, or problems, with a table of answers.

python experiments/evaluate.py checkpoint=runs/demo/checkpoints/latest eval.num_episodes=100
python experiments/evaluate.py policy=expert env=maniskill_push
python experiments/evaluate.py checkpoint=runs/math/checkpoints/latest eval.num_problems=1000 eval.num_samples=8
python experiments/evaluate.py checkpoint=models/qwen data.files.all=gsm8k.jsonl      a Hugging Face folder as it is
"""

from rlinf_embodied.command_line import evaluate_main
from rlinf_embodied.config import EvaluateAnswersConfig, EvaluateConfig


def evaluate(config: EvaluateConfig | EvaluateAnswersConfig) -> int:
    if isinstance(config, EvaluateAnswersConfig):
        from rlinf_embodied.reasoning.evaluate import evaluate_command as evaluate_answers

        return evaluate_answers(config)
    from rlinf_embodied.embodied.evaluate import evaluate_command  # imports torch

    return evaluate_command(config)


if __name__ == "__main__":
    evaluate_main(evaluate)

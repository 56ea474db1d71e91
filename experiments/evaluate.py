"""Evaluates a checkpoint on held-out episodes, with videos, or on held-out problems, with a table of answers.

python experiments/evaluate.py checkpoint=runs/demo/checkpoints/latest eval.num_episodes=100
python experiments/evaluate.py policy=expert env=maniskill_push
python experiments/evaluate.py checkpoint=runs/math/checkpoints/latest eval.num_problems=1000 eval.num_samples=8
python experiments/evaluate.py checkpoint=models/qwen data.files.all=gsm8k.jsonl      a Hugging Face folder as it is
"""

from rlinf_embodied import evaluate
from rlinf_embodied.command_line import main
from rlinf_embodied.compose import compose_evaluation
from rlinf_embodied.config import EvaluateConfig

if __name__ == "__main__":
    main(evaluate, EvaluateConfig, compose_evaluation)

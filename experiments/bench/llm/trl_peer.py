"""TRL's GRPOTrainer on the work: same model, prompts, verifier, batch, learning rate and objective.

Needs the extra `peers`; generation is transformers' (no vLLM on CPUs).  Each step is one batch of
prompts x group completions and one optimizer step.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from experiments.bench.llm.work import FORM, Step, Work, step_problems
from policies.language_folder import read_tokenizer
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reasoning.reward_stage import Verifier

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

MICROBATCHES = 8  # gradient accumulation; 1 takes 15 % more for the loss, 2 to 16 are alike


def require_trl() -> None:
    """Checks that TRL is installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("trl") is None:
        raise ConfigError("TRL is not installed: pip install -c constraints.txt -e '.[peers]'")


def config(own: Work, out: Path) -> GRPOConfig:
    """Returns TRL's settings of this work.

    They are the fastest that were found, in processor seconds of a step with one thread (256 completions, mostly 10 or
    mostly 40 tokens long).  Shared machines are noisy: differences below 10 % mean nothing.
    """
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]

    return GRPOConfig(
        output_dir=str(out / "trl"),
        use_cpu=True,
        bf16=False,  # TRL's default, True, takes 70 % more on a CPU, and computes other numbers
        seed=own.seed,
        max_steps=own.steps,
        per_device_train_batch_size=own.prompts * own.group // MICROBATCHES,
        gradient_accumulation_steps=MICROBATCHES,
        num_generations=own.group,
        max_completion_length=own.new_tokens,
        temperature=own.temperature,
        learning_rate=own.lr,
        lr_scheduler_type="constant",
        max_grad_norm=own.max_grad_norm,
        weight_decay=0.0,
        optim="adamw_torch_fused",  # "adamw_torch" is as fast
        beta=0.0,
        epsilon=own.clip,
        loss_type="dapo",  # sum over tokens / tokens of the whole batch, over all microbatches
        scale_rewards="group",
        gradient_checkpointing=False,  # TRL's default, True, computes activations twice: 30 % more
        cache_implementation=None,  # "static" takes 8 % more
        use_transformers_continuous_batching=False,  # with it a step takes eight times as long on a CPU
        shuffle_dataset=False,  # the prompts of a step are those of every other arm
        dataloader_num_workers=0,  # the loader takes no time
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )


def make_trainer(own: Work, out: Path, heard: Callable[[int], None]) -> GRPOTrainer:
    """Returns a trainer on this work; `heard` is called with the tokens of each call of the verifier."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    problems = [problem for step in range(own.steps) for problem in step_problems(own, step)]
    rows = [{"prompt": FORM.prompt(problem), "position": i} for i, problem in enumerate(problems)]
    tokenizer = read_tokenizer(Path(own.start))
    verifier = Verifier(FORM)  # decides sums without starting a process

    def reward(
        completions: list[str], completion_ids: list[list[int]], position: list[int], **_: object
    ) -> list[float | None]:
        heard(sum(map(len, completion_ids)))
        ended = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        verified = verifier.verify(completions, [problems[i] for i in position], ended)
        return list(verified.raw.tolist())

    # "sdpa" takes 10 to 15 % more in generation and as much in the loss
    model = AutoModelForCausalLM.from_pretrained(
        own.start, dtype="float32", attn_implementation="eager", local_files_only=True
    )
    return GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config(own, out),
        train_dataset=Dataset.from_list(rows),
    )


def train(own: Work, out: Path, cores: int = 1) -> list[Step]:
    """Trains in this process, with a thread per core, and saves the model in out/model."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    torch.set_num_threads(cores)
    steps, tokens = list[Step](), list[int]()  # tokens since the last step ended

    class StepEnds(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            steps.append(Step(sum(tokens)))
            tokens.clear()

    trainer = make_trainer(own, out, tokens.append)
    trainer.add_callback(StepEnds())
    trainer.train()
    trainer.save_model(str(out / "model"))
    return steps

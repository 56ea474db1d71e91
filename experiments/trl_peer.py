"""TRL's GRPOTrainer on the work of bench_llm.py: same model, prompts, judge, batch, learning rate and objective.

python experiments/trl_peer.py out=<folder> [start=runs/bench_llm/start] [steps=20] [threads=1] [processes=1] [...]

Leaves steps-<rank>.jsonl and model/ in `out`.  Needs the extra `peers`; generation is transformers' (no vLLM on CPUs).
Each step is one batch of prompts x group completions and one optimizer step.  What the settings mean, and what was
found about them on two cores, is in SETTINGS.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from llm_work import FORM, StepLog, Work, launch, number, parse, step_problems
from transformers import AutoModelForCausalLM, TrainerCallback

from policies.language_folder import read_tokenizer
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reasoning.judge import Judge

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

LOSSES = {
    "token": "dapo",  # sum over tokens / tokens of the whole batch, over all microbatches and processes
    "sequence": "grpo",  # mean over completions of the mean over their tokens
}
# The defaults are the fastest that were found, in processor seconds of a step with one thread (256 completions, mostly
# 10 or mostly 40 tokens long).  Shared machines are noisy: differences below 10 % mean nothing.
SETTINGS: dict[str, object] = {
    "steps": 20,
    "threads": 1,
    "processes": 1,
    "microbatches": 8,  # gradient accumulation; 1 takes 15 % more for the loss, 2 to 16 are alike
    "attention": "eager",  # "sdpa" takes 10 to 15 % more in generation and as much in the loss
    "cache": "",  # cache_implementation; "" is dynamic, "static" takes 8 % more
    "optimizer": "adamw_torch_fused",  # "adamw_torch" cannot be told from it
    "checkpointing": 0,  # TRL's default, 1, computes activations twice: 30 % more
    "bf16": 0,  # TRL's default, 1, takes 70 % more on a CPU, and computes other numbers
    "continuous": 0,  # use_transformers_continuous_batching: a step takes eight times as long on a CPU
    "loader_workers": 0,  # the loader takes no time
    "out": "",
}
PARTS = {  # methods whose time is taken
    "_generate_single_turn": "generation_s",
    "_prepare_inputs": "inputs_s",  # generation, judge, padding and bookkeeping
    "training_step": "whole_s",  # the same, then forward and backward
}


def missing() -> str:
    """Returns what to do where TRL is not installed; "" where it is."""
    if importlib.util.find_spec("trl") is None:
        return "TRL is not installed: pip install -c constraints.txt -e '.[peers]'"
    return ""


def config(work: Work, own: Mapping[str, object]) -> GRPOConfig:
    """Returns TRL's settings of this work."""
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]

    processes, microbatches = number(own, "processes"), number(own, "microbatches")
    rows, rest = divmod(work.prompts * work.group, processes * microbatches)
    if rest:
        raise ConfigError(
            f"prompts x group is {work.prompts * work.group}, but {processes} processes x {microbatches} microbatches "
            "must divide it: use others"
        )
    return GRPOConfig(
        output_dir=str(Path(str(own["out"])) / "trl"),
        use_cpu=True,
        bf16=bool(own["bf16"]),
        seed=work.seed,
        max_steps=number(own, "steps"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=microbatches,
        num_generations=work.group,
        max_completion_length=work.new_tokens,
        temperature=work.temperature,
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        max_grad_norm=work.max_grad_norm,
        weight_decay=0.0,
        optim=str(own["optimizer"]),
        beta=0.0,
        epsilon=work.clip,
        loss_type=LOSSES[work.loss],
        scale_rewards="group",
        gradient_checkpointing=bool(own["checkpointing"]),
        cache_implementation=str(own["cache"]) or None,
        use_transformers_continuous_batching=bool(own["continuous"]),
        shuffle_dataset=False,  # the prompts of a step are those of every other arm
        dataloader_num_workers=number(own, "loader_workers"),
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        ddp_backend="gloo" if processes > 1 else None,
    )


def make_trainer(
    work: Work,
    own: Mapping[str, object],
    heard: Callable[[int, float], None] = lambda tokens, seconds: None,
    rollout: Callable | None = None,
) -> GRPOTrainer:
    """Returns a trainer on this work.

    Args:
        work: what it does.
        own: the settings of this script.
        heard: is told (tokens, seconds) of each call of the judge.
        rollout: TRL's `rollout_func`; None: TRL generates.
    """
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    problems = [problem for step in range(number(own, "steps")) for problem in step_problems(work, step)]
    rows = [{"prompt": FORM.prompt(problem), "position": i} for i, problem in enumerate(problems)]
    tokenizer = read_tokenizer(Path(work.start))
    judge = Judge(FORM)  # decides sums without starting a process

    def reward(
        completions: list[str], completion_ids: list[list[int]], position: list[int], **_: object
    ) -> list[float | None]:
        start = time.perf_counter()
        ended = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        verdicts = judge.judge(completions, [problems[i] for i in position], ended)
        heard(sum(map(len, completion_ids)), time.perf_counter() - start)
        return list(verdicts.rewards.tolist())

    model = AutoModelForCausalLM.from_pretrained(
        work.start, dtype="float32", attn_implementation=str(own["attention"]), local_files_only=True
    )
    return GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config(work, own),
        train_dataset=Dataset.from_list(rows),
        rollout_func=rollout,
    )


def train(work: Work, own: Mapping[str, object]) -> None:
    """Trains in this process, a rank of `processes`; leaves its step log and, from rank 0, the model."""
    torch.set_num_threads(number(own, "threads"))
    out, rank = Path(str(own["out"])), int(os.environ.get("RANK", "0"))
    log = StepLog(out, rank)
    totals = dict.fromkeys(("tokens", "reward_s", *PARTS.values()), 0.0)  # since the last step ended

    def heard(tokens: int, seconds: float) -> None:
        totals["tokens"] += tokens
        totals["reward_s"] += seconds

    class StepEnds(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            log.write(int(totals["tokens"]), **_shares(totals))
            totals.update(dict.fromkeys(totals, 0.0))

    trainer = make_trainer(work, own, heard)
    for name, part in PARTS.items():
        setattr(trainer, name, _timed(getattr(trainer, name), totals, part))
    trainer.add_callback(StepEnds())
    trainer.train()
    trainer.save_model(str(out / "model"))  # the first rank does
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _timed(method: Callable, totals: dict[str, float], part: str) -> Callable:
    def timed(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            totals[part] += time.perf_counter() - start

    return timed


def _shares(totals: Mapping[str, float]) -> dict[str, float]:
    """Returns seconds of parts that do not overlap; what remains of a step is optimizer, loader and callbacks."""
    return {
        "generation_s": totals["generation_s"],
        "reward_s": totals["reward_s"],
        "forward_backward_s": totals["whole_s"] - totals["inputs_s"],
        "scoring_s": totals["inputs_s"] - totals["generation_s"] - totals["reward_s"],
    }


def main() -> None:
    work, own = parse(sys.argv[1:], SETTINGS)
    if reason := missing():
        raise ConfigError(reason)
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if number(own, "processes") > 1 and "RANK" not in os.environ:
        launch(__file__, sys.argv[1:], number(own, "processes"))
    else:
        train(work, own)


if __name__ == "__main__":
    main()

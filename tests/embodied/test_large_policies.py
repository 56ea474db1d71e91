"""Adapters, slices, recomputed activations, bfloat16 and small passes, in fine-tuning and in RL, of every family.

docs/pi.md has the table of what each family can do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openvla_folders as toys
import pytest
import torch
from runs import SFT, tiny_overrides, train
from safetensors.torch import load_file

from experiments.examples.small_pi import Options, write_small
from rlinf_embodied.compose import compose_train

pytestmark = pytest.mark.usefixtures("no_group_stays")

PI, OPENVLA = ("pi0", "pi05", "smolvla"), ("openvla", "openvla_oft")
MODES = {
    "sft": [*SFT, "algorithm.epochs=4", "algorithm.head_epochs=0", "algorithm.batch_size=16"],  # four updates
    "rl": ["run.num_iterations=1", "algorithm.critic_warmup_iterations=0", "algorithm.ratio_tolerance=1e-3"],
}
SLICES, SMALL = ["algorithm.sharding=fsdp2", "run.exact=false"], ["algorithm.rows_per_microbatch=3"]
AGAIN, LOW = ["policy.options.checkpoint_activations=true"], ["algorithm.precision=bfloat16"]
LORA = ["policy.options.lora.rank=2"]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Callable[[str], list[str]]:
    """Returns the words that choose a family and the small folder that it begins with."""
    place = tmp_path_factory.mktemp("published")

    def words(family: str) -> list[str]:
        out, size = place / family, 1 if family == "openvla" else 4
        own = [f"policy={family}", "policy.options.critic_hidden_size=8", f"env.chunk={size}"]
        own += ["env.chunks_per_rollout=12"] if size == 1 else []
        if family in PI and not out.exists():
            write_small(Options(family=family, out=str(out), action_dim=2, proprio_dim=4, chunk=4, hidden_size=16))
        if family in OPENVLA:
            out = place / "openvla"
            if not out.exists():
                toys.write_published(out, action=2, proprio=4)
            own += ["policy.options.prompt_length=24"]
        return [
            *own,
            *([f"warm_start.checkpoint={out}"] if family in (*PI, *OPENVLA) else ["warm_start.from_scratch=true"]),
        ]

    return words


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint folder."""
    files = sorted((folder / "checkpoints/latest").glob("*.safetensors"))
    return {f"{file.name} {name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "family", ["pi0", *(pytest.param(f, marks=pytest.mark.slow) for f in (*PI[1:], *OPENVLA, "flow_vla"))]
)
def test_what_saves_memory_changes_no_step_and_all_of_it_works_together(
    start, tmp_path, family: str, mode: str
) -> None:
    def run(name: str, *words: str) -> dict[str, torch.Tensor]:
        few = ["warm_start.num_demos=8", "eval.num_episodes=1", "eval.num_envs=1", f"run.dir={tmp_path / name}"]
        train(compose_train(tiny_overrides(*start(family), *MODES[mode], *few, *words)))
        return weights(tmp_path / name)

    large = family != "flow_vla"  # which has neither adapters nor anything to recompute
    small = SMALL if (family, mode) != ("smolvla", "sft") else []  # whose loss is a mean over what a pass has of it
    plain, same = run("plain"), run("same", *SLICES, *small, *(AGAIN if large else ()))
    assert plain.keys() == same.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(same[name], tensor, atol=5e-6, rtol=1e-3, msg=name)
    low = [*LOW, "algorithm.ratio_tolerance=0.5"] if mode == "rl" else LOW
    every = run("every", *SLICES, *SMALL, *low, *([*AGAIN, *LORA] if large else ()))
    assert all(torch.isfinite(tensor).all() for tensor in every.values())
    assert any("lora_B" in name and tensor.abs().max() > 0 for name, tensor in every.items()) is large

"""The GPU benchmark: how it fails, and those of its parts that a CPU can run."""

from __future__ import annotations

import json

import openvla_folders
import pytest
import torch

from experiments.bench.gpu import __main__ as gpu
from experiments.bench.gpu.openvla import Work, forward_flops, meta_network, rollouts, training
from policies.openvla.config import config_of

TOY = Work(
    config=config_of(openvla_folders.RAW),
    dtype=torch.float32,
    rollout_rows=2,
    training_rows=2,
    prompt_tokens=5,
    action_dim=3,
    chunk=2,
    lora_rank=2,
    repeat=1,
)


def test_a_gpu_is_needed_and_a_broken_check_does_not_hide_the_others_and_shows_in_the_exit_code(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        gpu.BENCHMARK.main([])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(gpu.CHECKS, "physics", lambda config: {}["nothing"])
    monkeypatch.setitem(gpu.CHECKS, "same", lambda config: {"seconds": 1.0})
    with pytest.raises(SystemExit, match="1"):
        gpu.BENCHMARK.main([f"out={tmp_path / 'gpu.json'}", "only=physics,same"])
    results = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert results == {"physics": {"failed": "KeyError: 'nothing'"}, "same": {"seconds": 1.0}}
    with pytest.raises(SystemExit, match="2"):
        gpu.BENCHMARK.main(["only=phisics"])


def test_the_toy_training_begins_on_policy_and_weights_are_compared():
    weights, ratio = gpu.trained_toy("cpu")
    assert ratio <= 1e-5
    assert gpu.compared(weights, weights)["max_abs_weight_difference"] == 0.0
    name = next(name for name, tensor in weights.items() if tensor.numel())
    moved = gpu.compared(weights, weights | {name: weights[name] + 0.5})
    assert moved["where"] == name
    assert moved["max_abs_weight_difference"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.accelerator
def test_an_openvla_of_toy_size_is_measured_on_an_accelerator() -> None:
    found = rollouts(TOY, "sim:0")
    one, chunk = found["autoregressive"], found["parallel"]
    assert one["actions_per_s"] == pytest.approx(2 / one["seconds"])
    assert chunk["actions_per_s"] == pytest.approx(2 * 2 / chunk["seconds"])
    network = meta_network(TOY)
    seen = network.vision_backbone.num_patches + 5
    for answer, tokens, read in ((one, 3, seen + 2), (chunk, 6, seen + 7)):
        flops = 2 * forward_flops(network, read, tokens)[0]
        assert answer["tflop_per_s"] == pytest.approx(flops / answer["seconds"] / 1e12)
        assert "mfu" not in answer  # of a device whose peak is not known
    update = training(TOY, "sim:0")
    assert update["samples_per_s"] == pytest.approx(2 / update["seconds"])


@pytest.mark.gpu
def test_every_check_passes_on_a_gpu(tmp_path):
    with pytest.raises(SystemExit, match="0"):
        gpu.BENCHMARK.main([f"out={tmp_path / 'gpu.json'}"])
    results = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert results["same"]["max_abs_weight_difference"] < 1e-2
    assert results["same"]["cpu_initial_log_ratio"] <= 1e-5
    assert results["same"]["cuda_initial_log_ratio"] < 1e-2
    assert results["language"]["cpu against cuda"]["max_abs_weight_difference"] < 1e-2
    assert results["language"]["sharded against not"]["max_abs_weight_difference"] < 1e-3
    assert results["language"]["cuda"]["mismatch"] < 1e-4 < results["language"]["adapters"]["mismatch"] < 0.5
    assert 0 < results["rollout"]["autoregressive"]["actions_per_s"] < results["rollout"]["parallel"]["actions_per_s"]
    assert results["lora"]["samples_per_s"] > 0

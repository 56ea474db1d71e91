"""The GPU benchmark: what it skips and how it fails, and those of its parts that a CPU can run."""

from __future__ import annotations

import json
import queue
import threading

import pytest
import torch

from experiments.bench.gpu import __main__ as gpu


def test_without_a_gpu_every_check_is_skipped_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu.BENCHMARK.main([f"out={tmp_path / 'gpu.json'}"]) == 0
    results = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert set(results) == set(gpu.CHECKS)
    assert all("CUDA device(s), found 0" in result["skipped"] for result in results.values())


def test_a_broken_check_does_not_hide_the_others_and_is_told_by_the_exit_code(monkeypatch, tmp_path):
    monkeypatch.setitem(gpu.CHECKS, "physics", lambda config: {}["nothing"])
    monkeypatch.setitem(gpu.CHECKS, "train", lambda config: {"seconds": 1.0})
    assert gpu.BENCHMARK.main([f"out={tmp_path / 'gpu.json'}", "only=physics,train"]) == 1
    results = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert results == {"physics": {"failed": "KeyError: 'nothing'"}, "train": {"seconds": 1.0}}
    assert gpu.BENCHMARK.main(["only=phisics"]) == 2


def test_two_members_find_sums_close_to_the_true_ones(tmp_path):
    answers: queue.Queue = queue.Queue()
    arguments = [(rank, 2, f"file://{tmp_path}/meet", answers, "cpu") for rank in range(2)]
    threads = [threading.Thread(target=gpu.member, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = sorted(answers.get(timeout=1) for _ in threads)
    assert [rank for rank, _, _ in found] == [0, 1]
    assert all(0 < error < 1e-5 for _, *errors in found for error in errors)


def test_the_toy_training_gives_equal_weights_on_equal_devices():
    (first, ratio), (second, _) = gpu.trained_toy("cpu"), gpu.trained_toy("cpu")
    assert gpu.compared(first, second)["max_abs_weight_difference"] == 0.0
    assert ratio <= 1e-5
    name = next(name for name, tensor in first.items() if tensor.numel())
    moved = gpu.compared(first, second | {name: second[name] + 0.5})
    assert moved["where"] == name
    assert moved["max_abs_weight_difference"] == pytest.approx(0.5, abs=1e-6)


def test_short_trainings_of_a_language_model_agree_on_equal_devices():
    results = gpu.language_on("cpu")
    assert results["cpu against cpu"]["max_abs_weight_difference"] == 0.0
    assert results["sharded against not"]["max_abs_weight_difference"] < 1e-4
    assert results["cpu"]["mismatch"] < 1e-4 < results["adapters"]["mismatch"] < 0.5  # bfloat16 rounds


@pytest.mark.gpu
def test_every_check_passes_on_a_gpu(tmp_path):
    assert gpu.BENCHMARK.main([f"out={tmp_path / 'gpu.json'}"]) == 0
    results = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert results["same"]["max_abs_weight_difference"] < 1e-2
    assert results["same"]["cpu_initial_log_ratio"] <= 1e-5
    assert results["same"]["cuda_initial_log_ratio"] < 1e-2
    assert max(iteration["losses/initial_log_ratio"] for iteration in results["train"].values()) < 1e-2
    assert results["language"]["cpu against cuda"]["max_abs_weight_difference"] < 1e-2
    assert results["language"]["sharded against not"]["max_abs_weight_difference"] < 1e-3
    assert results["language"]["cuda"]["mismatch"] < 1e-4 < results["language"]["adapters"]["mismatch"] < 0.5
    assert results["agrees"]["max_abs_log_prob_difference"] < 1e-2

"""What is executed of chunks: late ones, averaged ones, and what policies know of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_embodied.config import EnvConfig, PerturbConfig, PrefixSchedule
from rlinf_embodied.data.action_chunks import ActionChunks
from rlinf_embodied.errors import ConfigError
from tests.observations import env_spec, observed

ROWS, CHUNK = 3, 6
SEEN = observed(torch.zeros(ROWS, 2), ("go",) * ROWS)


def chunks_of(executed: int, ensemble: float | None = None, jitter: int = 0, **settings: object) -> ActionChunks:
    perturb = PerturbConfig(inference_delay=settings.pop("delay", 0), inference_jitter=jitter)  # pyright: ignore
    env = EnvConfig(task="t", num_envs=ROWS, chunk=CHUNK, execute_steps=executed, perturb=perturb, **settings)  # pyright: ignore
    spec = replace(env_spec("t", ROWS, CHUNK, 12, 1, 2), execute_steps=executed)
    made = ActionChunks(env, spec, ensemble)
    made.begin(np.arange(ROWS))
    return made


def numbered(first: int) -> Tensor:
    """A chunk of the actions first ... first + 5, plus 100 for each row."""
    return (torch.arange(CHUNK) + first + 100 * torch.arange(ROWS)[:, None])[..., None].float()


def test_what_is_left_is_executed_until_a_chunk_arrives() -> None:
    """As LeRobot's ActionQueue: a new chunk replaces the old one, less the actions that it comes too late for."""
    chunks = chunks_of(3, delay=2, rtc=PrefixSchedule.linear)
    pending = chunks.shown(SEEN).pending
    assert pending["delay"].tolist() == [0, 0, 0]  # robots wait for the first one
    assert pending["weights"].abs().max() == 0
    assert chunks.executed(numbered(0))[1, :3, 0].tolist() == [100, 101, 102]
    chunks.forget([2])  # its episode has ended
    pending = chunks.shown(SEEN).pending
    assert pending["delay"].tolist() == [2, 2, 0]
    assert pending["actions"][..., 0].tolist() == [[3, 4, 5, 0, 0, 0], [103, 104, 105, 0, 0, 0], [0] * 6]
    assert pending["weights"].tolist() == [[1, 1, 0.5, 0, 0, 0]] * 2 + [[0] * 6]
    late = chunks.executed(numbered(10))[:, :3, 0]
    assert late.tolist() == [[3, 4, 12], [103, 104, 112], [210, 211, 212]]
    chunks.shown(SEEN)
    assert chunks.executed(numbered(20))[0, :3, 0].tolist() == [13, 14, 22]


def test_delays_are_keyed_by_row_and_call() -> None:
    def delays(keys: np.ndarray) -> list[list[int]]:
        chunks = chunks_of(3, delay=1, jitter=2)
        chunks.begin(keys)
        found = []
        for _ in range(20):
            found.append(chunks.shown(SEEN).pending["delay"].tolist())
            chunks.executed(numbered(0))
        return found[1:]

    first = delays(np.array([5, 6, 7]))
    assert {delay for row in first for delay in row} == {1, 2, 3}
    assert [row[::-1] for row in delays(np.array([7, 6, 5]))] == first


@pytest.mark.parametrize("executed", [1, 2])
def test_predictions_of_a_step_are_averaged_the_oldest_weighs_most(executed: int) -> None:
    """Each step's predictions p_0 (the oldest), p_1 ...: sum exp(-m i) p_i / sum exp(-m i), arXiv:2304.13705."""
    coefficient, predictions, draw = 0.3, [], torch.Generator().manual_seed(0)
    chunks = chunks_of(executed, coefficient)
    for call in range(9):
        predictions.append(torch.randn(ROWS, CHUNK, 1, generator=draw))
        chunks.shown(SEEN)
        found = chunks.executed(predictions[-1])
        for step in range(executed):
            now = call * executed + step
            known = [chunk[:, now - n * executed] for n, chunk in enumerate(predictions) if now - n * executed < CHUNK]
            weights = torch.exp(-coefficient * torch.arange(len(known)))
            wanted = (torch.stack(known, -1) * weights).sum(-1) / weights.sum()
            torch.testing.assert_close(found[:, step], wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"executed": 4, "delay": 3},
            r"inference_jitter is 3, but it needs unexecuted actions of a chunk, and 4 of env.chunk=6",
        ),
        (
            {"executed": 0, "rtc": PrefixSchedule.exp},
            r"env.rtc is 'exp', but it needs .* \(env.chunk\), or execute fewer",
        ),
        (
            {"executed": 2, "delay": 1, "carry_over": True},
            r"env.carry_over is True, but unexecuted actions of a chunk are not",
        ),
    ],
)
def test_chunks_that_cannot_overlap_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chunks_of(**settings)

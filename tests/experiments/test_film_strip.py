"""The picture of an episode before and after RL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from experiments.examples import film_strip
from rlinf_embodied.embodied.outcome import write_mp4


def film(folder: Path, seed: int, success: int, shade: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    frames = [np.full((64, 64, 3), shade + 5 * i, dtype=np.uint8) for i in range(11)]
    write_mp4(folder / f"PickCube-v1--seed={seed}--success={success}.mp4", frames)


def test_the_first_episode_that_only_the_trained_policy_solves_is_shown(tmp_path: Path, capsys) -> None:
    for seed, before, after in ((9000, 1, 1), (9001, 1, 0), (9002, 0, 1)):
        film(tmp_path / "videos/step_0", seed, before, 20)
        film(tmp_path / "videos/step_4", seed, 1 - after, 90)  # neither the first nor the last evaluation
        film(tmp_path / "videos/step_16", seed, after, 120)
    film_strip.draw_strip(film_strip.Options(run=str(tmp_path), out=str(tmp_path / "strip.png")))
    assert "episode 9002, not solved before, solved after" in capsys.readouterr().out
    shown = np.asarray(Image.open(tmp_path / "strip.png")).astype(int)
    assert shown.shape == (
        2 * (64 + film_strip.CAPTION),
        film_strip.MOMENTS * (64 + film_strip.GAP) - film_strip.GAP,
        3,
    )
    first = [shown[top + 32, 32].mean() for top in (film_strip.CAPTION, 64 + 2 * film_strip.CAPTION)]
    last = [shown[top + 32, -32].mean() for top in (film_strip.CAPTION, 64 + 2 * film_strip.CAPTION)]
    assert np.allclose([first, last], [[20, 120], [70, 170]], atol=4)

"""Draws episodes as rows of frames: of a run, one before and after RL, or of a dataset, what its cameras saw.

python -m experiments.examples.film_strip run=runs/demo out=docs/demo.png    the first episode whose outcome changed
python -m experiments.examples.film_strip data=runs/pick out=pick.png        the first episodes of a dataset
"""

import re
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlinf_embodied.command_line import main
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.recorded import RecordedDataset
from rlinf_embodied.embodied.sources import open_dataset

MOMENTS = 6
GAP, CAPTION, LARGEST = 4, 26, 256  # pixels; the last is the height of a frame
WORDS = {"0": "not solved", "1": "solved"}


@dataclass(kw_only=True)
class Options:
    """The keys."""

    run: str = "runs/demo"  # a run folder
    data: str | None = None  # a dataset folder instead
    num_episodes: int = 3  # of a dataset
    out: str = "docs/demo.png"  # the picture


def episodes(folder: Path) -> dict[int, tuple[str, Path]]:
    """Returns ("0" or "1", video) by the episode's seed."""
    found = (re.fullmatch(r".*--seed=(\d+)--success=([01])\.mp4", path.name) for path in folder.iterdir())
    return {int(m[1]): (m[2], folder / m[0]) for m in found if m}


def choose(before: dict[int, tuple[str, Path]], after: dict[int, tuple[str, Path]]) -> int:
    """Returns the seed of the first episode that was solved only after, else of the first one."""
    both = sorted(before.keys() & after.keys())
    return next((seed for seed in both if before[seed][0] < after[seed][0]), both[0])


def moments(video: Path) -> list[np.ndarray]:
    """Returns MOMENTS frames uint8 [H, W, 3], evenly spaced from the first to the last."""
    with av.open(str(video)) as film:
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    return [frames[i] for i in np.linspace(0, len(frames) - 1, MOMENTS).round().astype(int)]


def strip(rows: dict[str, list[np.ndarray]]) -> Image.Image:
    """Returns the rows below each other, each under its caption."""
    height, width = next(iter(rows.values()))[0].shape[:2]
    if height > LARGEST:
        height, width = LARGEST, width * LARGEST // height
    canvas = Image.new("RGB", (MOMENTS * (width + GAP) - GAP, len(rows) * (height + CAPTION)), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=16)
    for row, (caption, frames) in enumerate(rows.items()):
        top = row * (height + CAPTION)
        draw.text((2, top + 3), caption, fill="black", font=font)
        for column, frame in enumerate(frames):
            canvas.paste(Image.fromarray(frame).resize((width, height)), (column * (width + GAP), top + CAPTION))
    return canvas


def of_dataset(dataset: RecordedDataset, number: int) -> dict[str, list[np.ndarray]]:
    """Returns MOMENTS frames of every camera in the first episodes."""
    rows = {}
    for episode in range(min(number, dataset.num_episodes)):
        frames = dataset.frames(episode)
        chosen = np.linspace(frames.start, frames.stop - 1, MOMENTS).round().astype(int)
        for camera in dataset.cameras:
            caption = f"{episode} {camera}: {dataset.task(frames.start)}"
            rows[caption] = list(dataset.images(camera, chosen))
    return rows


def draw_strip(own: Options) -> None:
    """Writes the picture of a run folder with videos of before and after, or of a dataset."""
    if own.data is not None:
        dataset = open_dataset(own.data, "data")
        require(bool(dataset.cameras), "data", own.data, "it has no images", "give a dataset with images")
        strip(of_dataset(dataset, own.num_episodes)).save(own.out)
        print(f"{own.out}: {dataset.num_episodes} episodes, {len(dataset)} frames, {', '.join(dataset.cameras)}")
        return
    steps = sorted(Path(own.run, "videos").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    rule = f"its videos are of {len(steps)} evaluations, and before and after are shown"
    require(len(steps) > 1, "run", own.run, rule, "train with eval.record_video=true")
    before, after = episodes(steps[0]), episodes(steps[-1])
    seed = choose(before, after)
    videos = {"before RL": before[seed], "after RL": after[seed]}
    picture = strip({f"{when}: {WORDS[won]} (episode {seed})": moments(video) for when, (won, video) in videos.items()})
    picture.save(own.out)
    print(f"{own.out}: episode {seed}, {WORDS[before[seed][0]]} before, {WORDS[after[seed][0]]} after")


if __name__ == "__main__":
    main(draw_strip, Options)

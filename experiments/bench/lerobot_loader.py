"""The other arm of loader.py, run by the Python of lerobot's environment: reads datasets through lerobot's own loader.

Reads "<folder> <number of frames>" from its input, line by line, and answers with the processor seconds and the frames.
"""

import sys
import time

import torch

torch.set_num_threads(1)


def batches(folder: str, size: int, chunk: int):
    """Yields batches without end: images, vectors, and a chunk of actions from each frame on, in a random order."""
    from lerobot.datasets import lerobot_dataset  # pyright: ignore[reportMissingImports]

    fps = lerobot_dataset.LeRobotDatasetMetadata("local/set", root=folder).fps
    windows = {"action": [k / fps for k in range(chunk)]}
    dataset = lerobot_dataset.LeRobotDataset("local/set", root=folder, delta_timestamps=windows, video_backend="pyav")
    while True:
        yield from torch.utils.data.DataLoader(dataset, batch_size=size, shuffle=True, drop_last=True)


def main(size: int, chunk: int) -> None:
    opened = {}
    for line in sys.stdin:
        folder, number = line.rsplit(maxsplit=1)
        stream = opened.setdefault(folder, batches(folder, size, chunk))
        done, start = 0, time.process_time()
        while done < int(number):
            done += len(next(stream)["action"])
        print("answer", time.process_time() - start, done, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

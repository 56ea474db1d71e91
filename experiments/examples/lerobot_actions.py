"""Loads a policy's folder with the real lerobot and prints nothing but what it does wrong; run by its own Python.

.venv-lerobot/bin/python experiments/examples/lerobot_actions.py <folder> <observations.npz> <actions.npz>

observations: the features of a dataset by name (images uint8 [M, H, W, 3], state [M, P]), task [M], noise [M, C, 32].
actions [M, C, A] are what lerobot's processors and policy make of them.  Backbones are looked up in the folder's own
part, not on the hub.  Imports nothing of this project.
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np


def predict(folder: Path, given: dict[str, np.ndarray]) -> np.ndarray:
    """Returns lerobot's actions [M, C, A] in the units of the data."""
    import torch
    from lerobot.configs.policies import PreTrainedConfig  # pyright: ignore[reportMissingImports]
    from lerobot.policies import factory  # pyright: ignore[reportMissingImports]

    config = PreTrainedConfig.from_pretrained(folder)
    policy = factory.get_policy_class(config.type).from_pretrained(folder, config=config).eval()
    before, after = factory.make_pre_post_processors(config, pretrained_path=str(folder))
    actions = []
    for row, task in enumerate(given["task"]):
        item: dict[str, str | torch.Tensor] = {"task": str(task)}
        for name in given.keys() - {"task", "noise"}:
            value = torch.from_numpy(given[name][row])
            item[name] = value.permute(2, 0, 1).float() / 255.0 if value.ndim == 3 else value.float()
        with torch.no_grad():
            noise = torch.from_numpy(given["noise"][row : row + 1])
            chunk = policy.predict_action_chunk(before(item), noise=noise)
        actions.append(after(chunk)[0].numpy())
    return np.stack(actions)


def main() -> None:
    folder, observations, out = (Path(word).absolute() for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as place:  # a relative folder of a hub's name is taken in place of the hub
        os.chdir(place)
        for name in ("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "google/paligemma-3b-pt-224"):
            Path(name).parent.mkdir()
            Path(name).symlink_to(folder / "backbone")
        np.savez(out, actions=predict(folder, dict(np.load(observations))))


if __name__ == "__main__":
    main()

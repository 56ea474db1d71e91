"""From the images that LIBERO renders to the actions that it takes, compared with the goldens of the reference code."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvla_folders as toys
import torch
from conftest import REPOSITORY
from libero_stand_in import Adding, StandIn
from PIL import Image
from safetensors.torch import load_file

from envs.episodes import EpisodeEnv
from envs.foreign.adapter import Facts
from envs.foreign.env import ForeignSimulator
from envs.foreign.process import Local
from envs.foreign.worker import Rows
from envs.libero import LiberoOptions
from policies.openvla.policy import OpenVLAPolicy
from policies.openvla.prompt import rows_of
from rlinf_embodied.compose import compose_train
from tests.oracles.test_oracles import LIMIT, expanded

ORACLES = REPOSITORY / "tests" / "oracles" / "openvla"
AGENT, WRIST = CAMERAS = ("agentview", "robot0_eye_in_hand")
# sha256 of case0.center_cropped: TensorFlow's JPEG and Lanczos resize to 224, then the crop, of image_ops/image.png
CROPPED = "2e2f84ce20cecd3bbc2eebc5286d838a5f8be7201914e7cd40399107366404a3"
PLAIN = ["policy.options.resize=bicubic", "policy.options.crop_area=1.0"]  # goldens of actions begin behind both
DISCRETE = ["policy.options.head=discrete", "policy.options.proprio=false", f"env.cameras=[{AGENT}]"]


def picture(path: str) -> np.ndarray:
    return np.array(Image.open(ORACLES / path).convert("RGB"))


def on_libero(name: str, tmp_path: Path, pictures: dict[str, list[np.ndarray]], words: list[str]):
    """The env, of whose task k the cameras show the k-th pictures, and the preset's policy of an oracle's folder."""
    goldens, facts = (ORACLES / name / "golden" / file for file in ("golden.safetensors", "golden.json"))
    cases = json.loads(facts.read_text())["cases"]

    class Showing(Adding):
        def image(self, renderer: object, camera: str, size: int) -> np.ndarray:
            assert pictures[camera][self.start.task].shape == (size, size, 3)
            turned = pictures[camera][self.start.task][::-1, ::-1]  # as the benchmark returns it
            return turned[::-1]  # upright

    class Suite(StandIn):
        def scene(self, task: int) -> Showing:
            return Showing()

    rows = len(pictures[AGENT])
    base = ["env=libero", "policy=openvla_oft_libero", "warm_start.checkpoint=x"]
    config = compose_train([*base, *words, f"env.num_envs={rows}", f"env.block_size={rows}"])
    adapter = Suite(config.env.task, LiberoOptions())
    tasks = [(f"task {k}", case["instruction"]) for k, case in enumerate(cases)]
    sim = ForeignSimulator(
        config.env,
        adapter,
        Facts(tasks, 7, {"proprio": 8, "object": 3}),
        [range(rows)],
        [Local(Rows(adapter, config.env.cameras, config.env.obs_size))],
    )
    env = EpisodeEnv(config.env, sim, lambda: sim.tasks, render_final=False)
    folder = expanded(ORACLES / name / "checkpoint", tmp_path / name)
    (folder / "tokenizer.json").write_bytes((toys.write_source(tmp_path / "toy") / "tokenizer.json").read_bytes())
    policy = OpenVLAPolicy.from_folder(folder, env.spec, config.policy)
    return env, policy, load_file(goldens), [text for _, text in tasks]


def to_libero(actions: torch.Tensor) -> torch.Tensor:
    """The reference's normalize_gripper_action(binarize=True), invert_gripper_action, and the controller's clip."""
    gripper = -torch.sign(2 * actions[..., -1:] - 1)
    return torch.cat([actions[..., :-1], gripper], -1).clamp(-1, 1)


def test_a_token_policy_acts_as_in_simplevla_rl(tmp_path) -> None:
    shown = {AGENT: [picture(f"openvla_oft_discrete/golden/rl_image{k}.png") for k in range(2)]}
    words = [*DISCRETE, *PLAIN, "env.obs_size=224"]
    env, policy, goldens, texts = on_libero("openvla_oft_discrete", tmp_path, shown, words)
    for text, ids in zip(texts, goldens["simplevla.input_ids"], strict=True):
        policy._prompts[text] = rows_of([ids[ids != 32000].tolist()], 32000, 48)
    actions = policy.act(policy.encode(env.reset([0, 1])), None, 1.0).actions
    torch.testing.assert_close(actions.double(), to_libero(goldens["simplevla.greedy_actions_f64"]), atol=1e-6, rtol=0)


def test_an_l1_policy_with_two_cameras_acts_as_in_openvla_oft(tmp_path) -> None:
    shown = {name: picture(f"openvla_oft_l1/golden/case0_image{k}.png") for k, name in enumerate(CAMERAS)}
    rendered = {name: [shown[AGENT]] for name in CAMERAS}
    env, policy, goldens, texts = on_libero("openvla_oft_l1", tmp_path, rendered, PLAIN)
    seen = env.reset([0])
    policy._prompts[texts[0]] = rows_of(goldens["case0.input_ids_processor"].tolist(), 32000, 48)
    images = {name: torch.from_numpy(image)[None] for name, image in shown.items()}  # the oracle's have two sizes
    seen = replace(seen, images=images).with_proprio(goldens["case0.proprio_raw_f64"][None].float())
    actions = policy.act(policy.encode(seen), None, 1.0).actions
    torch.testing.assert_close(actions[0].double(), to_libero(goldens["case0.actions_f64"]), atol=LIMIT, rtol=0)


def test_images_go_through_what_the_authors_evaluation_does_to_them(tmp_path) -> None:
    agent, wrist = picture("image_ops/image.png"), picture("openvla_oft_l1/golden/case0_image0.png")
    env, policy, _, _ = on_libero("openvla_oft_l1", tmp_path, {AGENT: [agent], WRIST: [wrist]}, [])
    images = policy.encode(env.reset([0]))["images"][0]
    assert images.shape == (2, 224, 224, 3)
    assert hashlib.sha256(images[0].numpy().tobytes()).hexdigest() == CROPPED
    assert np.array_equal(images[1], policy._processor.squared(wrist))

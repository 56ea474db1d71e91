"""pi0, pi0.5 and SmolVLA give the float32 results of LeRobot 0.6.1 (tests/oracles/README.md).

The goldens of the repository are a part of the whole set; RLINF_LEROBOT_ORACLES names another set of the same layout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from policies.flow import drawn_to
from policies.pi.config import Family, PiConfig, read_config
from policies.pi.folder import read_checkpoint, write_checkpoint
from policies.pi.network import FlowNetwork, Prefix, new_network, placed
from policies.pi.processors import Processors, RelativeActions, prompt_for, resized
from rlinf_embodied.config import NormMode, PrefixSchedule
from rlinf_embodied.data.action_chunks import prefix_weights
from rlinf_embodied.data.normalisation import Normalisation

ORACLES = Path(os.environ.get("RLINF_LEROBOT_ORACLES", REPOSITORY / "tests" / "oracles" / "lerobot"))
LIMIT = 1e-4  # of a difference divided by the largest golden value, or by 1; integers must be equal
GIVEN = r"(case\d\.)?(state_raw|noise|t[\d.]+\.x_t|action_raw|time|action_is_pad)|tokenizer|bf16.*"  # inputs
LEFT_OUT = r"vision_last.*|.*att_masks|t.*pad_masks|losses_padded|loss_without.*"  # other forms of the same
FAMILIES = [family.value for family in Family]


def backbone_of(name: str, out: Path) -> Path:
    """Writes what a folder's backbone/ holds: the tokenizer, and sizes that config.json only names."""
    source = ORACLES / name
    shutil.copytree(source / ("backbone" if (source / "backbone").is_dir() else "tokenizer"), out)
    if name != "smolvla":
        shutil.copy(source / "toy_sizes.json", out / "sizes.json")
    return out


class Oracle:
    """A toy checkpoint, inputs, and what LeRobot made of them."""

    def __init__(self, name: str, tmp_path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.folder, self.backbone = ORACLES / name / "golden", backbone_of(name, tmp_path / f"{name} {dtype}")
        self.goldens = load_file(self.folder / "golden.safetensors")
        self.facts = json.loads((self.folder / "golden.json").read_text())
        self.checkpoint = read_checkpoint(ORACLES / name / "checkpoint", self.backbone, dtype)
        self.network: Any = self.checkpoint.network
        self.config: PiConfig = self.checkpoint.config
        self.processors: Processors = self.checkpoint.processors
        self.smolvla = self.config.family is Family.smolvla

    def of(self, beginning: str) -> dict[str, Tensor]:
        parts = self.goldens.items()
        return {name.removeprefix(beginning): tensor for name, tensor in parts if name.startswith(beginning)}

    def cases(self) -> dict[str, dict]:
        present = {name.partition(".")[0] for name in self.goldens}
        return {case["name"]: case for case in self.facts["cases"] if case["name"] in present}

    def images(self, case: dict) -> tuple[list[Tensor], list[Tensor]]:
        rows, images, shown = len(case["tasks"]), [], []
        for camera in (name for name in self.config.cameras if name in case["pngs"]):
            pixels = [np.array(Image.open(self.folder / path).convert("RGB")) for path in case["pngs"][camera]]
            shows = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255.0
            images.append(resized(shows, self.config.image_size, centred=not self.smolvla))
            mask = case.get("padding_mask_of_first_camera") if not shown else None
            shown.append(torch.ones(rows, dtype=torch.bool) if mask is None else torch.tensor(mask))
        missing = len(self.config.cameras) - len(images)
        missing = min(missing, case["empty_cameras"]) if self.smolvla else missing
        images += [torch.full_like(images[0], -1)] * missing
        return images, [*shown, *[torch.zeros(rows, dtype=torch.bool)] * missing]

    def prefix(self, case: dict, state: Tensor) -> tuple[Prefix, dict[str, Tensor]]:
        """The prefix of a case, and everything on the way to it by its golden's name."""
        images, shown = self.images(case)
        normalised = self.processors.normalised_state(state)
        prompts, network = self.processors.prompts(case["tasks"], normalised), self.network
        assert prompts == case.get("prompt_after_processor", prompts)
        ids, present = self.checkpoint.tokenizer(prompts)
        embeddings, valid = network.sequence([network.look(image) for image in images], shown, ids, present)
        padded = F.pad(normalised, (0, self.config.max_state_dim - normalised.shape[1]))
        context = network.text.read(embeddings, valid)
        prefix = network.prefix(context, padded)
        hidden: Any = context.hidden
        if self.smolvla:
            embeddings = torch.cat([embeddings, network.state_proj(padded)[:, None]], 1)
            hidden = torch.cat([hidden, prefix.hidden], 1)
        found = {"state_normalized": normalised, "tokens": ids, "token_mask": present, "prefix_embs": embeddings}
        found |= {f"image{k}": image for k, image in enumerate(images)}
        found |= {f"image_mask{k}": mask for k, mask in enumerate(shown)}
        _, found["prefix_position_ids"], sees = placed(prefix.valid, None)
        if self.smolvla:  # the last token is the state, which no other sees
            sees = sees & (torch.arange(sees.shape[1]) < sees.shape[1] - 1).logical_or(torch.eye(sees.shape[1]).bool())
        found["prefix_att_2d"] = sees
        found |= {"prefix_pad_masks": prefix.valid, "prefix_hidden": hidden, "state_padded": padded}
        for k, (keys, values) in enumerate(prefix.layers):
            found |= {f"kv.{k}.keys": keys, f"kv.{k}.values": values}
        return prefix, found


def integrated(network: FlowNetwork, prefix: Prefix, x: Tensor) -> list[Tensor]:
    """The chunk before each step and at the end, as LeRobot integrates."""
    chain, steps = [x], network.config.steps
    for k in range(steps):
        time = torch.full((len(x),), 1.0 + k * (-1.0 / steps))
        chain.append(chain[-1] + (-1.0 / steps) * network.velocity(prefix, chain[-1], time))
    return chain


def of_case(oracle: Oracle, name: str) -> dict[str, Tensor]:
    given, network, config = oracle.of(f"{name}."), oracle.network, oracle.config
    prefix, found = oracle.prefix(oracle.cases()[name], given["state_raw"])
    for golden in [key for key in given if key.endswith(".x_t")]:
        at, time = golden.removesuffix("x_t"), torch.full((len(given[golden]),), float(golden[1:-4]))
        suffix = network.suffix(prefix, given[golden], time)
        if suffix.condition is not None:
            found[f"{at}adarms_cond"] = suffix.condition
        found[f"{at}time_emb"], found[f"{at}suffix_embs"] = network.time_embedding(time), suffix.embeddings
        found[f"{at}suffix_hidden"] = network.acting(prefix, suffix)
        found[f"{at}v_t"] = network.velocity(prefix, given[golden], time)
        _, (found[f"{at}suffix_position_ids"], found[f"{at}full_att_2d"]) = network.sight(prefix, suffix)
    chain = integrated(network, prefix, given["noise"])
    found["x_steps"], found["chunk_padded"] = torch.stack(chain, 1), chain[-1]
    found["actions"] = oracle.processors.robot_actions(chain[-1][..., : config.action_dim], given["state_raw"])
    return found


def of_training(oracle: Oracle) -> dict[str, Tensor]:
    given, network, config = oracle.of("train."), oracle.network, oracle.config
    name = oracle.facts["train"]["uses_pictures_prompt_state_of"]
    state = oracle.goldens[f"{name}.state_raw"]
    actions = oracle.processors.normalised_actions(given["action_raw"], state)
    found = {"action_normalized": actions}
    actions = F.pad(actions, (0, config.max_action_dim - config.action_dim))
    with torch.enable_grad():
        prefix, _ = oracle.prefix(oracle.cases()[name], state)
        x = torch.lerp(actions, given["noise"], given["time"][:, None, None])
        found["v_t_from_cache"] = network.velocity(prefix, x, given["time"])
        losses = (given["noise"] - actions - found["v_t_from_cache"]).square()[..., : config.action_dim]
        valid = ~given.get("action_is_pad", torch.zeros(losses.shape[:2], dtype=torch.bool))
        found["loss_per_sample"] = (losses.mean(2) * valid).sum(1) / valid.sum(1)
        found["loss"] = (losses.mean(2) * valid).sum() / valid.sum()
        found["loss"].backward()
    parameters: dict[str, Any] = dict(network.named_parameters())
    for golden in given:
        if golden.startswith("grad."):
            found[golden] = parameters[golden.removeprefix("grad.model.")].grad
    reached = {id(p) for p in parameters.values() if p.grad is not None}
    trained = {id(p) for p in network.trained(language=True, vision=True)}
    assert trained <= reached
    return found


@pytest.fixture
def oracle(request, tmp_path) -> Oracle:
    return Oracle(request.param, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("oracle", FAMILIES, indirect=True)
def test_a_network_and_its_processors_give_the_goldens(oracle: Oracle) -> None:
    computed = {f"{name}.": of_case(oracle, name) for name in oracle.cases()} | {"train.": of_training(oracle)}
    for beginning, found in computed.items():
        wanted = oracle.of(beginning)
        without = [name for name in wanted if not re.fullmatch(f"{GIVEN}|{LEFT_OUT}", name)]
        assert set(without) <= set(found), beginning
        for name in without:
            require_near(f"{beginning}{name}", found[name], wanted[name], found.get("prefix_pad_masks"), oracle.smolvla)


def require_near(name: str, here: Tensor, wanted: Tensor, valid: Tensor | None, smolvla: bool) -> None:
    """Equal to LIMIT; SmolVLA's prefix where it is valid: padding is computed otherwise, and nothing reads it."""
    if name.partition(".")[2].startswith(("prefix", "kv.")) and smolvla and valid is not None:
        axis, length = 2 if ".kv." in name else 1, valid.shape[1]
        wanted = wanted.narrow(axis, 0, length)  # config.prefix_length may ask for more padding
        wanted = wanted[..., :length] if name.endswith("2d") else wanted
        mask = valid.view(len(valid), *[1] * (axis - 1), -1, *[1] * (wanted.ndim - axis - 1))
        if wanted.is_floating_point():
            here, wanted = here * mask, wanted * mask
    if name.endswith("full_att_2d") and valid is not None:  # its columns: prefix, with that padding, and actions
        wanted = torch.cat([wanted[..., : valid.shape[1]], wanted[..., -wanted.shape[1] :]], -1)
    assert here.shape == wanted.shape, name
    difference = (here.double() - wanted.double()).abs().max()
    scale = max(1.0, float(wanted.double().abs().max()))
    assert difference <= (LIMIT * scale if wanted.is_floating_point() else 0), (
        f"{name}: {difference:.1e} of {scale:.1e}"
    )


def weights_of(schedule: str, start: int, end: int, total: int) -> Tensor:
    return prefix_weights(PrefixSchedule(schedule.lower()), torch.tensor([start]), end, total)


def guided(v: Tensor, x: Tensor, time: float, left: Tensor, case: dict) -> Tensor:
    """The velocity from noise (time 1) to actions (0) that is drawn to what is left of a chunk."""
    end = min(case["execution_horizon"] or left.shape[1], left.shape[1])
    weights = weights_of(case["schedule"], case["inference_delay"], end, x.shape[1]).expand(len(x), -1)
    left = F.pad(left, (0, x.shape[2] - left.shape[2], 0, x.shape[1] - left.shape[1]))
    return -drawn_to(-v, x, torch.full((len(x),), 1.0 - time), left, weights, case["max_guidance_weight"])


@torch.no_grad()
@pytest.mark.parametrize("oracle", FAMILIES, indirect=True)
def test_real_time_chunking_gives_the_goldens(oracle: Oracle) -> None:
    for number, case in enumerate(oracle.facts["rtc"]):
        given, network, steps = oracle.of(f"{case['case']}."), oracle.network, oracle.config.steps
        prefix, _ = oracle.prefix(oracle.cases()[case["case"]], given["state_raw"])
        x, left = given["noise"], oracle.goldens["rtc.prev_chunk_left_over"]
        for k in range(steps):
            v = network.velocity(prefix, x, torch.full((len(x),), 1.0 - k / steps))
            x = x - guided(v, x, 1.0 - k / steps, left, case) / steps
        require_near(f"rtc {number}", x, oracle.goldens[f"rtc.{number}.chunk_padded"], None, False)


@torch.no_grad()
@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_bfloat16_is_as_near_to_float32_as_in_the_reference(name, tmp_path) -> None:
    oracle = Oracle(name, tmp_path, torch.bfloat16)
    prefix, _ = oracle.prefix(oracle.cases()["case1"], oracle.goldens["case1.state_raw"])
    chunk = integrated(oracle.network, prefix, oracle.goldens["case1.noise"])[-1]
    allowed = oracle.facts["bf16_minus_fp32_max_abs"]
    assert (chunk - oracle.goldens["case1.chunk_padded"]).abs().max() <= allowed
    assert (chunk - oracle.goldens["case1.bf16.chunk_padded"]).abs().max() <= 2 * allowed
    kinds = [str(parameter.dtype) for parameter in oracle.network.parameters()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == oracle.facts["bf16_parameter_dtypes"]


@torch.no_grad()
@pytest.mark.parametrize("oracle", FAMILIES, indirect=True)
def test_a_folder_written_again_is_the_same(oracle: Oracle, tmp_path) -> None:
    write_checkpoint(oracle.checkpoint, tmp_path / "out")
    before = oracle.checkpoint.folder
    for path in before.iterdir():
        if path.suffix == ".json":
            assert json.loads((tmp_path / "out" / path.name).read_text()) == json.loads(path.read_text()), path.name
        else:
            left, right = load_file(tmp_path / "out" / path.name), load_file(path)
            assert left.keys() == right.keys()
            assert all(torch.equal(left[key], right[key]) for key in left)
    again = read_checkpoint(tmp_path / "out")  # with the backbone that was written
    assert again.config == oracle.config


@pytest.mark.skipif(not (ORACLES / "pi0" / "checkpoint_hub_names").is_dir(), reason="the set has no such folder")
def test_names_as_on_the_hub_give_the_same_network(tmp_path) -> None:
    oracle = Oracle("pi0", tmp_path)
    there = read_checkpoint(ORACLES / "pi0" / "checkpoint_hub_names", oracle.backbone).network.state_dict()
    here = oracle.network.state_dict()
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in here if "lm_head" not in name)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_shapes_at_full_size_are_those_of_the_reference(name, tmp_path) -> None:
    full = ORACLES / "full_size"
    raw = json.loads((full / f"{name}_defaults.json").read_text())["config_defaults"]
    raw["output_features"] = {"action": {"type": "ACTION", "shape": [7]}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with torch.device("meta"):
        network = new_network(read_config(tmp_path / "config.json", tmp_path / "no backbone"))
    shapes = {f"model.{key}": list(tensor.shape) for key, tensor in network.state_dict().items()}
    known = json.loads((full / f"{name}_keys.json").read_text())
    assert shapes == known["shapes"]
    only = sum(p.numel() for p in network.trained(language=False, vision=False))
    assert only == known.get("trainable_by_default", only)


# ----------------------------------------------------------------------------------------------------------- processors
@cache
def plain_functions() -> tuple[dict, dict[str, Tensor]]:
    folder = ORACLES / "processors"
    return json.loads((folder / "golden.json").read_text()), load_file(folder / "golden.safetensors")


def near(here: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(here, wanted, rtol=1e-5, atol=1e-5)


def statistics() -> dict[str, Tensor]:
    return {kind: torch.tensor(value) for kind, value in plain_functions()[0]["normalization"]["stats"].items()}


@pytest.mark.parametrize("mode", list(NormMode))
def test_a_feature_is_normalised_as_by_the_reference(mode: NormMode) -> None:
    _, goldens = plain_functions()
    made = Normalisation("action", mode, statistics())
    near(made.forward(goldens["norm.input_raw"]), goldens[f"norm.{mode.value}.normalized"])
    near(made.inverse(goldens["norm.input_normalized"]), goldens[f"norm.{mode.value}.unnormalized"])


def test_relative_actions_are_those_of_the_reference() -> None:
    facts, goldens = plain_functions()
    joints, names = tuple(facts["relative"]["exclude_joints"]), tuple(facts["relative"]["action_names"])
    relative = RelativeActions(enabled=True, exclude_joints=joints, action_names=names)
    actions, offset = goldens["relative.action"], relative.offset(goldens["relative.state"], len(names))
    near(actions - offset, goldens["relative.relative"])
    near(actions - offset + offset, goldens["relative.back"])
    wanted = goldens["relative.short_mask"]
    number = 1 + max(d for d in range(len(names)) if not torch.equal(wanted[..., d], actions[..., d]))
    short = RelativeActions(enabled=True, exclude_joints=joints, action_names=names[:number])
    near(actions - short.offset(goldens["relative.state"], len(names)), wanted)


def test_chunks_are_drawn_to_what_is_left_as_by_the_reference() -> None:
    facts, goldens = plain_functions()
    for case in facts["rtc_weights"]:
        near(weights_of(case["schedule"], *case["start_end_total"])[0], torch.tensor(case["weights"]))
    x, left = goldens["rtc.x_t"], goldens["rtc.prev"]
    v = torch.tanh(x @ goldens["rtc.A"])
    for number, case in enumerate(facts["rtc_guidance"]["calls"]):
        near(guided(v, x, case["time"], left, case), goldens[f"rtc.{number}.guided_v"])


@pytest.mark.parametrize(("name", "state_mode"), [("pi0", NormMode.mean_std), ("pi05", NormMode.quantiles)])
def test_relative_actions_pass_through_both_processors(name, state_mode, tmp_path) -> None:
    facts, goldens = plain_functions()
    config = read_config(ORACLES / name / "checkpoint" / "config.json", backbone_of(name, tmp_path / "backbone"))
    own = facts["pipeline_state_stats"]
    kinds = {kind: torch.tensor(value) for kind, value in own.items()}
    names, joints = facts["relative"]["action_names"], facts["relative"]["exclude_joints"]
    made = Processors(
        family=config.family,
        state=Normalisation("observation.state", state_mode, kinds),
        action=Normalisation("action", state_mode, statistics()),
        relative=RelativeActions(enabled=True, exclude_joints=tuple(joints), action_names=tuple(names)),
    )
    state = goldens["relative.state"]
    normalised = made.normalised_state(state)
    near(normalised, goldens[f"pipeline.{name}.state"])
    near(made.normalised_actions(goldens["relative.action"], state), goldens[f"pipeline.{name}.action"])
    near(made.robot_actions(goldens["norm.input_normalized"], state), goldens[f"pipeline.{name}.post"])
    texts = facts[f"pipeline_{name}_task_after"]
    if name == "pi05":
        left = made.normalised_actions(goldens["relative.action"][:1], state[:1])  # of a chunk, seen from a new state
        near(left, goldens["relative.reanchored_prefix"])
        assert [
            prompt_for(config.family, text.split(",")[0][6:], row) for text, row in zip(texts, normalised, strict=True)
        ] == texts


def test_images_are_resized_as_by_the_reference() -> None:
    facts, goldens = plain_functions()
    folder = ORACLES / "processors"
    for number, case in enumerate(facts["resize"]):
        if not (folder / case["png"]).is_file():
            continue
        pixels = torch.from_numpy(np.array(Image.open(folder / case["png"]).convert("RGB")))
        for name, centred in (("centred", True), ("top_left", False)):
            found = (resized(pixels.permute(2, 0, 1)[None] / 255.0, tuple(case["to_hw"]), centred) + 1) / 2
            wanted, every = goldens[f"resize.{number}.{name}"], case["stored_every"]
            near(found[..., ::every, ::every], wanted)

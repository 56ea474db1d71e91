"""The networks give the float32 results of the reference code of OpenVLA and OpenVLA-OFT, see README.md.

rlinf.*      rows padded after BOS, action tokens only, no stop token at the end
simplevla.*  rows as each alone, action tokens only
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from PIL import Image
from safetensors.torch import load_file, save_file

from policies.openvla.actions import OFT_EPSILON, ActionTokens, range_of
from policies.openvla.config import Decoding, Head, OpenVLAOptions
from policies.openvla.decoding import TokenDistribution, decode
from policies.openvla.folder import read_checkpoint, with_oft
from policies.openvla.images import read_processor
from policies.openvla.network import causal_mask
from policies.openvla.prompt import rows_of
from policies.openvla.vision import patch_features

ORACLES = REPOSITORY / "tests" / "oracles" / "openvla"
LIMIT = 1e-4  # of a difference divided by the largest golden value; integers must be equal
INPUTS = r"tok\.encode_in|tok\.decode_ids|.*\.input_ids(_processor)?|.*\.proprio_raw_f64|rlinf\.train_tokens"
CHUNK = 8


class Oracle:
    """A toy checkpoint, inputs, and what the reference code made of them."""

    def __init__(self, name: str, tmp_path: Path) -> None:
        self._images = ORACLES / name / "golden"
        self.goldens = load_file(self._images / "golden.safetensors")
        self.facts = json.loads((self._images / "golden.json").read_text())
        self.checkpoint = read_checkpoint(expanded(ORACLES / name / "checkpoint", tmp_path / name))
        config = self.checkpoint.config
        self.pad, self.columns = config.pad_token_id, config.action_columns
        self.tokens = ActionTokens(config.num_tokens, config.num_bins)
        self._processor = read_processor(self.checkpoint.folder, config)

    def pixels(self, *names: str) -> torch.Tensor:
        images = [np.array(Image.open(self._images / name).convert("RGB")) for name in names]
        squared = np.stack([self._processor.squared(image) for image in images])
        return self._processor.normalised(torch.from_numpy(squared)[None])

    def range(self, section: str = "action"):
        key = self.facts.get("unnorm_key") or self.facts["cases"][1]["unnorm_key"]
        return range_of(self.checkpoint.statistics, key, section)

    def oft(self, **options: object):
        made = OpenVLAOptions(decoding=Decoding.parallel, unnorm_key=self.facts["unnorm_key"], **options)
        return with_oft(self.checkpoint, made, CHUNK, 7, 8)


def expanded(folder: Path, out: Path) -> Path:
    """Writes the full form of a checkpoint of which no golden reads what is left out: zeros come back."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("trimmed.*"))
    stored = load_file(folder / "trimmed.safetensors")
    files: dict[str, dict[str, torch.Tensor]] = {}
    for place, shape in json.loads((folder / "trimmed.json").read_text()).items():
        file, name = place.split("/")
        rows, values = stored.get(f"rows/{place}"), stored.get(place)
        tensor = torch.zeros(shape, dtype=torch.bfloat16) if values is None or rows is not None else values
        if values is not None and rows is not None:
            tensor[rows] = values
        files.setdefault(file, {})[name] = tensor
    for file, tensors in files.items():
        if file.endswith(".safetensors"):
            save_file(tensors, out / file, metadata={"format": "pt"})
        else:
            torch.save(tensors, out / file)
    return out


def of_openvla(oracle: Oracle) -> dict[str, object]:
    goldens, network, case = oracle.goldens, oracle.checkpoint.network, oracle.facts["cases"][1]
    pixels, rows = oracle.pixels(case["image"]), rows_of(goldens["case1.input_ids_processor"].tolist(), oracle.pad)
    visual = network.patches(pixels)
    sequence = network.sequence(rows, visual)
    tokens, hidden = decode(network, rows, pixels, 7, TokenDistribution(slice(0, network.output_layer.out_features)))
    normalised = oracle.tokens.decode(tokens[0].numpy())
    return {
        "tok.encode_ids": oracle.tokens.encode(goldens["tok.encode_in"].numpy()),
        "tok.decode_actions_f64": oracle.tokens.decode(goldens["tok.decode_ids"].numpy()),
        "case1.pixel_values_every7th": pixels[..., ::7, ::7],
        "case1.pixel_values_sum_f64": pixels.double().sum((-1, -2)),
        "case1.dino_features": patch_features(network.vision_backbone.featurizer, pixels[:, :3]),
        "case1.projected_patches": visual,
        "case1.input_ids_model": rows.ids,
        "case1.hidden_states_final": network.hidden(
            sequence.embeddings, sequence.positions, causal_mask(sequence.present)
        ),
        "case1.action_tokens": tokens[0],
        "case1.step_logits_cols_31744_32064": network.output_layer(hidden[0])[:, 31744:32064],
        "case1.actions_normalized_f64": normalised,
        "case1.actions_f64": oracle.range().expand(normalised),
    }


def of_oft_l1(oracle: Oracle) -> dict[str, object]:
    goldens, model = oracle.goldens, oracle.oft(head=Head.l1, proprio=True)
    pixels = oracle.pixels(*oracle.facts["cases"][0]["images"])
    rows = rows_of(goldens["case0.input_ids_processor"].tolist(), oracle.pad)
    proprio = torch.from_numpy(oracle.range("proprio").normalise(goldens["case0.proprio_raw_f64"].numpy()))
    hidden = model.hidden(rows, pixels, proprio[None])
    normalised = model.l1_head(hidden)
    of_images = pixels.unflatten(1, (-1, 6))[0]
    return {
        "case0.pixel_values_every7th": of_images[..., ::7, ::7],
        "case0.pixel_values_sum_f64": of_images.double().sum((-1, -2)),
        "case0.proprio_normalized_f64": proprio,
        "case0.actions_hidden_states": hidden,
        "case0.actions_normalized": normalised,
        "case0.actions_f64": oracle.range().expand(normalised[0].numpy(), OFT_EPSILON),
    }


def of_oft_discrete(oracle: Oracle) -> dict[str, object]:
    goldens, model, greedy = oracle.goldens, oracle.oft(), TokenDistribution(oracle.columns)
    pixels, layer = torch.cat([oracle.pixels(f"rl_image{row}.png") for row in range(2)]), model.network.output_layer
    found: dict[str, object] = {"simplevla.pixel_values_every7th": pixels[..., ::7, ::7]}
    for name, stop_token, width in (("rlinf", False, 50), ("simplevla", True, None)):
        ids = [row[row != oracle.pad].tolist() for row in goldens[f"{name}.input_ids"]]
        rows = rows_of(ids, oracle.pad, width)
        hidden = model.hidden(rows, pixels, stop_token=stop_token)
        tokens = greedy.choose(hidden, layer, None)
        found[f"{name}.greedy_tokens"] = tokens.view(goldens[f"{name}.greedy_tokens"].shape)
        values = oracle.tokens.decode(tokens.view(2, CHUNK, -1).numpy())
        found[f"{name}.greedy_actions_f64"] = oracle.range().expand(values, OFT_EPSILON)
        scored = goldens["rlinf.train_tokens"].flatten(1) if name == "rlinf" else tokens
        for match in filter(None, (re.fullmatch(rf"{name}\.logprobs_T([\d.]+)(?:_top-1)?", key) for key in goldens)):
            scores = TokenDistribution(oracle.columns, float(match[1])).score(hidden, layer, scored)
            found[match[0]], found[match[0].replace("logprobs", "entropy")] = scores
        if name == "rlinf":
            sequence = model.sequence(rows, pixels, stop_token=False)
            found |= {"rlinf.attention_mask": rows.present, "rlinf.mm_attention_mask": sequence.present}
            found["rlinf.position_ids"] = sequence.positions
            found["rlinf.greedy_prev_logprobs"] = greedy.score(hidden, layer, tokens)[0]
    return found


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "computed"),
    [("openvla", of_openvla), ("openvla_oft_l1", of_oft_l1), ("openvla_oft_discrete", of_oft_discrete)],
)
def test_the_networks_give_the_goldens(tmp_path, name, computed):
    oracle = Oracle(name, tmp_path)
    found = {golden: torch.as_tensor(value) for golden, value in computed(oracle).items()}
    assert set(found) == {golden for golden in oracle.goldens if not re.fullmatch(INPUTS, golden)}
    for golden, here in found.items():
        wanted = oracle.goldens[golden]
        assert here.shape == wanted.shape, golden
        difference = (here.double() - wanted.double()).abs().max()
        assert difference <= (LIMIT * wanted.abs().max() if wanted.is_floating_point() else 0), golden

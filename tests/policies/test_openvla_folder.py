"""Published folders, in and out: what is read back is what was written, and what does not fit is refused by name."""

import json
from pathlib import Path

import numpy as np
import openvla_folders as toys
import pytest
import torch
from model_folders import shapes_sha256
from safetensors.torch import load_file, save_file

from policies.openvla.actions import range_of
from policies.openvla.config import Decoding, Head, OpenVLAOptions, config_of
from policies.openvla.folder import empty_network, read_checkpoint, with_oft, write_checkpoint
from policies.openvla.images import read_processor
from policies.openvla.oft import L1Head, ProprioProjector
from rlinf_embodied.errors import CheckpointError, ConfigError

PUBLISHED = {
    "model_type": "openvla",
    "image_sizes": [224, 224],
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "text_config": {"model_type": "llama", "vocab_size": 32064},
}
PROJECTION = "projector.fc1.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "openvla"
    toys.write_toy(folder)
    return folder


@pytest.fixture
def folder(written, tmp_path) -> Path:
    """A copy that a test may damage; the large files are links."""
    for path in written.iterdir():
        (tmp_path / path.name).symlink_to(path) if path.suffix == ".safetensors" else (
            tmp_path / path.name
        ).write_bytes(path.read_bytes())
    return tmp_path


def read_oft(folder: Path, **own: object):
    options = OpenVLAOptions(decoding=Decoding.parallel, **{"unnorm_key": "arm", **own})
    return with_oft(read_checkpoint(folder), options, toys.CHUNK_LEN, toys.ACTION_DIM, toys.PROPRIO_DIM)


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    path.unlink()
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def states(network) -> torch.Tensor:
    with torch.no_grad():
        visual = network.patches(toys.pixels(3))
        sequence = network.sequence(toys.rows(), visual)
        mask = sequence.present[:, None, None, :].expand(-1, 1, sequence.present.shape[1], -1)
        return network.output_layer(network.hidden(sequence.embeddings, sequence.positions, mask)[:, -1])


def test_a_folder_written_and_read_in_shards_gives_equal_logits(written, tmp_path):
    first = read_checkpoint(written)
    write_checkpoint(first, tmp_path / "again", shard_bytes=10**6)
    again = read_checkpoint(tmp_path / "again")
    assert len(list((tmp_path / "again").glob("model-*-of-*.safetensors"))) > 2
    assert torch.equal(states(again.network), states(first.network))
    assert again.statistics == first.statistics
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (written / "tokenizer.json").read_bytes()
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in first.network.state_dict().values())


def test_statistics_of_the_config_count_where_the_file_is_missing(folder):
    (folder / "dataset_statistics.json").unlink()
    toys.change_json(folder / "config.json", norm_stats={"other": {}})
    assert list(read_checkpoint(folder).statistics) == ["other"]


def test_an_oft_folder_written_and_read_gives_equal_actions(tmp_path):
    model = toys.oft(l1=True, proprio=True)
    toys.write_toy_oft(tmp_path / "oft", model)
    again = read_oft(tmp_path / "oft", head=Head.l1, proprio=True)
    inputs = toys.rows(), toys.pixels(3, images=2), torch.rand(3, toys.PROPRIO_DIM)
    assert again.l1_head is not None
    assert model.l1_head is not None
    with torch.no_grad():
        assert torch.equal(again.l1_head(again.hidden(*inputs)), model.l1_head(model.hidden(*inputs)))


def test_names_and_shapes_at_full_size_are_those_of_the_reference():
    network = empty_network(config_of(PUBLISHED))
    assert len(network.state_dict()) == 982
    assert sum(tensor.numel() for tensor in network.state_dict().values()) == 7_541_237_184
    assert shapes_sha256(network) == "99212ba7b2a20bff01a94924f778724810deca58ecd0cfc4beddd9b81bd1398f"
    with torch.device("meta"):
        head, projector = L1Head(4096, 7), ProprioProjector(4096, 8)
    assert shapes_sha256(head) == "b5529660eca319536afac209b1c69373c5cbcf4e20d2bdcb506173e0ee19b4e8"
    assert shapes_sha256(projector) == "4864552a7fb32a67e2cb49fec380b3fbba516b312edd7c970ef276adafb788f9"


def test_a_language_model_is_refused(folder):
    toys.change_json(folder / "config.json", model_type="qwen2")
    with pytest.raises(CheckpointError, match=r"config.json: model_type is 'qwen2', but only 'openvla'"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("image_sizes", [28, 56], r"image_sizes is \[28, 56\], but both towers must see images of one size"),
        ("timm_model_ids", ["one"], "timm_model_ids is .* one entry for each of the two towers"),
        ("timm_model_ids", ["no_such", "no_such"], "timm .* cannot build"),
        ("text_config", {"model_type": "phi"}, "text_config.model_type is 'phi'"),
        ("text_config", {"hidden_size": 30, "num_attention_heads": 4}, "which makes no Llama"),
        ("n_action_bins", 1, "n_action_bins is 1"),
        ("use_fused_vision_backbone", False, "use_fused_vision_backbone is False"),
    ],
)
def test_a_config_that_makes_no_openvla_is_refused(field, value, message):
    raw = {**toys.RAW, field: value}
    with pytest.raises(CheckpointError, match=message):
        empty_network(config_of(raw))


def test_a_missing_shard_is_named(written, tmp_path):
    write_checkpoint(read_checkpoint(written), tmp_path / "shards", shard_bytes=10**6)
    gone = sorted((tmp_path / "shards").glob("model-*"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"lacks 1 of \d+ weight files .*{gone.name}"):
        read_checkpoint(tmp_path / "shards")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({PROJECTION: None}, rf"1 missing, first {PROJECTION}"),
        ({"value_head.weight": torch.zeros(2)}, r"1 unknown, first value_head.weight"),
        ({PROJECTION: torch.zeros(3, 2)}, rf"{PROJECTION} \[3, 2\] instead of"),
        ({PROJECTION: torch.full((160, 40), torch.nan)}, rf"values of {PROJECTION} are NaN or infinite"),
    ],
    ids=["missing", "unknown", "shape", "nan"],
)
def test_weights_that_do_not_fit_are_named(folder, changes, message):
    change_weights(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


def test_a_damaged_weight_file_is_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"cannot be read .* copy it again"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("leg", "unnorm_key is 'leg', but the checkpoint has statistics of arm, hand"),
        (None, "unnorm_key is None, but .* statistics of arm"),
    ],
)
def test_statistics_must_be_chosen_from_those_that_are_there(written, key, message):
    with pytest.raises(ConfigError, match=message):
        range_of(read_checkpoint(written).statistics, key)


def test_statistics_without_a_range_are_refused(folder):
    toys.change_json(folder / "dataset_statistics.json", arm={"action": {"mean": [0.0]}})
    with pytest.raises(CheckpointError, match=r"statistics of 'arm' have no action.q01 and action.q99"):
        range_of(read_checkpoint(folder).statistics, "arm")


def test_a_head_of_another_robot_is_refused(tmp_path):
    toys.write_toy_oft(tmp_path / "oft", toys.oft(l1=True))
    options = OpenVLAOptions(decoding=Decoding.parallel, head=Head.l1)
    with pytest.raises(
        CheckpointError, match=r"of another shape, .* or use an env of the robot that they were trained"
    ):
        with_oft(read_checkpoint(tmp_path / "oft"), options, toys.CHUNK_LEN, 2, toys.PROPRIO_DIM)


def test_side_files_must_be_there_once_and_whole(tmp_path):
    toys.write_toy_oft(tmp_path / "oft", toys.oft(l1=True))
    with pytest.raises(CheckpointError, match=r"exactly one proprio_projector--<steps>_checkpoint.pt, but .* none"):
        read_oft(tmp_path / "oft", proprio=True)
    path = tmp_path / "oft" / "action_head--0_checkpoint.pt"
    tensors = torch.load(path, weights_only=True)
    name = "module.model.fc1.bias"
    for changed, message in (
        ({**tensors, name: torch.full((16,), torch.inf)}, f"values of {name} are NaN or infinite"),
        ({key: value for key, value in tensors.items() if key != name}, r"1 missing, first model.fc1"),
        ([1.0], r"action_head--0_checkpoint.pt cannot be read"),
    ):
        torch.save(changed, path)
        with pytest.raises(CheckpointError, match=message):
            read_oft(tmp_path / "oft", head=Head.l1)
    path.with_name("action_head--80_checkpoint.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"action_head--0_checkpoint.pt, action_head--80_checkpoint.pt"):
        read_oft(tmp_path / "oft", head=Head.l1)


@pytest.mark.parametrize(
    "changed", [{"input_sizes": [[3, 224, 224]] * 2}, {"image_resize_strategy": "letterbox"}], ids=["size", "strategy"]
)
def test_another_image_processor_is_refused(folder, changed):
    toys.change_json(folder / "preprocessor_config.json", **changed)
    with pytest.raises(CheckpointError, match=r"but 28 \(image_sizes of config.json\) and 'resize-naive' are needed"):
        read_processor(folder, config_of(toys.RAW))


def pixels_of(folder: Path, image: np.ndarray) -> torch.Tensor:
    processor = read_processor(folder, config_of(toys.RAW))
    return processor.normalised(torch.from_numpy(processor.squared(image))[None, None])[0]


def test_pixels_are_normalised_once_for_each_tower(written):
    values = pixels_of(written, np.full((5, 9, 3), 102, np.uint8))  # 0.4
    assert values.shape == (6, 28, 28)
    torch.testing.assert_close(values[:3], torch.full((3, 28, 28), -0.4))
    torch.testing.assert_close(values[3:], torch.zeros(3, 28, 28), atol=1e-6, rtol=0)


def test_an_image_is_squashed(folder):
    values = pixels_of(
        folder, np.repeat(np.array([[0], [255]], np.uint8), 60, 0).repeat(40, 1)[..., None].repeat(3, -1)
    )
    assert values.shape == (6, 28, 28)
    assert values[0, 0, 0] < values[0, -1, 0]

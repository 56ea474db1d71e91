"""What a plan of memory is read off: a network of the published size, with adapters where they are asked for."""

import openvla_folders as toys
import pytest
import torch

from policies.openvla.film import AdaptedLayer
from policies.openvla.footprint import add_adapters, meta_network, read_shapes
from policies.openvla.settings import config_of
from rlinf_embodied.compose import CONFIG_DIR
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.tools.memory import parameters

PUBLISHED = 7_541_237_184  # names and shapes of the published files: docs/openvla.md
PUBLISHED_ADAPTERS = 110_828_288  # what the reference's finetune.py prints as trainable, lora_rank=32


@pytest.fixture(scope="module")
def published():
    return read_shapes(CONFIG_DIR / "models" / "openvla_7b.json")


def test_the_full_size_network_has_the_published_number_of_parameters(published):
    network = meta_network(published, torch.bfloat16)
    shapes = parameters(network)
    assert sum(p.size for p in shapes) == pytest.approx(PUBLISHED, rel=1e-3)
    assert all(p.trained for p in shapes)
    assert {p.device.type for p in network.parameters()} == {"meta"}
    assert max(p.unit for p in shapes) == 32  # the layers of the language model


def test_rank_32_on_every_layer_trains_the_published_number(published):
    shapes = parameters(meta_network(published, torch.bfloat16, 32))
    assert sum(p.size for p in shapes if p.trained) == PUBLISHED_ADAPTERS
    assert sum(p.size for p in shapes if not p.trained) == pytest.approx(PUBLISHED, rel=1e-3)


def test_adapters_lie_on_the_layers_that_are_named():
    network = meta_network(config_of(toys.RAW), torch.float32, 2, ["q_proj", "projector.fc2"])
    found = {name for name, part in network.named_modules() if isinstance(part, AdaptedLayer)}
    layers = [f"language_model.model.layers.{k}.self_attn.q_proj" for k in range(2)]
    assert found == {*layers, "projector.fc2"}
    assert all(".lora_" in name for name, p in network.named_parameters() if p.requires_grad)


def test_an_adapted_network_is_the_same_function_until_it_is_trained():
    plain, adapted = toys.network(), toys.network()
    assert add_adapters(adapted, 2, ["all-linear"]) > 20
    with torch.no_grad():
        assert torch.equal(plain.patches(toys.pixels(2)), adapted.patches(toys.pixels(2)))


@pytest.mark.parametrize("targets", [["q_prj"], ["q_proj", "embed_tokens"], ["proj_"]])
def test_targets_that_name_no_layer_are_refused(targets):
    with pytest.raises(ConfigError, match=r"memory.lora_targets has '.*', but no linear layer or convolution.*all-lin"):
        meta_network(config_of(toys.RAW), torch.float32, 2, targets)


def test_a_config_of_another_model_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="only 'openvla' can be read here"):
        read_shapes(path)

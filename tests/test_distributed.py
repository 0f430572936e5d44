"""Sharded parameters made whole for a while, and what cannot be sharded. Real processes: test_training_processes.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from torch import nn

from spectrain import distributed
from spectrain.distributed import check_sharding, whole
from spectrain.errors import SpectrainError


class Piece(nn.Parameter):
    """Stands for the part of a parameter that lies on one process."""

    def full_tensor(self) -> torch.Tensor:
        return torch.cat([self.data, 2 * self.data])


@pytest.fixture
def sharded(monkeypatch) -> nn.Module:
    monkeypatch.setattr(distributed, "DTensor", Piece)
    module = nn.Module()
    module.one, module.other = nn.Linear(2, 2), nn.Linear(2, 2)
    module.one.weight = module.other.weight = Piece(torch.ones(1, 2))
    return module


def test_whole_parameters_are_there_for_a_while_and_tied_ones_stay_tied(sharded):
    piece, bias = sharded.one.weight, sharded.one.bias
    with whole(sharded):
        assert torch.equal(sharded.one.weight, torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
        assert sharded.other.weight is sharded.one.weight
        assert sharded.one.bias is bias
        assert sharded.state_dict()["one.weight"].shape == (2, 2)
    assert sharded.one.weight is sharded.other.weight is piece
    with pytest.raises(KeyError), whole(sharded):
        raise KeyError
    assert sharded.one.weight is piece


def test_what_is_not_sharded_stays_as_it_is():
    module = nn.Linear(2, 2)
    weight = module.weight
    with whole(module):
        assert module.weight is weight


def test_parts_of_their_own_and_weights_elsewhere_are_refused(monkeypatch):
    class Shards(nn.Module):
        pass

    monkeypatch.setattr(distributed, "FSDPModule", Shards)
    drafter = SimpleNamespace(shardable=True)
    root = Shards()
    check_sharding(root, drafter)
    with pytest.raises(SpectrainError, match=r"also trains weights inside the target.*gpus\.yaml"):
        check_sharding(root, SimpleNamespace(shardable=False))
    check_sharding(nn.Module(), SimpleNamespace(shardable=False))
    root.layer = Shards()
    with pytest.raises(SpectrainError, match=r"fsdp_auto_wrap_policy: layer was sharded .*use NO_WRAP"):
        check_sharding(root, drafter)


def test_the_topologies_are_ones_that_accelerate_knows():
    found = sorted((Path(__file__).parents[1] / "recipes" / "accelerate").glob("*.yaml"))
    assert [path.name for path in found] == ["cpu.yaml", "fsdp.yaml", "gpu.yaml", "gpus.yaml"]
    for path in found:
        config = ClusterConfig.from_yaml_file(str(path))
        assert config.num_processes >= 1
    sharding = yaml.safe_load(found[1].read_text())["fsdp_config"]
    assert (sharding["fsdp_version"], sharding["fsdp_auto_wrap_policy"]) == (2, "NO_WRAP")

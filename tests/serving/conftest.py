from __future__ import annotations

import pytest
import torch

from spectrain.bundle import save_drafter
from spectrain.drafters.eagle import EagleConfig, EagleDrafter
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.medusa import MedusaConfig, MedusaDrafter


@pytest.fixture(scope="module")
def bundles(chat_target, tmp_path_factory):
    """A bundle of each family that is broken on purpose."""
    folder = tmp_path_factory.mktemp("bundles")
    made = {"eagle3": (Eagle3Drafter, Eagle3Config(draft_vocab_size=32)), "eagle": (EagleDrafter, EagleConfig()),
            "medusa": (MedusaDrafter, MedusaConfig(heads=2))}  # fmt: skip
    for name, (kind, config) in made.items():
        torch.manual_seed(0)
        drafter = kind.build(config, chat_target, torch.ones(chat_target.vocab_size))
        for parameter in drafter.parameters():
            parameter.data.add_(0.05 * torch.randn_like(parameter))
        save_drafter(folder / name, drafter, target=chat_target.identity(), tokenizer=chat_target.tokenizer,
                     sampler={}, recipe={}, data_digests={}, eos_ids=chat_target.eos_ids)  # fmt: skip
    return folder

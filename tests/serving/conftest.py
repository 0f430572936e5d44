from __future__ import annotations

import pytest
import torch
from families import TRAINABLE, small_config

from spectrain.bundle import Belonging, save_drafter
from spectrain.drafters import family_of
from spectrain.interop import format_for


@pytest.fixture(scope="module")
def bundles(chat_target, tmp_path_factory):
    """A bundle of each family that vLLM takes, by the method that serves it."""
    folder = tmp_path_factory.mktemp("bundles")
    for config in (small_config(kind, draft_vocab_size=32) for kind in TRAINABLE):
        torch.manual_seed(0)
        drafter = family_of(config).build(config, chat_target, torch.ones(chat_target.vocab_size))
        for parameter in drafter.parameters():
            parameter.data.add_(0.05 * torch.randn_like(parameter))
        method = format_for(drafter).SERVED.vllm
        if method is not None:
            save_drafter(folder / method, drafter, Belonging.to(chat_target))
    return folder

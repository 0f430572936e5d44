"""What the measurements share."""

import torch

from spectrain.evaluation.workbench import device_name


def test_the_device_has_a_name():
    assert device_name(torch.device("cpu")).strip()

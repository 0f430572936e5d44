"""Bundles broken on purpose are broken, and what does not give one away is a fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from broken import BREAKAGES, break_bundle, breakages
from families import TRAINABLE, named
from safetensors.torch import load_file
from small_bundles import RECIPES
from verdict import Control, Finding, render_controls

from spectrain.drafters import FAMILIES
from spectrain.interop import FORMATS, format_for_type


@pytest.mark.parametrize(("family", "what"), [(family, what) for family in BREAKAGES for what in BREAKAGES[family]])
def test_a_broken_bundle_has_other_weights_and_no_manifest_that_says_so(bundles, tmp_path, family, what):
    change = breakages(bundles / family)[what]
    broken = break_bundle(bundles / family, change, tmp_path / "broken")
    before, after = (load_file(folder / "model.safetensors") for folder in (bundles / family, broken))
    assert sorted(path.name for path in broken.iterdir()) == ["config.json", "model.safetensors"]
    assert any(name not in after or not torch.equal(before[name], after[name]) for name in before)
    assert all(after[name].shape == before[name].shape for name in after)


def test_bundles_of_every_family_that_is_served_are_made_and_broken():
    methods = {format_.SERVED.vllm for format_ in FORMATS} - {None}
    assert methods == set(BREAKAGES), f"nothing is broken of {methods - set(BREAKAGES)}: BREAKAGES in broken.py"
    folder = Path(__file__).parents[2] / "recipes" / "smollm2-135m-instruct"
    made = {yaml.safe_load((folder / f"{name}.yaml").read_text())["drafter"]["type"] for name in RECIPES}
    left_out = {named(kind) for kind in TRAINABLE if format_for_type(FAMILIES[kind]).SERVED.vllm} - made
    assert not left_out, f"no bundle of {left_out} is served: add a recipe to RECIPES in small_bundles.py"


def test_what_is_broken_has_to_be_found_and_its_answers_are_plain_all_the_same():
    seen = Control(Finding("eagle, broken", True, equal=3, compared=3), ["eagle, broken: position 1 has none", "more"])
    unseen = Control(Finding("medusa, broken", True, equal=3, compared=3))
    changed = Control(Finding("eagle3, broken", True), ["x"])
    changed.finding.fault("prompt 0 differs")
    assert seen.faults == []
    assert "nothing gave it away" in unseen.faults[0]
    assert changed.faults == ["eagle3, broken: prompt 0 differs"]
    text = render_controls([seen, unseen])
    assert "|    yes |          3/3 | position 1 has none and 1 more |" in text
    assert "NOTHING" in text
    assert text.endswith("1 UNEXPLAINED")
    assert render_controls([seen]).endswith("all that was broken was found")
    assert render_controls([]).startswith("SKIPPED")

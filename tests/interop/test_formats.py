"""Every trainable family has one serving format, and one alone; a family added to the registry is asked for it here."""

from __future__ import annotations

from collections import Counter

import pytest
from families import TRAINABLE, named

from spectrain import interop
from spectrain.drafters import FAMILIES, TrainableDrafter
from spectrain.errors import SpectrainError
from spectrain.interop.layouts import LAYOUTS, layouts_of


@pytest.mark.parametrize("kind", TRAINABLE, ids=named)
def test_every_trainable_family_has_a_serving_format(kind):
    drafters = [format_.DRAFTER for format_ in interop.FORMATS]
    assert FAMILIES[kind] in drafters, f"{named(kind)} has no serving format: add one to interop.FORMATS"
    assert interop.format_for_type(FAMILIES[kind]).DRAFTER is FAMILIES[kind]


@pytest.mark.parametrize("kind", FAMILIES, ids=named)
def test_a_config_says_whether_its_family_has_weights(kind):
    found = issubclass(FAMILIES[kind], TrainableDrafter)
    assert kind().trainable == found, f"{kind.__name__}.trainable has to be {found}: so it is for {FAMILIES[kind]}"


def test_no_two_formats_have_the_same_drafter_or_name():
    """The first would be written and the second never: another layout of a family goes into LAYOUTS."""
    for of_what in ("DRAFTER", "NAME"):
        twice = [what for what, count in Counter(getattr(f, of_what) for f in interop.FORMATS).items() if count > 1]
        assert not twice, f"several of FORMATS have {of_what} {twice}: another layout of a family goes into LAYOUTS"


@pytest.mark.parametrize("format_", interop.FORMATS, ids=lambda format_: format_.NAME)
def test_every_format_that_a_server_takes_is_a_layout_too(format_):
    """Else what others made for that server could not be imported."""
    served = format_.SERVED.vllm is not None or format_.SERVED.assistant
    itself = any(getattr(layout, "module", None) is format_ for layout in layouts_of(format_.NAME))
    assert itself or not served, f"{format_.NAME} is served but no layout: add it to AS_SERVED (as_served.py)"


def test_layouts_are_of_formats_that_there_are_and_have_names_of_their_own():
    names = {format_.NAME for format_ in interop.FORMATS}
    assert {layout.FORMAT for layout in LAYOUTS} <= names
    twice = [name for name, count in Counter(layout.NAME for layout in LAYOUTS).items() if count > 1]
    assert not twice, f"more than one of LAYOUTS is called {twice}"


def test_a_class_without_a_format_is_named_with_what_to_add():
    class Unwritten(TrainableDrafter):
        pass

    with pytest.raises(SpectrainError, match=r"Unwritten has no serving format.*DRAFTER = Unwritten.*interop\.FORMATS"):
        interop.format_for_type(Unwritten)

"""One glossary: the page's terms are the ones that eval/README.md gives formulas and examples for."""

from pathlib import Path

import pytest

from spectrain.evaluation.glossary import DEFINITIONS
from spectrain.evaluation.schema import _TERMS

README = (Path(__file__).parents[2] / "eval" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("term", [term for term, _ in DEFINITIONS])
def test_every_term_has_its_place_in_the_readme(term):
    assert f"**{term}**" in README


def test_terms_are_defined_once_and_the_schema_takes_them_from_there():
    terms = [term for term, _ in DEFINITIONS]
    assert len(set(terms)) == len(terms)
    assert set(_TERMS.values()) <= set(terms)

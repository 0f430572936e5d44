"""The published schema and the reader's check: one shape, told in two ways."""

import copy
import json
import random
import re

import pytest
from complete import complete
from jsonschema import Draft202012Validator

from spectrain.errors import SpectrainError
from spectrain.evaluation.document import check_document, check_shape
from spectrain.evaluation.leaves import LEAVES, check_leaf, described
from spectrain.evaluation.schema import SCHEMA_FILE, json_schema
from spectrain.evaluation.shape import SCHEMA
from spectrain.evaluation.summary import summarise

ALPHAS = {"desk": {"eagle3": 0.8, "ngram": 0.5}, "chat": {"eagle3": 0.3, "ngram": 0.2}}
WRONG = {"string": 5, "number": "5", "integer": "5", "boolean": 1}


@pytest.fixture(scope="module")
def document(simulator):
    samples = simulator.samples(ALPHAS, conversations=6) + simulator.samples(ALPHAS, conversations=6, temperature=1.0)
    context = simulator.context | {
        "teacher_forced": [simulator.forced_row(drafter="eagle3", prefixes="T=1")],
        "drafters": {"eagle3": {"bytes": 5, "training": None}, "ngram": {"bytes": 0, "training": None}},
    }
    return json.loads(json.dumps(complete(summarise(samples, context=context))))


@pytest.fixture(scope="module")
def validator():
    return Draft202012Validator(json_schema())


def accepted(document):
    try:
        check_shape(document)
    except SpectrainError:
        return False
    return True


def test_the_file_that_ships_is_the_one_made_from_the_shape():
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == json_schema()


def test_it_is_a_schema_with_the_version_in_its_id():
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == "urn:spectrain:acceptance:4"
    assert SCHEMA == "spectrain.acceptance/4"
    assert schema["properties"]["schema"] == {"const": SCHEMA}
    assert "Committed tokens of a round" in schema["$defs"]["numbers"]["properties"]["tokens_per_round"]["description"]


def test_both_accept_a_whole_document(document, validator):
    check_document(document)
    assert not list(validator.iter_errors(document))


def places(value, path=()):
    """Every place of a document: of a list its first and last item."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        for index in sorted({0, len(value) - 1}):
            yield from places(value[index], (*path, index))


def at(document, path):
    for key in path:
        document = document[key]
    return document


def test_both_refuse_the_same_mutated_documents(document, validator):
    """Every kind of fault, in places drawn at random: a key gone, a value of another type, null, another container."""
    rng = random.Random(0)
    found = [path for path in places(document) if path]
    refused = 0
    for path in rng.sample(found, 130):
        broken = copy.deepcopy(document)
        holder, key = at(broken, path[:-1]), path[-1]
        fault = rng.choice(("gone", "null", "text", "number", "negative", "list", "object", "flag"))
        if fault == "gone":
            if isinstance(key, int):
                continue
            del holder[key]
        else:
            holder[key] = {
                "null": None,
                "text": "x",
                "number": 1.5,
                "negative": -2,
                "list": [],
                "object": {},
                "flag": True,
            }[fault]
        agreed = accepted(broken)
        assert agreed == validator.is_valid(broken), (path, fault)
        refused += not agreed
    assert 30 < refused < 125


@pytest.mark.parametrize("key", sorted(LEAVES))
def test_every_leaf_refuses_another_type(key):
    for wrong in (WRONG[LEAVES[key]["type"]], None):
        with pytest.raises(
            SpectrainError, match=rf"a\.{key} is {wrong!r}, expected {re.escape(described(LEAVES[key]))}"
        ):
            check_leaf(key, wrong, f"a.{key}")
    check_leaf(key, None, f"a.{key}", nullable=True)


def test_no_sampler_and_another_version_are_refused_by_both(document, validator):
    for change in ({"samplers": []}, {"schema": "spectrain.acceptance/3"}, {"schema": None}):
        assert not accepted(document | change)
        assert not validator.is_valid(document | change)


def test_a_board_by_kind_is_checked_where_it_is_there(document, validator):
    broken = copy.deepcopy(document)
    boards = broken["samplers"][0]["leaderboard"]["by_kind"]
    del boards["chat"]["ranked"][0]["alpha"]
    assert not accepted(broken)
    assert not validator.is_valid(broken)
    del broken["samplers"][0]["leaderboard"]["by_kind"]
    assert accepted(broken)
    assert validator.is_valid(broken)

"""What is recorded is told by names that people can change: keys that a recipe has, flags that a command has."""

import re

import pytest

from spectrain import config, settings
from spectrain.cli_options import Parser, measurement
from spectrain.evaluation.contenders import AcceptanceConfig
from spectrain.evaluation.load_config import LoadConfig
from spectrain.identity import first_difference

TABLES = {name: table for name, table in vars(settings).items() if name.isupper() and isinstance(table, dict)}
SECTIONS = "target|data|regenerate|drafter|warm_start|training|evaluation"


@pytest.mark.parametrize("table", TABLES)
def test_every_name_is_one_that_a_recipe_or_a_command_has(table):
    parser = Parser()
    measurement(parser)
    parser.add_argument("--baselines")  # of compare
    flags = {flag for action in parser._actions for flag in action.option_strings}
    keys = set(config._paths(config.Recipe.model_json_schema()))
    for name in TABLES[table].values():
        assert set(re.findall(r"--[a-z-]+", name)) <= flags, name
        assert set(re.findall(rf"\b(?:{SECTIONS})(?:\.[a-z_]+)+", name)) <= keys | {"evaluation.load.batch"}, name


def test_every_setting_of_a_measurement_has_a_name():
    assert AcceptanceConfig.model_fields.keys() - settings.FLAGS.keys() == {"load", "seeds"}
    assert LoadConfig.model_fields.keys() - settings.LOAD_FLAGS.keys() == {"repeats"}


def test_the_longest_beginning_that_has_a_name_is_told_by_it():
    names = {"config": "recipe", "config.k": "--k", "config.key": "no"}

    def told(**values):
        return first_difference({"config": {"k": [1], "kind": "a", **values}}, {"config": {"k": [1], "kind": "a"}},
                                names=names)  # fmt: skip

    assert told(k=[2]) == "--k[0]: 2 against 1"
    assert told(kind="b") == "recipe.kind: 'b' against 'a'"
    assert first_difference({"configured": 1}, {"configured": 2}, names=names) == "configured: 1 against 2"

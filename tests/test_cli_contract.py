"""Every command speaks alike: names, types and words of options, examples, exit codes, and where JSON goes."""

import json
import shlex
import subprocess
import sys
from collections import defaultdict

import pytest
import yaml

from spectrain import benchmarks, cli
from spectrain.cli_options import FLAGS, Parser
from spectrain.config import load_recipe
from spectrain.errors import SpectrainError
from spectrain.exact import proof
from spectrain.recipe_commands import starter, starters

ALIKE = ("type", "metavar", "nargs", "choices", "const")
BENCHMARKS = {f"benchmarks/{c.__name__}": c for c in (benchmarks.decoding, benchmarks.batching, benchmarks.training)}
HEAVY = ("torch", "transformers", "numpy", "pydantic", "accelerate", "huggingface_hub", "packaging", "yaml", "httpx")


class FoundError(Exception):
    """The parser of a command, when it would parse."""


@pytest.fixture
def parser_of(monkeypatch):
    """The parser of a command, by its name; ``compare`` has another one for documents."""

    def stop(parser, arguments=None, namespace=None):
        raise FoundError(parser)

    def parser_of(name, *arguments):
        with monkeypatch.context() as context:
            context.setattr(Parser, "parse_args", stop)
            context.setattr(Parser, "parse_intermixed_args", stop)
            with pytest.raises(FoundError) as found:
                (cli.COMMANDS | BENCHMARKS)[name](arguments, name=f"spectrain {name}")
        return found.value.args[0]

    return parser_of


@pytest.fixture
def options(parser_of):
    """Every option of every command, benchmarks too: flag -> (command, action)."""
    found = defaultdict(list)
    for name in (*cli.COMMANDS, *BENCHMARKS):
        for action in parser_of(name)._actions:
            found[action.option_strings[-1] if action.option_strings else action.dest].append((name, action))
    found.pop("--help")
    return found


def test_what_several_commands_have_is_alike(options):
    for flag, uses in options.items():
        (first, action), *others = uses
        for name, other in others:
            for what in ALIKE:
                if what == "nargs" and not flag.startswith("--"):
                    continue  # a bundle that may be left out is still a bundle
                found = getattr(action, what), getattr(other, what)
                assert found[0] == found[1], f"{flag}: {what} of {first} and {name}: {found}"
            assert type(action) is type(other), flag


def test_what_several_commands_have_means_the_same(options):
    """One place says it: in other words only where it says what all share, and a command adds what it does with it."""
    for flag, uses in options.items():
        meaning = FLAGS[flag]["help"] if flag in FLAGS else uses[0][1].help
        for name, action in uses:
            assert action.help.startswith(meaning), f"{flag} of {name}"
        assert flag in FLAGS or len({action.help for _, action in uses}) == 1, f"{flag} belongs into FLAGS"


def test_defaults_differ_only_where_they_are_told(options):
    for flag, uses in options.items():
        for name, action in uses:
            if action.default not in (None, False) and action.option_strings:
                assert "(default: " in action.help or action.default == [], f"{flag} of {name}"


def test_every_option_says_what_it_takes(options):
    for flag, uses in options.items():
        for name, action in uses:
            takes = action.nargs != 0 and action.option_strings
            assert action.help, f"{flag} of {name}"
            assert action.metavar if takes else True, f"{flag} of {name} has no name for its value"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_examples_can_be_typed(parser_of, name):
    """Each one parses, options and all."""
    parser = parser_of(name)
    text = parser.epilog.replace("\\\n", " ")
    assert text.startswith("example:\n")
    examples = [line.strip() for line in text.partition("\n\n")[0].splitlines()[1:]]
    assert examples
    for example in examples:
        words = shlex.split(example.partition(" > ")[0])
        if words[0] == "accelerate":
            words = words[words.index("-m") + 1 :]
        assert words[:2] == ["spectrain", name]
        own = parser_of(name, *words[2:])
        intermixed = any(action.dest == "overrides" for action in own._actions)
        (own.parse_intermixed_args if intermixed else own.parse_args)(words[2:])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_exit_codes_are_told(parser_of, name):
    codes = parser_of(name).epilog.partition("\n\n")[2]
    assert codes.startswith("exit codes: 0 ")
    assert [code for code in ("; 1 ", "; 2 bad input", "; 130 interrupted") if code not in codes] == []


def test_mistakes_in_usage_are_told_as_all_others_are(parser_of):
    with pytest.raises(SpectrainError, match=r"^unrecognized arguments: --outptu; spectrain report --help tells more$"):
        parser_of("report").parse_args(["a.json", "--output", "x", "--outptu"])


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from spectrain.cli import COMMANDS, guarded
for name, command in COMMANDS.items():
    try:
        guarded(command, ["--help"], name)
    except SystemExit as stop:
        assert stop.code == 0
    heavy = set({HEAVY}) & set(sys.modules)
    assert not heavy, f"{{name}} imports {{heavy}}"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["spectrain", "--version"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert (stop.value.code, capsys.readouterr().out.strip()) == (0, cli.__version__)


# --- JSON ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "key", "text"),
    [
        ("plan --alpha .7 --c .1 --v 1.2", "best", "best: k=4"),
        ("prove --cases 40", "proved", "lossless rules"),
        ("export --list", "formats", "sglang-eagle3"),
        ("recipe", "drafters", "the first to try"),
        ("recipe medusa", "text", "type: medusa"),
    ],
)
def test_json_is_one_object_on_stdout_and_all_else_is_on_stderr(capsys, line, key, text):
    name, *arguments = line.split()
    assert cli.guarded(cli.COMMANDS[name], [*arguments, "--json"], name) == 0
    said = capsys.readouterr()
    assert key in json.loads(said.out)
    assert text in said.err
    assert cli.guarded(cli.COMMANDS[name], arguments, name) == 0
    assert text in capsys.readouterr().out


def test_a_run_tells_its_verdicts_as_json(finished_run, tmp_path, capsys):
    arguments = [str(finished_run / "run" / "acceptance.json"), "--output", str(tmp_path), "--json"]
    assert cli.guarded(cli.report, arguments, "report") == 0
    found = json.loads(capsys.readouterr().out)
    assert {verdict["overall"]["decision"] for verdict in found["verdicts"].values()} <= {"on", "off"}
    assert str(tmp_path / "report.md") in found["reports"]


def test_a_proof_that_fails_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(proof, "LOSSLESS", {"not renormalised": proof.BIASED["chain: repair drawn from p again"]})
    assert cli.guarded(cli.prove, ["--cases", "40", "--json"], "prove") == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["proved"] is False
    assert "not proved: not renormalised: found" in said.err


# --- recipes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", starters())
def test_a_starter_is_a_whole_recipe(name, tmp_path, capsys):
    path = tmp_path / "my.yaml"
    assert cli.guarded(cli.recipe, [name, str(path)], "recipe") == 0
    assert f"recipe: {path}" in capsys.readouterr().out
    loaded = load_recipe(path)
    assert loaded.drafter.trainable
    assert loaded.data.train == ("chats.jsonl",)
    assert path.read_text(encoding="utf-8") == starter(name)
    assert "stands here" not in starter(name)


def test_starters_differ_in_their_drafter_and_how_it_learns_alone():
    recipes = {name: yaml.safe_load(starter(name)) for name in starters()}
    rest = [{key: part for key, part in r.items() if key not in ("drafter", "loss", "optim")} for r in recipes.values()]
    assert all(part == rest[0] for part in rest)
    assert len({str(recipe["drafter"]) for recipe in recipes.values()}) == len(recipes)


@pytest.mark.parametrize("name", starters())
def test_starters_name_what_small_traffic_and_small_models_need(name):
    marked = [line for line in starter(name).splitlines() if "SET" in line]
    assert any("epochs: 4" in line and "micro_batch_tokens 512" in line and "lr: 1.0e-3" in line for line in marked)
    assert any("heldout_fraction: 0.05" in line and "0.2" in line for line in marked)
    assert name != "eagle3" or any("# tap_layers:" in line and "fewer than 7 layers" in line for line in marked)


def test_every_kind_of_drafter_that_trains_has_a_starter(tmp_path):
    from spectrain.drafters import FAMILIES

    trainable = {c.model_fields["type"].default for c in FAMILIES if c.model_construct().trainable}
    found = set()
    for name in starters():
        (tmp_path / name).write_text(starter(name), encoding="utf-8")
        found.add(load_recipe(tmp_path / name).drafter.type)
    assert found == trainable


def test_a_recipe_that_is_there_is_left_alone(tmp_path, capsys):
    (tmp_path / "my.yaml").write_text("mine")
    assert cli.guarded(cli.recipe, ["eagle3", str(tmp_path / "my.yaml")], "recipe") == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "my.yaml").read_text() == "mine"
    assert cli.guarded(cli.recipe, ["egle"], "recipe") == 2
    assert "'egle': there is no such recipe; expected one of eagle, eagle3" in capsys.readouterr().err

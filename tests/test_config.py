"""Recipes: what ships loads, overrides win, and whatever is wrong is named with its path."""

from pathlib import Path

import pytest
import yaml

from spectrain.config import Recipe, load_recipe
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.shapes import DynamicTree, StaticTree
from spectrain.training import TrainingConfig

SHIPPED = sorted((Path(__file__).parents[1] / "recipes").glob("*-*/*.yaml"))
SMALLEST = """
target: {name: somewhere}
data: {train: [chats.jsonl]}
drafter: {type: eagle3}
output: runs/x
"""


@pytest.fixture
def write(tmp_path):
    def write(text=SMALLEST, name="recipe.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path, *overrides):
    with pytest.raises(SpectrainError) as error:
        load_recipe(path, overrides)
    return str(error.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shipped_recipes_load_and_name_traffic_that_ships(path):
    recipe = load_recipe(path)
    root = Path(__file__).parents[1]
    assert recipe.drafter.trainable
    if path.parent.name.startswith("smollm2"):  # elsewhere names stand for what a reader fills in
        assert all((root / name).is_file() for name in (*recipe.data.train, *recipe.data.heldout))
    assert recipe == Recipe.model_validate(recipe.model_dump(mode="json"))


def test_recipes_ship():
    assert {path.name for path in SHIPPED} >= {"eagle3.yaml", "quickstart.yaml"}


def test_a_small_recipe_has_the_defaults_of_its_parts(write):
    recipe = load_recipe(write())
    assert recipe.training == TrainingConfig()
    assert recipe.regenerate is not None
    assert recipe.evaluation.samplers == (Sampler(),)
    assert recipe.baselines == ()


def test_yaml_stands_where_nothing_overrides_it_and_a_flag_equal_to_the_default_wins(write):
    """Case C31."""
    path = write(SMALLEST + "training: {epochs: 50}\n")
    default = TrainingConfig().epochs
    assert load_recipe(path).training.epochs == 50
    assert load_recipe(path, [f"training.epochs={default}"]).training.epochs == default
    assert load_recipe(path, ["training.seed=3"]).training.epochs == 50


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("optim.lr=2e-4", lambda r: r.optim.lr, 2e-4),
        ("optim.lr=1E-5", lambda r: r.optim.lr, 1e-5),
        ("optim.betas=[0.8, 9e-1]", lambda r: r.optim.betas, (0.8, 0.9)),
        ("evaluation.k=[1, 2, 7]", lambda r: r.evaluation.k, (1, 2, 7)),
        ("regenerate=null", lambda r: r.regenerate, None),
        ("regenerate.sampler.temperature=0.7", lambda r: r.regenerate.sampler, Sampler(0.7)),
        ("evaluation.samplers=[{temperature: 1, top_k: 50}]", lambda r: r.evaluation.samplers, (Sampler(1, 50),)),
        (
            "evaluation.trees=[{paths: [[0], [1], [0, 0]], children: chosen}, {depth: 3, nodes: 9}]",
            lambda r: r.evaluation.trees,
            (StaticTree(((0,), (1,), (0, 0)), "chosen"), DynamicTree(3, 4, 9)),
        ),
        ("evaluation.verification=[token, block]", lambda r: r.evaluation.verification, ("token", "block")),
        ("data.heldout=[a.jsonl]", lambda r: r.data.heldout, ("a.jsonl",)),
        ("data.heldout_fraction=.5", lambda r: r.data.heldout_fraction, 0.5),
        ("evaluation.conversations=~", lambda r: r.evaluation.conversations, None),
        ("training.precision=no", lambda r: r.training.precision, "no"),
        ("training.tracker=none", lambda r: r.training.tracker, "none"),
        ("output=runs/a=b", lambda r: r.output, "runs/a=b"),
        ("output=2026-01-31", lambda r: r.output, "2026-01-31"),
        ("target.revision='7e12'", lambda r: r.target.revision, "7e12"),
        ("baselines=[{type: ngram, longest: 3}]", lambda r: [b.longest for b in r.baselines], [3]),
    ],
)
def test_overrides(write, override, read, value):
    found = read(load_recipe(write(), [override]))
    assert found == value
    assert type(found) is type(value)


def test_the_last_of_two_overrides_counts(write):
    assert load_recipe(write(), ["training.epochs=2", "training.epochs=3"]).training.epochs == 3


def test_a_recipe_reads_plain_words_as_overrides_do(write):
    recipe = load_recipe(write(SMALLEST + "optim: {lr: 2e-4}\ntraining: {precision: no}\n"))
    assert (recipe.optim.lr, recipe.training.precision) == (2e-4, "no")


@pytest.mark.parametrize(
    ("override", "path", "suggestion"),
    [
        ("learing_rate=1", "learing_rate", "did you mean 'optim.lr'?"),
        ("optim.learing_rate=1", "optim.learing_rate", "did you mean 'optim.lr'?"),
        ("optim.lrr=1", "optim.lrr", "did you mean 'optim.lr'?"),
        ("epochs=1", "epochs", "did you mean 'training.epochs'?"),
        ("drafter.depth=1", "drafter.depth", "did you mean 'drafter.depths'?"),
        ("regenerate.sampler.temprature=1", "regenerate.sampler.temprature", "'regenerate.sampler.temperature'"),
        ("evaluation.samplers=[{top_kk: 1}]", "evaluation.samplers.0.top_kk", "'evaluation.samplers.0.top_k'"),
        ("evaluation.trees=[{paths: [[0]], depth: 2}]", "evaluation.trees.0.depth", "it belongs to another kind"),
        ("baselines=[{type: ngram, depths: 3}]", "baselines.0.depths", "it belongs to another kind"),
        ("evaluation.trees=[{paths: [[0]], childre: chosen}]", "evaluation.trees.0.childre", "trees.0.children'?"),
        ("evaluation.trees=[{depth: 2, top: 2}]", "evaluation.trees.0.top", "did you mean 'evaluation.trees.0.top_k'?"),
        ("baselines=[{type: ngram, longst: 3}]", "baselines.0.longst", "did you mean 'baselines.0.longest'?"),
        ("optim.xyzzy=1", "optim.xyzzy", "the keys there are name, lr, betas"),
        ("xyzzy=1", "xyzzy", "the keys there are target, data"),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_what_is_known(write, override, path, suggestion):
    recipe = write()
    message = refusal(recipe, override)
    assert f"{recipe}: unknown key {path!r}" in message
    assert suggestion in message
    assert "\n" not in message


def test_the_same_in_the_file_and_every_fault_at_once(write):
    message = refusal(write(SMALLEST + "learing_rate: 1\noptim: {lr: -1, lrr: 2}\n"))
    assert len(message.splitlines()) == 3
    assert "unknown key 'learing_rate'" in message
    assert "unknown key 'optim.lrr'" in message
    assert "optim.lr: Input should be greater than 0 (found -1)" in message


@pytest.mark.parametrize("override", ["optim.lr", "=1", "", "optim.lr:1"])
def test_what_is_no_override_is_refused_with_an_example(write, override):
    message = refusal(write(), override)
    assert repr(override) in message
    assert "optim.lr=2e-4" in message


@pytest.mark.parametrize(
    ("override", "part"), [("output.x=1", "output"), ("optim.lr.x=1", "lr"), ("data.train.0=a", "train")]
)
def test_an_override_below_a_plain_value_is_refused(write, override, part):
    message = refusal(write(SMALLEST + "optim: {lr: 1.0e-3}\n"), override)
    assert f"{override!r}: {part} holds no keys" in message


def test_an_override_that_is_no_yaml_is_refused(write):
    assert "'[1' is not YAML" in refusal(write(), "evaluation.k=[1")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epochs=many", "training.epochs: Input should be a valid integer"),
        ("training.epochs=0", "training.epochs: Input should be greater than or equal to 1 (found 0)"),
        ("training.precision=fp16", "training.precision: Input should be 'no' or 'bf16' (found 'fp16')"),
        ("optim.betas=[0.9]", "optim.betas.1: Field required"),
        ("target.name=[1]", "target.name: Input should be a valid string (found [1])"),
        ("data.train=[]", "data.train: Tuple should have at least 1 item"),
        ("data.heldout_fraction=1", "data.heldout_fraction: Input should be less than 1 (found 1)"),
        ("evaluation.k=[0]", "evaluation.k.0: Input should be greater than or equal to 1 (found 0)"),
        ("evaluation.k=[]", "evaluation.k: Tuple should have at least 1 item"),
        ("evaluation.samplers=[]", "evaluation.samplers: Tuple should have at least 1 item"),
        ("evaluation.samplers=[{temperature: -1}]", "evaluation.samplers.0: sampler temperature: found -1"),
        ("evaluation.samplers=[{}, {temperature: 0}]", "evaluation.samplers: the same sampler twice: greedy"),
        ("evaluation.trees=[{paths: [[0], [1, 0]]}]", "evaluation.trees.0: tree path [1, 0]: its parent [1] is not"),
        ("evaluation.trees=[{paths: [[0], [0, 2]]}]", "evaluation.trees.0: tree path [0, 2]: its elder sibling [0, 1]"),
        ("evaluation.trees=[{depth: 0}]", "evaluation.trees.0: the dynamic tree's depth is 0; expected a whole number"),
        (
            "evaluation.trees=[{depth: 2, top_k: 2}]",
            "evaluation.trees.0: a dynamic tree of depth 2 and top_k 2 grows 6",
        ),
        ("evaluation.trees=[{}]", "evaluation.trees.0: expected a tree: {paths: [[0], [1], [0, 0]]}, or {depth: 5, to"),
        ("evaluation.trees=[5]", "evaluation.trees.0: expected a tree: {paths"),
        ("evaluation.trees=[{depth: 2}, {depth: 2}]", "evaluation.trees: the same tree twice: dynamic tree of 16"),
        ("evaluation.trees=[{paths: [[a]]}]", "evaluation.trees.0.paths.0.0: Input should be a valid integer"),
        (
            "evaluation.verification=[typical]",
            "evaluation.verification.0: Input should be 'token', 'block' or 'typical_",
        ),
        ("evaluation.verification=[]", "evaluation.verification: Tuple should have at least 1 item"),
        ("drafter.type=hydra", "drafter: Input tag 'hydra'"),
        ("drafter.depths=0", "drafter.depths: Input should be greater than or equal to 1"),
        ("optim=3", "optim: Input should be a valid dictionary"),
    ],
)
def test_a_wrong_value_names_its_key_and_what_was_found(write, override, message):
    path = write()
    assert refusal(path, override).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("drafter", "tree", "message"),
    [
        (
            "{type: medusa, heads: 3}",
            "{paths: [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}",
            "evaluation.trees: tree path [0, 0, 0, 0] has depth 4, medusa drafts at most 3 tokens ahead",
        ),
        (
            "{type: eagle3, draft_vocab_size: 2}",
            "{paths: [[0], [0, 0], [0, 1], [0, 2]]}",
            "evaluation.trees: tree path [0, 2] is beyond the 2 tokens that eagle3 can propose",
        ),
        ("{type: medusa, heads: 3}", "{paths: [[0], [1, 0]]}", "evaluation.trees.0: tree path [1, 0]: its parent [1]"),
        ("{type: medusa, heads: 3}", "{depth: 4, top_k: 2, nodes: 4}", "dynamic tree of 4 has depth 4, medusa drafts"),
    ],
    ids=["deeper than the heads", "a rank beyond the columns", "a prefix that is absent", "grown too deep"],
)
def test_a_tree_that_the_drafter_cannot_fill_is_refused_before_anything_runs(write, drafter, tree, message):
    found = refusal(write(), f"drafter={drafter}", f"evaluation.trees=[{tree}]")
    assert message in found
    fits = load_recipe(write(), [f"drafter={drafter}", "evaluation.trees=[{paths: [[0], [1], [0, 0], [0, 0, 0]]}]"])
    assert fits.evaluation.trees[0].depth == 3


@pytest.mark.parametrize("drafter", ["{type: eagle3, depths: 1}", "{type: medusa, heads: 1}", "{type: language_model}"])
def test_depths_are_not_weighed_where_there_is_one(write, drafter):
    message = refusal(write(), f"drafter={drafter}", "evaluation.k=[1]", "loss.positions=d_pace")
    family = drafter.split()[1].rstrip(",}")
    assert f"loss.positions: found d_pace, but this {family} drafter trains one draft depth" in message
    more = drafter.replace(": 1}", ": 2}") if ": 1}" in drafter else "{type: eagle3, depths: 2}"
    assert load_recipe(write(), [f"drafter={more}", "loss.positions=d_pace", "evaluation.k=[1]"])


def test_sharing_and_warm_starts_are_off_unless_asked_for(write):
    recipe = load_recipe(write())
    assert (recipe.prepared, recipe.warm_start) == (None, None)
    warm = load_recipe(write(), ["warm_start.bundle=org/x", "warm_start.revision=abc", "prepared=runs/shared"])
    assert warm.warm_start.model_dump() == {"bundle": "org/x", "revision": "abc", "remap": False}
    assert warm.prepared == "runs/shared"
    assert "warm_start.bundle: Field required" in refusal(write(), "warm_start={remap: true}")


def test_recipes_of_one_target_and_traffic_share_what_is_prepared():
    """All that ship for a target, but the quickstart, which stands alone."""
    shared = [load_recipe(path) for path in SHIPPED if path.parent.name.startswith("smollm2")]
    assert {r.prepared for r in shared} == {"runs/prepared", None}
    (alone,) = (r for r in shared if r.prepared is None)
    assert alone.output == "runs/quickstart"
    assert len({(r.target, r.data.train, r.data.max_length, r.regenerate) for r in shared}) == 1


@pytest.mark.parametrize("key", ["target", "data", "drafter", "output"])
def test_a_missing_key_is_named(write, key):
    values = yaml.safe_load(SMALLEST)
    del values[key]
    path = write(yaml.safe_dump(values))
    assert refusal(path) == f"{path}: {key}: Field required"


def test_baselines_that_need_training_are_refused(write):
    message = refusal(write(), "baselines=[{type: ngram}, {type: eagle3}]")
    assert "baselines need no training, eagle3 do" in message


def test_baselines_that_would_share_a_name_are_refused(write):
    message = refusal(write(), "baselines=[{type: ngram}, {type: ngram, longest: 3}]")
    assert "ngram, ngram" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"target: [a", "is not YAML"),
        (b"- a\n- b\n", "holds list"),
        (b"", "holds NoneType"),
        (b"target: {name: a}\ntarget: {name: b}\n", "key 'target' is given twice"),
        (b"target: !!python/object:os.system {}\n", "is not YAML"),
        ("output: \xe4".encode("latin-1"), "not UTF-8 at byte 8"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    found = refusal(path)
    assert str(path) in found
    assert message in found


def test_a_missing_file_is_named(tmp_path):
    assert f"{tmp_path / 'none.yaml'} does not exist" in refusal(tmp_path / "none.yaml")
    assert "does not exist" in refusal(tmp_path)


def test_a_recipe_cannot_be_changed(write):
    recipe = load_recipe(write())
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.epochs = 3


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (
            "training.on_policy={share: 0.5}",
            r"training\.on_policy\.k: found 5, but this medusa drafter drafts at most 4",
        ),
        ("evaluation.k=[5, 6]", r"evaluation\.k: found 5, but this medusa drafter drafts at most 4"),
        ("loss.regression=.inf", r"loss\.regression: Input should be a finite number"),
        ("optim.lr=.nan", r"optim\.lr: Input should be a finite number"),
        ("drafter.joint={alpha: .inf}", r"drafter.*joint\.alpha: Input should be a finite number"),
    ],
)
def test_what_would_fail_after_hours_fails_when_the_recipe_is_read(override, named):
    with pytest.raises(SpectrainError, match=named):
        load_recipe("recipes/smollm2-135m-instruct/medusa.yaml", [override])


def test_a_chain_that_only_a_baseline_fills_is_left_to_it():
    assert load_recipe("recipes/smollm2-135m-instruct/medusa.yaml", ["evaluation.k=[2, 5]"]).evaluation.k == (2, 5)


def test_settings_of_the_chat_template_leave_alone_what_is_set_for_every_chat(make_recipe, tmp_path):
    path = make_recipe(tmp_path)
    free = load_recipe(path, ["data.chat_template_kwargs.enable_thinking=false"])
    assert free.data.chat_template_kwargs == {"enable_thinking": False}
    for name in ("add_generation_prompt", "tools", "messages"):
        with pytest.raises(SpectrainError, match=rf"data\.chat_template_kwargs: '{name}' is set for every chat"):
            load_recipe(path, [f"data.chat_template_kwargs.{name}=false"])

"""What a recipe allows and hardly means is told: too few steps, too few held-out chats, another sampler."""

import json
import re
import shutil

import pytest

from spectrain import cli
from spectrain.config import load_recipe
from spectrain.data.conversations import Conversation
from spectrain.data.messages import Message
from spectrain.data.split import split_conversations
from spectrain.evaluation.decisions import fewest
from spectrain.exact.sampler import Sampler
from spectrain.foresight import few_heldout, few_steps, other_sampler, own_sampler
from spectrain.pipeline import Run


@pytest.fixture
def recipe(make_recipe, tmp_path):
    return make_recipe(tmp_path)


def loaded(recipe, *overrides):
    return load_recipe(recipe, list(overrides))


def chats(count, kind="chat", tools=None):
    asked = [Message("user", f"{kind} {i}") for i in range(count)]
    return [Conversation(f"{kind}-{i}", (message,), kind, tools=tools) for i, message in enumerate(asked)]


# --- steps --------------------------------------------------------------------------------------------------------


def test_few_steps_name_the_keys_and_what_works(recipe):
    (note,) = few_steps(loaded(recipe, "training.micro_batch_tokens=4096"), 16)
    assert note.startswith("16 optimizer steps teach a drafter little, it takes about 200: try ")
    for part in (
        "training.micro_batch_tokens=512 (now 4096)",
        "training.epochs=8 (now 2)",
        "optim.lr=0.001 (now 5e-05)",
    ):
        assert part in note
    small = ("training.epochs=9", "optim.lr=1e-2")
    assert few_steps(loaded(recipe, *small), 16)[0].endswith("or train on more chats")  # nothing that makes it worse
    assert few_steps(loaded(recipe, "training.steps=16"), 16)[0].endswith("raise training.steps (16)")
    assert few_steps(loaded(recipe), 200) == []


def test_validations_and_checkpoints_that_never_come_are_told(recipe):
    late = ("training.validate_every=500", "training.checkpoint_every=300")
    (note,) = few_steps(loaded(recipe, *late), 300)
    assert "training.validate_every (500) and training.checkpoint_every (300) of 300 optimizer steps" in note
    assert few_steps(loaded(recipe, *late), 501) == []
    assert "checkpoint_every" not in few_steps(loaded(recipe, *late), 301)[0]


def test_a_dry_run_and_a_training_tell_and_steps_are_exact_or_about(recipe, tmp_path, capsys):
    cli.train([str(recipe), "--dry-run", "--tflops", "1", "--bandwidth", "10"])
    about = capsys.readouterr().out
    assert "(about" in about
    assert "real runs take some more optimizer steps" in about
    assert "note: " in about
    for name in ("train", "heldout"):
        file = tmp_path / f"{name}.jsonl"
        rows = [json.loads(line) | {"completion": "yes."} for line in file.read_text(encoding="utf-8").splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    cli.train([str(recipe), "regenerate=null", "--dry-run", "--tflops", "1", "--bandwidth", "10"])
    exact = capsys.readouterr().out
    assert "(exactly)" in exact
    assert "more optimizer steps" not in exact
    assert "padding is not counted: real steps take somewhat longer" in exact
    told = next(line for line in exact.splitlines() if "teach a drafter little" in line)
    Run(load_recipe(recipe, ["regenerate=null"])).train()
    assert told in capsys.readouterr().out.splitlines()
    Run(load_recipe(recipe, ["regenerate=null"])).train()
    assert "optimizer steps" not in capsys.readouterr().out  # it is over, and nothing can be changed about it


# --- held out -----------------------------------------------------------------------------------------------------


def test_what_a_verdict_needs_is_told_over_all_and_by_kind(recipe):
    data = loaded(recipe, "data.heldout=[]", "evaluation.k=[1,2]")
    least = fewest(4)  # two drafters at two lengths
    assert least == 8
    few = few_heldout(data, chats(143), chats(7))
    assert [part in few[0] for part in ("7 held-out", "at least 8 are needed to choose among 4", "to 0.06")] == [
        True
    ] * 3
    assert few_heldout(data, chats(142), chats(8)) == []
    parts = split_conversations([*chats(120), *chats(30, "sql")], heldout_fraction=0.06)
    (note,) = few_heldout(data, parts.train, parts.heldout)
    assert "on each kind (sql 2, chat 7)" in note
    assert "at least 9 are needed to choose among 4 on each of 2 kinds" in note  # each kind is another look
    assert "data.heldout_fraction (0.05), to 0.3 for 9 of each kind" in note
    share = split_conversations([*chats(120), *chats(30, "sql")], heldout_fraction=0.3)
    assert few_heldout(data, share.train, share.heldout) == []  # what was named is enough
    some = [*chats(120), *chats(30, "sql"), *chats(12, "json"), *chats(8, "route")]
    parts = split_conversations(some, heldout_fraction=0.05)
    (note,) = few_heldout(data, parts.train, parts.heldout)
    assert "(route 0, json 1, sql 1, chat 6)" in note  # those with none first
    assert "(0.05), to 0.34 for 10 of each kind that has so many, and add chats of route (8), json (12)" in note
    parts = split_conversations(some, heldout_fraction=0.34)
    (note,) = few_heldout(data, parts.train, parts.heldout)
    assert "each kind (route 3, json 4), " in note
    assert note.endswith(
        "; add chats of route (8), json (12), or name some in data.heldout: half of them are fewer than 10"
    )
    nested = [*chats(60, "desk/a"), *chats(60, "desk/b"), *chats(60, "mail/c")]
    (note,) = few_heldout(data, nested, [])[:1]
    assert "0 held-out conversations are too few for a verdict, at least 8 are needed to choose among 4;" in note
    (note,) = few_heldout(data, nested, nested[:10])
    assert "to choose among 4 on each of 4 kinds" in note  # mail is all that mail/c is
    assert "give data.heldout more chats" in few_heldout(loaded(recipe), chats(9), chats(2))[0]


def test_tools_that_are_only_in_training_are_told(recipe):
    called = chats(5, "chat", ({"type": "function", "function": {"name": "f"}},))
    (note,) = few_heldout(loaded(recipe), called, chats(50))
    assert "5 conversations in training have tools and none held out" in note
    assert few_heldout(loaded(recipe), called, [*called, *chats(50)]) == []
    own = loaded(recipe, "data.heldout=[]")
    (note,) = few_heldout(own, [*called, *chats(50)], chats(50))
    assert "such; give them a kind of their own (now chat), which is held out in proportion" in note
    called = chats(40, "tools", called[0].tools)
    note = few_heldout(own, [*called, *chats(500)], chats(50))[-1]
    assert re.search(
        r"nothing is measured on such; raise data.heldout_fraction \(0.05\), to 0.\d+ for \d+ of each kind$", note
    )
    note = few_heldout(own, [*called[:10], *chats(500)], chats(50))[-1]
    assert "nothing is measured on such; add chats of tools (10), or name some in data.heldout" in note


# --- sampler ------------------------------------------------------------------------------------------------------


def with_generation(chat_folder, tmp_path, recipe, **settings):
    folder = tmp_path / "target"
    shutil.copytree(chat_folder, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    recipe.write_text(recipe.read_text().replace(str(chat_folder), str(folder)), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"temperature": 0.7, "top_p": 0.9, "do_sample": True}, Sampler(0.7, top_p=0.9)),
        ({"top_k": 20, "temperature": 0.6}, Sampler(0.6, top_k=20)),
        ({"do_sample": True}, Sampler(1)),
        ({"do_sample": True, "top_k": 0, "top_p": 1.0}, Sampler(1)),
        ({"eos_token_id": 3}, None),
        ({"temperature": -1.0}, None),
    ],
)
def test_a_model_s_own_sampler_is_read(chat_folder, tmp_path, recipe, settings, found):
    assert own_sampler(str(with_generation(chat_folder, tmp_path, recipe, **settings)), None) == found


def test_a_model_without_a_sampler_has_none(tmp_path):
    assert own_sampler(str(tmp_path), None) is None


def test_another_sampler_than_the_model_s_is_told_in_the_audit_and_when_preparing(
    chat_folder, tmp_path, recipe, capsys
):
    with_generation(chat_folder, tmp_path, recipe, temperature=0.7, top_p=0.9, do_sample=True)
    (note,) = other_sampler(loaded(recipe))
    assert "generation_config.json says T=0.7 top-p 0.9" in note
    assert "regenerate.sampler T=1" in note
    assert "evaluation.samplers greedy" in other_sampler(loaded(recipe, "regenerate=null"))[0]
    assert other_sampler(loaded(recipe, "regenerate.sampler={temperature: 0.7, top_p: 0.9}")) == []
    cli.prepare([str(recipe), "--audit"])
    assert f"Note: {note}." in capsys.readouterr().out
    Run(load_recipe(recipe)).conversations()
    assert f"note: {note}" in capsys.readouterr().out

"""The measurement: resumable, interleaved, spread over kinds, and its samples are what the summary takes."""

import copy
import itertools
import json
import shutil

import pytest
import torch

from spectrain.data.conversations import parse_conversation, render_prompt
from spectrain.decoding import generate_plain
from spectrain.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.errors import SpectrainError
from spectrain.evaluation import acceptance, visited
from spectrain.evaluation.acceptance import choose
from spectrain.evaluation.calibration import Calibration
from spectrain.evaluation.contenders import AcceptanceConfig, contenders
from spectrain.evaluation.measurement import measure
from spectrain.evaluation.summary import summarise
from spectrain.evaluation.teacher_forced import TeacherForced
from spectrain.exact.sampler import Sampler
from spectrain.shapes import DynamicTree, StaticTree

TEXTS = {"narrow/sql": ("hello",), "narrow/json": ("ab",), "open/chat": ("a",)}
CONFIG = AcceptanceConfig(k=(1, 2), samplers=(Sampler(), Sampler(1.0)), max_new_tokens=6, seed=1, seeds=1)
IDENTITY = {"weights": "w", "bundle": "b"}
NAMES = ["plain", "ngram k=1", "ngram k=2", "eagle3 k=1", "eagle3 k=2"]
TIMES = {"prefill_s", "draft_s", "verify_s", "overhead_s", "total_s"}
PHYSICAL = {*TIMES, "energy_j"}


def chats():
    texts = [(kind, text) for kind, group in TEXTS.items() for text in group]
    return [parse_conversation({"id": f"c{i}", "kind": k, "prompt": t}, "row") for i, (k, t) in enumerate(texts)]


@pytest.fixture(scope="module")
def drafters(chat_target):
    torch.manual_seed(0)
    counts_V = torch.arange(chat_target.vocab_size)
    eagle = Eagle3Drafter.build(Eagle3Config(depths=2, draft_vocab_size=64), chat_target, counts_V)
    return {"ngram": NgramDrafter(NgramConfig()), "eagle3": eagle.eval()}


def teacher_forced_rows(samples):
    found = TeacherForced()
    for sample in samples:
        found.add(sample)
    return found.rows()


def entries(drafters, config):
    return contenders(drafters, config.k, config.trees, config.verification, leave_out=True)


@pytest.fixture
def run(chat_target, drafters, tmp_path):
    def run(name="raw", config=CONFIG, conversations=None, identity=IDENTITY):
        chosen = conversations or chats()
        found = measure(
            chat_target, entries(drafters, config), chosen, config, tmp_path / name, identity, progress=False
        )
        return list(found.samples())

    return run


@pytest.fixture(scope="module")
def measured(chat_target, drafters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    found = measure(chat_target, entries(drafters, CONFIG), chats(), CONFIG, folder, IDENTITY, progress=False)
    return list(found.samples()), folder


@pytest.fixture
def finished(measured, tmp_path):
    """A finished measurement where ``run`` looks for its own."""
    shutil.copytree(measured[1], tmp_path / "raw")
    return tmp_path / "raw"


def cut(folder):
    """Leave the first conversation alone, as an interruption in the second does."""
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join(line for line in lines if json.loads(line)["conversation"] == "c0"))


def timeless(samples):
    return [{key: value for key, value in sample.items() if key not in PHYSICAL} for sample in samples]


def refusal(call, *arguments, **keywords):
    with pytest.raises(SpectrainError) as error:
        call(*arguments, **keywords)
    return str(error.value)


def test_every_contender_answers_every_conversation_with_every_sampler(measured):
    samples, folder = measured
    found = [(s["conversation"], s["temperature"], s["contender"]) for s in samples]
    assert found == [(f"c{i}", t, name) for i in range(3) for t in (0.0, 1.0) for name in NAMES]
    assert samples == [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_sample_tells_what_was_generated(measured, chat_target):
    samples, _ = measured
    by_id = {chat.id: chat for chat in chats()}
    for sample in samples:
        prompt = render_prompt(by_id[sample["conversation"]].prompt, chat_target.tokenizer)
        assert sample["prompt_tokens"] == len(prompt)
        assert sample["kind"] == by_id[sample["conversation"]].kind
        assert sample["new_tokens"] == 1 + sum(committed for _, _, committed, _, _ in sample["rounds"])
        assert all(proposed == nodes <= sample["k"] for proposed, *_, nodes in sample["rounds"])
        assert sample["total_s"] >= sum(sample[name] for name in TIMES - {"total_s", "overhead_s"})
        assert sample["equal_to_plain"] is (True if sample["temperature"] == 0 else None)
        assert sample["first_difference"] is None
    plain = next(s for s in samples if s["contender"] == "plain" and s["conversation"] == "c0")
    prompt = render_prompt(by_id["c0"].prompt, chat_target.tokenizer)
    expected = generate_plain(chat_target, prompt, sampler=Sampler(), max_new_tokens=6, seed=plain["seed"])
    assert (plain["new_tokens"], plain["finished"]) == (len(expected.tokens), expected.finished)


def test_chats_are_answered_several_times_where_answers_are_drawn(run, simulator):
    config = CONFIG.model_copy(update={"k": (2,), "seeds": 2})
    samples = run("seeds", config=config)
    names = ["plain", "ngram k=2", "eagle3 k=2"]
    found = [(s["conversation"], s["temperature"], s["seed_index"], s["contender"]) for s in samples]
    places = [(0.0, 0), (1.0, 0), (1.0, 1)]
    assert found == [(f"c{i}", t, index, name) for i in range(3) for t, index in places for name in names]
    seeds = {(s["conversation"], s["seed_index"]): s["seed"] for s in samples}
    assert len(set(seeds.values())) == len(seeds) == 6  # the first is the greedy answer's too
    assert {s["turn"] for s in samples} == {1}
    rows = teacher_forced_rows(samples)
    everything = {(r["prefixes"], r["depth"]): r for r in rows if r["kind"] == "everything"}
    for prefixes, temperature in (("greedy (T=0)", 0.0), ("T=1", 1.0)):
        lengths = [s["new_tokens"] for s in samples if (s["contender"], s["temperature"]) == ("plain", temperature)]
        row = everything[prefixes, 0]
        assert (row["positions"], row["conversations"]) == (sum(length - 1 for length in lengths), 3)
        assert row["interval"]["low"] <= row["alpha"] == row["interval"]["value"] <= row["interval"]["high"]
    document = summarise(samples, context=simulator.context | {"teacher_forced": rows})
    assert [block["conversations"] for block in document["samplers"]] == [3, 3]
    assert run("seeds", config=config) == samples  # finished: nothing is decoded again


def test_the_turn_is_the_place_of_the_answer_in_its_chat(run):
    messages = [("user", "a"), ("assistant", "b"), ("user", "a"), ("assistant", "ab")]
    chat = {"id": "c9", "messages": [{"role": role, "content": text} for role, text in messages]}
    samples = run("turns", CONFIG.model_copy(update={"k": (1,)}), [parse_conversation(chat, "row")])
    assert {s["turn"] for s in samples} == {2}


def test_samples_can_be_summarised(measured, simulator):
    samples, _ = measured
    rows = teacher_forced_rows(samples)
    document = summarise(samples, context=simulator.context | {"teacher_forced": rows})
    assert [block["name"] for block in document["samplers"]] == ["greedy (T=0)", "T=1"]
    for block in document["samplers"]:
        assert [c["contender"] for c in block["contenders"]] == NAMES
        assert block["kinds"] == ["narrow", "narrow/json", "narrow/sql", "open", "open/chat"]
    assert all(entry["equal"] == 3 for entry in document["samplers"][0]["exactness"])


TREES = AcceptanceConfig(
    k=(2,),
    trees=(StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0))), DynamicTree(2, 3, 7)),
    verification=("token", "block", "typical_lossy"),
    samplers=(Sampler(), Sampler(1.0)),
    max_new_tokens=5,
    seeds=1,
)
RULES = ("", " block", " LOSSY typical")


def test_trees_and_other_rules_are_contenders_like_any_other(run, simulator, tmp_path):
    samples = run(config=TREES, conversations=chats()[:2])
    drafts = [*(f"k=2{rule}" for rule in RULES), "tree of 5", "dynamic tree of 7"]
    names = ["plain", *(f"{drafter} {draft}" for drafter in ("ngram", "eagle3") for draft in drafts)]
    found = [(s["conversation"], s["temperature"], s["contender"]) for s in samples]
    assert found == [(f"c{i}", t, name) for i in range(2) for t in (0.0, 1.0) for name in names]
    for sample in samples:
        widest = sample["shape"]["nodes"] if sample["shape"] else 0
        assert all(proposed <= nodes <= widest for proposed, *_, nodes in sample["rounds"])
        assert sample["lossy"] == ("LOSSY" in sample["contender"])
        if sample["temperature"] == 0:
            assert sample["equal_to_plain"] is True  # at T=0 even typical acceptance keeps the argmax alone
    for name in names[-2:]:
        rounds = [r for s in samples if s["contender"] == name for r in s["rounds"]]
        assert any(nodes > proposed for proposed, *_, nodes in rounds)
    blocks = summarise(samples, context=simulator.context)["samplers"]
    assert [[c["contender"] for c in block["contenders"]] for block in blocks] == [names] * 2
    dynamic = blocks[0]["contenders"][-1]
    assert (dynamic["k"], dynamic["depth"], dynamic["nodes"], dynamic["verification"]) == (None, 2, 7, "token")
    forced = [sample for sample in samples if "teacher_forced" in sample]
    assert len(forced) == 2 * 2  # once for each answer, whatever the rules and trees
    assert run(config=TREES, conversations=chats()[:2]) == samples  # as they come back from the file


@pytest.fixture
def limited(drafters, monkeypatch):
    """eagle3 drafts one token ahead."""
    eagle = copy.copy(drafters["eagle3"])
    eagle.deepest = 1
    monkeypatch.setitem(drafters, "eagle3", eagle)
    return eagle


def test_drafts_that_no_drafter_fills_are_refused(limited):
    message = refusal(entries, {"eagle3": limited}, CONFIG)
    assert "k=2 has depth 2, eagle3 drafts at most 1 tokens ahead" in message


def test_a_draft_that_one_drafter_cannot_fill_is_left_to_the_others(run, limited, tmp_path):
    """Its teacher-forced scores then go as deep as its own longest chain."""
    samples = run(config=AcceptanceConfig(k=(1, 2), trees=(StaticTree(((0,), (0, 0))),), max_new_tokens=4))
    assert [s["contender"] for s in samples[:5]] == ["plain", "ngram k=1", "ngram k=2", "ngram tree of 2", "eagle3 k=1"]
    assert len(samples) == 3 * 5
    forced = [sample for sample in samples if "teacher_forced" in sample]
    assert [(s["conversation"], len(s["teacher_forced"]["positions"])) for s in forced] == [
        ("c0", 1),
        ("c1", 1),
        ("c2", 1),
    ]


def test_what_a_drafter_holds_is_recorded(measured):
    samples, _ = measured
    assert {s["state_bytes"] for s in samples if s["drafter"] != "eagle3"} == {0}
    assert all(s["state_bytes"] > 0 for s in samples if s["drafter"] == "eagle3" and s["rounds"])


def test_a_sample_tells_what_the_targets_cache_held(measured, chat_target):
    """Every committed token but the last has been read, whoever decodes."""
    samples, _ = measured
    config = chat_target.config
    position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    for sample in samples:
        assert sample["cache_bytes"] == position * (sample["prompt_tokens"] + sample["new_tokens"] - 1)


def test_sampled_answers_are_placed_in_the_targets_law(measured):
    """Plain ones too, as a control; at T=0 there is no law to test."""
    samples, _ = measured
    for sample in samples:
        if sample["temperature"] == 0:
            assert sample["pit"] is None
        else:
            assert (sum(sample["pit"]["bins"]), sample["pit"]["outside"]) == (sample["new_tokens"], 0)
            assert len(sample["pit"]["bins"]) == 20


def test_sampled_chains_tell_of_the_states_they_visited(measured):
    samples, _ = measured
    for sample in samples:
        if sample["temperature"] == 0 or sample["contender"] == "plain":
            assert (sample["visited_alpha"], sample["confidence"]) == (None, None)
            continue
        tested = [0] * sample["k"]
        for proposed, accepted, committed, _, _ in sample["rounds"]:
            for at in range(min(proposed, accepted + 1, committed)):
                tested[at] += 1
        assert [count for _, count in sample["visited_alpha"]] == tested
        assert all(0 <= alpha <= count for alpha, count in sample["visited_alpha"])
        if sample["drafter"] == "ngram":  # it chooses: a point mass is sure of everything
            assert sample["confidence"] is None
        elif sum(tested):
            _, count, hits = (sum(column) for column in zip(*sample["confidence"], strict=True))
            assert count == sum(tested)
            assert hits == sum(min(accepted, committed) for _, accepted, committed, _, _ in sample["rounds"])


def test_trees_have_no_visited_states(run):
    config = AcceptanceConfig(k=(1,), trees=(DynamicTree(2, 2, 3),), samplers=(Sampler(1.0),), max_new_tokens=4)
    samples = run(config=config, conversations=chats()[:1])
    trees = [s for s in samples if s["shape"] and s["shape"]["type"] == "dynamic tree"]
    assert len(trees) == 2 * 2  # two drafters, two seeds
    assert all(s["visited_alpha"] is s["confidence"] is None for s in trees)
    assert all(sum(s["pit"]["bins"]) == s["new_tokens"] for s in trees)


def test_teacher_forced_scores_tell_of_confidence_and_of_the_draft_vocabulary(measured):
    samples, _ = measured
    records = [record for sample in samples if (record := sample.get("teacher_forced"))]
    assert records
    for record in records:
        counts = [sum(count for _, count, _ in bins) for bins in record["confidence"]]
        hits = [sum(right for *_, right in bins) for bins in record["confidence"]]
        assert (counts, hits) == (record["positions"], record["greedy"])
        covered, of = record["in_draft_vocabulary"]
        assert 0 <= covered <= of == record["started"]
    rows = Calibration.of(samples).rows()
    assert {row["source"] for row in rows} >= {"teacher-forced", "eagle3 k=2"}


def test_scores_of_an_older_version_are_refused_by_what_they_lack(measured):
    sample = next(copy.deepcopy(sample) for sample in measured[0] if sample.get("teacher_forced"))
    del sample["teacher_forced"]["confidence"]
    assert "no 'confidence'; measure again" in refusal(teacher_forced_rows, [sample])


def test_energy_is_what_a_counter_says(run, monkeypatch):
    """A joule whenever it is looked at: at both ends of an answer, and around what only the report needs."""
    reads = itertools.count()
    monkeypatch.setattr(visited, "energy_counter", lambda device: lambda: float(next(reads)))
    config = AcceptanceConfig(k=(1,), samplers=(Sampler(), Sampler(1.0)), max_new_tokens=4)
    samples = run(config=config, conversations=chats()[:1])
    for sample in samples:
        watched = len(sample["rounds"]) if sample["visited_alpha"] else 0
        assert sample["energy_j"] == 1 + watched  # two more looks a round, of which the step between is left out


class Counting:
    """``generate_plain`` of the measurement that fails in the given call."""

    def __init__(self, monkeypatch, failing=0):
        self.calls, self.failing, self.real = 0, failing, generate_plain
        monkeypatch.setattr(acceptance, "generate_plain", self)

    def __call__(self, *arguments, **keywords):
        self.calls += 1
        if self.calls == self.failing:
            raise KeyboardInterrupt
        return self.real(*arguments, **keywords)


def test_an_interrupted_run_goes_on_with_the_same_samples(run, measured, monkeypatch, tmp_path):
    samples, _ = measured
    with monkeypatch.context() as context:
        Counting(context, failing=2 + 2 + 2)  # two samplers to warm up with, two a conversation
        with pytest.raises(KeyboardInterrupt):
            run()
    assert len((tmp_path / "raw" / "samples.jsonl").read_text().splitlines()) == len(NAMES) * 2
    rest = Counting(monkeypatch)
    assert timeless(run()) == timeless(samples)
    assert rest.calls == 2 + 2 * 2


@pytest.mark.parametrize("torn", ['{"conversation": "c1", "cont', "whole sample"])
def test_lines_that_were_cut_off_are_measured_again(run, measured, finished, torn):
    samples, _ = measured
    cut(finished)
    with (finished / "samples.jsonl").open("a") as out:
        out.write(torn.replace("whole sample", json.dumps(samples[10]) + "\n"))
    found = run()
    assert timeless(found) == timeless(samples)
    assert found == [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_a_finished_run_measures_nothing_again(run, measured, finished, monkeypatch):
    before = contents(finished)
    calls = Counting(monkeypatch)
    assert run() == measured[0]
    assert calls.calls == 0
    assert {name: kept for name, (kept, _) in contents(finished).items()} == {n: k for n, (k, _) in before.items()}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": CONFIG.model_copy(update={"k": (1, 3)})}, "--k, in a recipe evaluation.k[1]: 2 against 3"),
        ({"config": CONFIG.model_copy(update={"verification": ("block",)})}, "'token' against 'block'"),
        ({"config": CONFIG.model_copy(update={"trees": (DynamicTree(),)})}, "--tree, in a recipe evaluation.trees"),
        ({"config": CONFIG.model_copy(update={"max_new_tokens": 9})}, "evaluation.max_new_tokens: 6 against 9"),
        ({"config": CONFIG.model_copy(update={"samplers": (Sampler(), Sampler(0.5))})}, "temperature: 1.0 against 0.5"),
        ({"identity": IDENTITY | {"bundle": "c"}}, "the bundle's weights: 'b' against 'c'"),
        ({"identity": {"weights": "w"}}, "bundle"),
        ({"conversations": chats()[:2]}, "the chats (--traffic, "),
    ],
    ids=["k", "rule", "trees", "length", "sampler", "bundle", "nothing", "traffic"],
)
def test_a_folder_begun_otherwise_is_refused_by_what_differs(run, finished, changes, named):
    before = contents(finished)
    message = refusal(run, **changes)
    assert named in message
    assert str(finished) in message
    assert contents(finished) == before


def test_another_template_is_another_measurement(run, finished, chat_target, monkeypatch):
    monkeypatch.setattr(chat_target.tokenizer, "chat_template", chat_target.tokenizer.chat_template + " ")
    assert "as the target's chat template renders them (data.chat_template_kwargs): " in refusal(run)


def test_a_prompt_without_room_is_named_before_anything_is_written(run, tmp_path):
    long = parse_conversation({"id": "long", "prompt": "x" * 250}, "row")
    message = refusal(run, conversations=[*chats(), long])
    assert "conversation 'long'" in message
    assert "context of 256" in message
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_fills_the_context_to_the_last_token_is_measured(run, chat_target):
    room = 256 - len(render_prompt(parse_conversation({"prompt": "x"}, "row").prompt, chat_target.tokenizer))
    brim = parse_conversation({"id": "brim", "prompt": "x" * (1 + room - 2)}, "row")
    config = AcceptanceConfig(k=(2,), max_new_tokens=2)
    assert {s["new_tokens"] for s in run(config=config, conversations=[brim])} <= {1, 2}


def test_contenders_are_interleaved_in_an_order_of_their_own(run, monkeypatch):
    """Every conversation and sampler runs all contenders, and not always in the same order."""
    order = []
    plain, generate = acceptance.generate_plain, acceptance.generate

    def note(name, call):
        def noted(*arguments, **keywords):
            limit, shape = keywords["max_new_tokens"], keywords.get("shape")
            order.append((limit, f"{name or type(arguments[1]).__name__} {shape.depth if shape else 0}"))
            return call(*arguments, **keywords)

        return noted

    monkeypatch.setattr(acceptance, "generate_plain", note("plain", plain))
    monkeypatch.setattr(acceptance, "generate", note("", generate))
    config = CONFIG.model_copy(update={"max_new_tokens": 9, "samplers": tuple(map(Sampler, (0, 0.5, 1)))})
    run(config=config, conversations=chats()[:2])
    names = {"plain 0", "NgramDrafter 1", "NgramDrafter 2", "Eagle3Drafter 1", "Eagle3Drafter 2"}
    warm = [name for limit, name in order if limit == 8]
    rest = [name for limit, name in order if limit == 9]
    assert set(warm) == names  # once, before anything is timed
    assert order[: len(warm)] == [(8, name) for name in warm]
    turns = [rest[i : i + 5] for i in range(0, len(rest), 5)]
    assert len(turns) == 2 * 3
    assert all(set(turn) == names for turn in turns)
    assert len({turn[0] for turn in turns}) > 2
    first, order[:] = list(order), []
    run("again", config=config, conversations=chats()[:2])
    assert order == first


def test_contenders_are_every_drafter_at_every_length_once(drafters):
    assert [c.name for c in contenders(drafters, (2, 1, 2))] == NAMES
    assert [c.name for c in contenders({}, (3,))] == ["plain"]


def many(kinds):
    rows = [(kind, i) for kind, count in kinds.items() for i in range(count)]
    return [parse_conversation({"id": f"{k}-{i:02d}", "kind": k, "prompt": f"{k} {i}"}, "row") for k, i in rows]


def test_choose_spreads_over_the_kinds_and_stays_the_same():
    everything = many({"a": 20, "b": 20, "c": 1})
    chosen = choose(everything, 9, seed=0)
    kinds = [c.kind for c in chosen]
    assert (kinds.count("a"), kinds.count("b"), kinds.count("c")) == (4, 4, 1)
    assert [c.id for c in chosen] == sorted((c.id for c in chosen), key=[c.id for c in everything].index)
    assert {c.id for c in choose(everything[::-1], 9, seed=0)} == {c.id for c in chosen}
    assert {c.id for c in choose(everything, 9, seed=1)} != {c.id for c in chosen}
    assert {c.id for c in choose(everything, 8, seed=0)} < {c.id for c in chosen}
    assert [c.id for c in choose(everything, 9, seed=0)] == [c.id for c in chosen]


@pytest.mark.parametrize("count", [None, 41, 99])
def test_choose_takes_all(count):
    everything = many({"a": 20, "b": 20, "c": 1})
    assert choose(everything, count, seed=0) == everything


def test_only_chosen_conversations_are_measured(run):
    samples = run(config=AcceptanceConfig(k=(1,), conversations=2, max_new_tokens=2))
    assert len({s["kind"] for s in samples}) == 2
    assert {s["conversation"] for s in samples} == {c.id for c in choose(chats(), 2, seed=0)}


@pytest.fixture
def altered(monkeypatch):
    """Drafted answers pass through a function first."""

    def altered(change):
        real = acceptance.generate

        def generate(*arguments, **keywords):
            result = copy.copy(real(*arguments, **keywords))
            result.tokens = change(list(result.tokens))
            return result

        monkeypatch.setattr(acceptance, "generate", generate)

    return altered


def test_the_first_difference_is_found_and_its_logit_gap_is_the_targets(run, altered, chat_target):
    altered(lambda tokens: [*tokens[:3], (tokens[3] + 1) % 250, *tokens[4:]])
    config = AcceptanceConfig(k=(1,), max_new_tokens=8)
    samples = run(config=config, conversations=chats()[:1])
    prompt = render_prompt(chats()[0].prompt, chat_target.tokenizer)
    plain = generate_plain(chat_target, prompt, sampler=Sampler(), max_new_tokens=8).tokens
    ids = torch.tensor([[*prompt, *plain[:3]]])
    with torch.inference_mode():
        logits = chat_target.model(ids).logits[0, -1].double()
    gap = float(logits[plain[3]] - logits[(plain[3] + 1) % 250])
    assert gap > 0
    for sample in samples:
        if sample["contender"] == "plain":
            assert sample["equal_to_plain"] is True
        else:
            assert sample["equal_to_plain"] is False
            assert sample["first_difference"]["position"] == 3
            assert sample["first_difference"]["logit_gap"] == pytest.approx(gap, rel=1e-4)


@pytest.mark.parametrize("change", [lambda t: t[:5], lambda t: [*t, 1]], ids=["shorter", "longer"])
def test_an_answer_that_ends_elsewhere_has_no_logit_gap(run, altered, change):
    altered(change)
    samples = run(config=AcceptanceConfig(k=(1,), max_new_tokens=8), conversations=chats()[:1])
    expected = {"position": min(5, 8) if len(change([0] * 8)) < 8 else 8, "logit_gap": None}
    assert all(s["first_difference"] == expected for s in samples if s["contender"] != "plain")


def test_teacher_forced_rows_are_pooled_by_kind_and_what_it_lies_in(measured):
    samples, _ = measured
    rows = teacher_forced_rows(samples)
    kinds = {"everything", "narrow", "narrow/sql", "narrow/json", "open", "open/chat"}
    assert {row["kind"] for row in rows} == kinds
    assert {row["drafter"] for row in rows} == {"eagle3"}
    assert {row["prefixes"] for row in rows} == {"greedy (T=0)", "T=1"}
    assert {row["depth"] for row in rows} == {0, 1}
    assert {row["temperature"] for row in rows} == {1.0}
    assert all(0 <= row["alpha"] <= 1 and row["positions"] > 0 for row in rows)
    cell = {(r["prefixes"], r["kind"], r["depth"]): r for r in rows}
    for prefixes in ("greedy (T=0)", "T=1"):
        for depth in (0, 1):
            parts = [cell[prefixes, kind, depth] for kind in ("narrow/sql", "narrow/json")]
            whole = cell[prefixes, "narrow", depth]
            assert whole["positions"] == sum(part["positions"] for part in parts)
            pooled = sum(part["alpha"] * part["positions"] for part in parts) / whole["positions"]
            assert whole["alpha"] == pytest.approx(pooled)
    # Position t at depth d predicts answer token t + 2 + d: an answer of n tokens has n - 1 - d of them.
    lengths = [s["new_tokens"] for s in samples if s["contender"] == "plain" and s["temperature"] == 0]
    assert cell["greedy (T=0)", "everything", 0]["positions"] == sum(length - 1 for length in lengths)


def test_chats_without_a_kind_count_once():
    record = {
        "positions": [4], "alpha": [2.0], "greedy": [1], "survived": [1], "reached": [4], "started": 4, "rounds": 4,
        "committed": 5, "confidence": [[[0.0, 0, 0]] * 9 + [[3.8, 4, 1]]], "in_draft_vocabulary": [3, 4],
    }  # fmt: skip
    for kind in ("unlabelled", "all", "everything"):
        told = {"conversation": "c", "drafter": "eagle3", "sampler": {"temperature": 0.0}, "kind": kind}
        sample = {**told, "teacher_forced": record}
        rows = {row["kind"]: row for row in teacher_forced_rows([sample])}
        assert set(rows) == {kind, "everything"}
        assert all((row["positions"], row["alpha"]) == (4, 0.5) for row in rows.values())


def test_a_finished_measurement_is_reported_as_it_was_made(run, finished, monkeypatch):
    """Nothing more is timed, so the threads of the process that reports do not matter; while unfinished they do."""
    before = (finished / "samples.jsonl").read_bytes()
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    run()
    assert (finished / "samples.jsonl").read_bytes() == before
    assert json.loads((finished / "samples.json").read_text())["threads"] == threads
    cut(finished)
    assert "threads" in refusal(run)


def test_teacher_forced_rows_of_other_conversations_do_not_count(measured):
    rows = teacher_forced_rows(s for s in measured[0] if s["conversation"] == "c1")
    assert {row["kind"] for row in rows} == {"everything", "narrow", "narrow/json"}


def test_an_answer_of_one_token_has_nothing_to_score(run, chat_target, monkeypatch):
    prompt = render_prompt(chats()[0].prompt, chat_target.tokenizer)
    first = generate_plain(chat_target, prompt, sampler=Sampler(), max_new_tokens=1).tokens[0]
    monkeypatch.setattr(chat_target.model.generation_config, "eos_token_id", first)
    samples = run(config=AcceptanceConfig(k=(2,), max_new_tokens=8), conversations=chats()[:1])
    assert all((s["new_tokens"], s["rounds"], s["finished"]) == (1, [], "eos") for s in samples)


def test_answers_stop_at_the_first_eos_with_every_contender(run, chat_target, monkeypatch):
    """Case C17: the third greedy token ends the answer."""
    prompt = render_prompt(chats()[0].prompt, chat_target.tokenizer)
    tokens = generate_plain(chat_target, prompt, sampler=Sampler(), max_new_tokens=8).tokens
    assert tokens[2] not in tokens[:2]
    monkeypatch.setattr(chat_target.model.generation_config, "eos_token_id", tokens[2])
    samples = run(config=AcceptanceConfig(k=(1, 5), max_new_tokens=8), conversations=chats()[:1])
    assert all((s["new_tokens"], s["finished"], s["equal_to_plain"]) == (3, "eos", True) for s in samples)

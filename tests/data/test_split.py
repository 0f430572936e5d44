"""Held-out conversations: no leaks, the same split every time, every kind in proportion."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from spectrain.data.conversations import Conversation, Message
from spectrain.data.dropped import Dropped
from spectrain.data.split import (
    check_leaks,
    conversations_digest,
    find_leaks,
    normalised,
    split_conversations,
    without_duplicates,
)
from spectrain.errors import SpectrainError


def asks(name: str, *questions: str, kind: str = "all", **labels: object) -> Conversation:
    turns = [Message("user", question) for question in questions]
    answered = [message for turn in turns for message in (turn, Message("assistant", "ok"))]
    return Conversation(name, tuple(answered), kind, **labels)  # type: ignore[arg-type]


def varied(count: int, seed: int = 0, kind: str = "all") -> list[Conversation]:
    rng = random.Random(seed)
    return [asks(f"{kind}{i}", " ".join(f"w{rng.randrange(500)}" for _ in range(20)), kind=kind) for i in range(count)]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is  IT?", "what is it", True),
        ("STRASSE, ﬁve!", "straße five", True),
        ("pay 1.50", "pay 150", False),
        ("a + b", "a = b", False),
        ("कि", "की", False),
        ("?!", "...", False),
    ],
)
def test_normalised_text(one: str, other: str, same: bool) -> None:
    assert (normalised(asks("a", one)) == normalised(asks("b", other))) is same


def test_normalised_text_is_that_of_all_user_turns_and_no_other() -> None:
    assert normalised(asks("a", "One.", "Two?")) == "one two"


def test_duplicates_across_the_split_are_errors_that_name_both_rows() -> None:
    train = [*varied(5), asks("t1", "Hello,  World!"), asks("t2", "hello world")]
    with pytest.raises(SpectrainError, match=r"'h1' and 't1' \(same user turns\)"):
        check_leaks(train, [asks("h0", "something else"), asks("h1", "hello WORLD")])


def test_the_same_template_and_slots_on_both_sides_is_an_error() -> None:
    train = [asks("t", "Make it 3 apples", template="buy", slots={"n": 3, "what": "apples"})]
    check_leaks(train, [asks("h", "Three apples", template="buy", slots={"n": 4, "what": "apples"})])
    with pytest.raises(SpectrainError, match=r"'h' and 't' \(same template and slots\)"):
        check_leaks(train, [asks("h", "Three apples", template="buy", slots={"what": "apples", "n": 3})])


def test_near_duplicates_are_listed_one_for_each_heldout_row() -> None:
    base = "one two three four five six seven eight nine ten eleven twelve"
    train = [*varied(50), asks("near", base + " thirteen"), asks("nearer", base + " fourteen")]
    report = check_leaks(train, [asks("h", base), *varied(20, seed=1)])
    (found,) = report.near_duplicates
    assert (found.heldout, found.train) == ("h", "near")  # of equals the first
    assert found.similarity == pytest.approx(10 / 11)
    assert str(report).startswith("1 of 21 held-out conversations have a near-duplicate among 52 in training")
    assert check_leaks(train, [asks("h", base)], threshold=0.95).near_duplicates == ()


def test_the_index_finds_what_comparing_all_pairs_finds() -> None:
    rng = random.Random(3)
    words = [f"w{i}" for i in range(12)]

    def mutate(text: list[str]) -> str:
        return " ".join(rng.choice(words) if rng.random() < 0.05 else word for word in text)

    bases = [rng.choices(words, k=rng.randint(5, 30)) for _ in range(15)]
    train = [asks(f"t{i}", mutate(rng.choice(bases)) + " t") for i in range(80)]
    heldout = [asks(f"h{i}", mutate(rng.choice(bases)) + " h") for i in range(80)]

    def shingles(conversation: Conversation) -> set[tuple[str, ...]]:
        split = normalised(conversation).split()
        return set(zip(split, split[1:], split[2:], strict=False))

    def similarity(one: Conversation, other: Conversation) -> float:
        return len(shingles(one) & shingles(other)) / len(shingles(one) | shingles(other))

    best = {held.id: max(similarity(held, trained) for trained in train) for held in heldout}
    found = {pair.heldout: pair.similarity for pair in check_leaks(train, heldout, 0.6).near_duplicates}
    assert found == pytest.approx({name: value for name, value in best.items() if value >= 0.6})
    assert 0 < len(found) < len(heldout)  # the comparison is not an empty one


def test_text_without_spaces_is_compared_by_character() -> None:
    report = check_leaks([asks("t", "今日はとても天気がいいです")], [asks("h", "今日はとても天気がいいね")])
    assert [pair.train for pair in report.near_duplicates] == ["t"]


def test_a_split_is_deterministic_stratified_and_free_of_leaks() -> None:
    chats = varied(60, kind="chat") + varied(30, seed=1, kind="sql") + varied(10, seed=2, kind="code")
    split = split_conversations(chats, heldout_fraction=0.2, seed=4)
    assert Counter(one.kind for one in split.heldout) == {"chat": 12, "sql": 6, "code": 2}
    assert len(split.train) == 80
    assert [one.id for one in split.train] == [one.id for one in chats if one not in split.heldout]
    check_leaks(split.train, split.heldout)
    shuffled = random.Random(0).sample(chats, len(chats))
    again = split_conversations(shuffled, heldout_fraction=0.2, seed=4)
    assert {one.id for one in again.heldout} == {one.id for one in split.heldout}
    other = split_conversations(chats, heldout_fraction=0.2, seed=5)
    assert {one.id for one in other.heldout} != {one.id for one in split.heldout}


def test_a_count_is_met_by_largest_remainder() -> None:
    chats = varied(10, kind="a") + varied(10, seed=1, kind="b") + varied(10, seed=2, kind="c")
    split = split_conversations(chats, heldout_count=7)
    assert len(split.heldout) == 7
    assert sorted(Counter(one.kind for one in split.heldout).values()) == [2, 2, 3]


def test_duplicates_stay_on_one_side_also_through_others() -> None:
    """t0 has the words of t1, t1 the slots of t2: the three go together, whichever side they are on."""
    linked = [
        asks("t0", "Same words"),
        asks("t1", "same words!", template="t", slots={"n": 1}),
        asks("t2", "other words", template="t", slots={"n": 1}),
    ]
    for seed in range(30):
        split = split_conversations([*varied(9), *linked], heldout_count=6, seed=seed)
        held = {one.id for one in split.heldout}
        assert held.isdisjoint({"t0", "t1", "t2"}) or held >= {"t0", "t1", "t2"}
        check_leaks(split.train, split.heldout)


def test_splits_that_cannot_be_made() -> None:
    with pytest.raises(SpectrainError, match="either heldout_fraction or heldout_count"):
        split_conversations(varied(4))
    with pytest.raises(SpectrainError, match=r"heldout_fraction is 1\.5"):
        split_conversations(varied(4), heldout_fraction=1.5)
    with pytest.raises(SpectrainError, match="cannot hold out 4 of 4"):
        split_conversations(varied(4), heldout_count=4)
    with pytest.raises(SpectrainError, match=r"4 to train on and 0 held out.* duplicates stay together"):
        split_conversations([asks(str(i), "the same") for i in range(4)], heldout_count=2)


def test_the_digest_sees_content_and_not_order() -> None:
    chats = varied(5)
    digest = conversations_digest(chats)
    assert digest == conversations_digest(chats[::-1])
    assert digest != conversations_digest(chats[1:])
    changed = asks(chats[0].id, chats[0].messages[0].content + ".")
    assert digest != conversations_digest([changed, *chats[1:]])


def test_leaks_name_the_rows_by_their_place() -> None:
    train, held = [asks("t", "Hello!", place="a.jsonl:3")], [asks("h", "hello", place="b.jsonl:5")]
    with pytest.raises(SpectrainError, match=r"'h' at b\.jsonl:5 and 't' at a\.jsonl:3 \(same user turns\)"):
        check_leaks(train, held)
    assert find_leaks(train, held).leaks == ("'h' at b.jsonl:5 and 't' at a.jsonl:3 (same user turns)",)


def test_near_duplicates_are_errors_where_that_is_asked_for() -> None:
    base = "one two three four five six seven eight nine ten eleven twelve"
    train, held = [asks("t", base + " more", place="a.jsonl:3")], [asks("h", base, place="b.jsonl:5")]
    assert len(check_leaks(train, held).near_duplicates) == 1
    with pytest.raises(SpectrainError, match=r"'h' at b\.jsonl:5 and 't' at a\.jsonl:3 \(0\.91\)"):
        check_leaks(train, held, refuse_near=True)
    check_leaks(train, held, threshold=0.95, refuse_near=True)


def test_of_what_says_the_same_the_first_is_kept() -> None:
    one, copy, other = asks("a", "x"), asks("b", "x", place="f:2"), asks("c", "x", "y")
    differently = Conversation("d", (Message("user", "x"), Message("assistant", "no")))
    with_tools = Conversation("e", one.messages, tools=({"name": "f"},))
    chats, dropped = [one, copy, other, differently, with_tools], Dropped()
    assert [c.id for c in without_duplicates(chats, dropped, answers=True)] == ["a", "c", "d", "e"]
    assert (dropped["duplicate"], dropped.places["duplicate"]) == (1, ["f:2"])
    assert [c.id for c in without_duplicates(chats, Dropped(), answers=False)] == ["a", "c", "e"]


def test_the_digest_of_plain_chats_stays_as_it_was_and_sees_tools_and_calls() -> None:
    one = asks("a", "x")
    assert conversations_digest([one]) == "5dad523625d8ea5824ce72d070bc490bafa63515703ce15f3474dc38649df6e4"
    called = Message("assistant", "ok", {"tool_calls": [{"function": {"name": "f"}}]})
    others = [Conversation("a", one.messages, "all", tools=({"name": "f"},)),
              Conversation("a", (one.messages[0], called), "all")]  # fmt: skip
    assert len({conversations_digest([chat]) for chat in [one, *others]}) == 3
    placed = asks("a", "x", place="a.jsonl:1")
    assert conversations_digest([placed]) == conversations_digest([one])

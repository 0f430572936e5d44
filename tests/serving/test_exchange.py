"""The comparison with the speculators library, without it: what it counts, and that it sees another drafter."""

from __future__ import annotations

import torch
from exchange import DEPTHS, Exchange, Text, accepted, compared, drafted, judge, render_exchanges

from spectrain.bundle import load_drafter


def test_accepted_prefixes_are_counted_from_the_text_itself():
    text = [0, 1, 2, 3, 4, 5, 6, 7]
    tokens = torch.tensor([[3, 4, 9], [4, 9, 6], [5, 6, 7]])  # after positions 1, 2 and 3
    assert accepted(tokens, text, slice(1, 4)).tolist() == [3, 1, 0]


def test_the_same_drafter_on_both_sides_is_no_fault_and_another_is(bundles, chat_target):
    ids = torch.randint(3, 40, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    drafter, _, _ = load_drafter(bundles / "eagle3", chat_target)
    logits, tokens = drafted(drafter, chat_target, ids)
    assert (logits.shape, tokens.shape) == ((DEPTHS, 15, 32), (DEPTHS, 15))
    ids[2 + 6] = int(tokens[0, 6])  # so that something is accepted; nothing before it changes
    logits, tokens = drafted(drafter, chat_target, ids)
    theirs = {"0 logits": logits.clone(), "0 tokens": tokens.clone()}
    same = compared("same", theirs, bundles / "eagle3", chat_target, [Text(ids, 4)])
    assert (same.faults, same.equal, same.compared) == ([], 16 - 1 - DEPTHS - 3, 16 - 1 - DEPTHS - 3)
    assert same.means[0] == same.means[1] > 0
    theirs["0 logits"][1, 5, 3] += 0.01
    theirs["0 tokens"][0, 6] += 1
    other = compared("other", theirs, bundles / "eagle3", chat_target, [Text(ids, 4)])
    assert [fault.split(": ")[1].split(",")[0] for fault in other.faults] == [
        "logits 0.01 apart", "1 of 9 prefixes differ", "nothing was accepted",
    ]  # fmt: skip
    text = render_exchanges([same, other])
    assert "|            9/9 |" in text
    assert text.endswith("3 UNEXPLAINED")
    assert render_exchanges([same]).endswith("both ways the same drafter")
    assert render_exchanges([]).startswith("SKIPPED")


def test_logits_that_are_no_numbers_are_apart(bundles, chat_target):
    drafter, _, _ = load_drafter(bundles / "eagle3", chat_target)
    logits, tokens = drafted(drafter, chat_target, list(range(3, 15)))
    theirs = {"0 logits": logits * torch.nan, "0 tokens": tokens}
    found = compared("nan", theirs, bundles / "eagle3", chat_target, [Text(list(range(3, 15)), 4)])
    assert "logits inf apart" in found.faults[0]
    judge(empty := Exchange("none", apart=torch.nan), torch.ones(2, 3))
    assert len(empty.faults) == 1

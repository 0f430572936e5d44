"""What penalties remember: every node has its own path behind it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from paths import paths_of

from spectrain.decoding.history import History
from spectrain.exact.penalties import Penalties
from spectrain.shapes import Chain, Layout


@given(st.data())
def test_every_node_counts_its_own_path(data):
    nodes, size = data.draw(st.integers(0, 7)), 5
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(nodes)]
    tokens = data.draw(st.lists(st.integers(0, size - 1), min_size=nodes, max_size=nodes))
    answer = data.draw(st.lists(st.integers(0, size - 1), max_size=6))
    history = History([[0], [1]], size, torch.device("cpu"))
    history.add([[], answer])
    tokens_BN = torch.tensor([[0] * nodes, tokens], dtype=torch.long)
    layout = Layout.tree(torch.tensor([parents, parents], dtype=torch.long).view(2, nodes), nodes)
    got = history.behind(tokens_BN, layout.sees_BMX)[1]
    for row, path in enumerate([[], *paths_of(parents)]):
        behind = answer + [tokens[node] for node in path]
        assert got[row].tolist() == [behind.count(token) for token in range(size)]


def test_rows_leave_with_their_requests():
    history = History([[0], [1], [2]], 4, torch.device("cpu"))
    history.add([[3], [3, 3], []])
    history.select([1, 2])
    history.add([[0], [0]])
    assert history.prompt_BV.int().tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
    assert history.answer_BV.tolist() == [[1, 0, 0, 2], [1, 0, 0, 0]]


PENALTIES = Penalties(repetition=1.3, presence=0.5, frequency=0.9)


def test_greedy_decoding_with_penalties_is_plain_decoding_with_them(tiny_target, tools):
    """Against the model itself and the definitions, for chains and trees, alone and among others."""
    target, want = tiny_target("gpt2", layers=3), []
    for prompt in tools.PROMPTS:
        ids: list[int] = []
        for _ in range(12):
            logits = target.model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, -1]
            for token in {*prompt, *ids}:
                times = ids.count(token)
                logits[token] *= 1 / 1.3 if logits[token] > 0 else 1.3
                logits[token] -= 0.9 * times + 0.5 * (times > 0)
            ids.append(int(logits.argmax()))
        want.append(ids)
    assert want != [tools.plain(target, prompt, 12).tokens for prompt in tools.PROMPTS]
    assert [tools.plain(target, prompt, 12, penalties=PENALTIES).tokens for prompt in tools.PROMPTS] == want
    for kind, shape, rule in [("none", None, "token"), ("ngram", Chain(4), "block"), ("eagle3", Chain(3), "token"),
                              *(("noisy", shape, "token") for shape in tools.SHAPES.values())]:  # fmt: skip
        drafter = None if kind == "none" else tools.drafter(kind, target)
        got = tools.batch(target, drafter, shape, count=12, penalties=PENALTIES, verification=rule)
        assert [result.tokens for result in got] == want, (kind, shape)
        eos = want[0][3]  # one that leaves early takes its counts along
        ended = tools.batch(target, drafter, shape, count=12, penalties=PENALTIES, verification=rule, eos=[eos])
        ends = [ids.index(eos) + 1 if eos in ids else 12 for ids in want]
        assert [result.tokens for result in ended] == [ids[:end] for ids, end in zip(want, ends, strict=True)]

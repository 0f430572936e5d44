"""What penalties remember: every node has its own path behind it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spectrain.decoding.history import History
from spectrain.shapes import Layout, paths_of


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

"""The table of a drafter's ranks and the tree that they make."""

from spectrain.evaluation.rank_tables import render_ranks
from spectrain.exact.sampler import Sampler

RANKS = {"positions": [9, 9], "by_sampler": {"greedy (T=0)": [[0.6, 0.2], [0.5, 0.0]]}}


def test_a_tree_of_fewer_nodes_than_asked_for_says_so():
    """Four paths are ever right: (0), (1), and the likeliest token after either."""
    assert "fewer than" not in render_ranks(RANKS, [Sampler()], 4)
    text = render_ranks(RANKS, [Sampler()], 1000)
    assert "best tree of 4 nodes, depth 2" in text
    assert text.splitlines()[-1] == (
        "it has fewer than the 1000 nodes asked for: of 2 depths and 2 ranks that were measured, no other path was "
        "ever the target's"
    )

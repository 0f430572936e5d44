"""The cost model beside the clock: speedup = τ / (k·c + v + o), costs in plain decoding steps (exact/cost).

c is drafting a token, v verifying a round, o what a round costs besides. They come from the parts' clocks and
the speedup from the whole's, so their difference is the time that no part accounts for. The same costs with
the survival curve predict smaller k; where such a k was measured too, the prediction stands beside it. Survival of the
first tokens does not depend on how many follow, token-wise and block-wise (2403.10444) alike.

A tree has no k: what drafting one costs is measured as a whole, and nothing is predicted for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectrain.evaluation.answers import Clusters
from spectrain.exact.cost import alpha_for_tokens, expected_tokens_from_survival


def cost_block(block: dict[str, Any], own: Clusters, *, plain_step_s: float) -> dict[str, Any]:
    """Costs, break-even and predictions of one contender.

    Args:
        block: its numbers, with ``seconds``, ``tokens_per_round``, ``speedup`` and ``marginal_survival``.
        own: its answers.
        plain_step_s: seconds of plain decoding per token, prefill excluded, on the same conversations.
    """
    rounds, offered_K = own.total("rounds"), own.sums("offered").sum(0)
    proposed = float(offered_K.sum())
    per_round = {part: block["seconds"][part] / rounds / plain_step_s for part in ("draft", "verify", "overhead")}
    round_cost = sum(per_round.values())
    predicted = block["tokens_per_round"]["value"] / round_cost
    measured = block["speedup"]["decode"]["value"]
    chain = not own.first.tree
    by_k = _by_k(block, offered_K.tolist(), per_round) if chain else []
    best = max(by_k, key=lambda row: row["speedup"], default=None)
    return {
        "plain_step_ms": plain_step_s * 1e3,
        "proposed_per_round": proposed / rounds,
        "nodes_per_round": own.total("nodes") / rounds,
        "draft_cost_per_token": per_round["draft"] * rounds / proposed if chain and proposed else None,
        "draft_cost_per_round": per_round["draft"],
        "verify_cost_per_round": per_round["verify"],
        "overhead_cost_per_round": per_round["overhead"],
        "break_even_tokens_per_round": round_cost,
        "predicted_speedup": predicted,
        "measured_speedup": measured,
        "relative_difference": predicted / measured - 1,
        "by_k": by_k,
        "best_k": (best["k"] if best and best["speedup"] > 1 else 0) if chain else None,
        "from_sibling": None,
    }


def _by_k(block: dict[str, Any], offered: Sequence[float], per_round: dict[str, float]) -> list[dict[str, Any]]:
    """Predictions for every k up to the one measured. A plain step is a round without a draft token, which costs 1; a
    round is taken to grow with the tokens proposed, in a straight line to what it costs at the k measured.

    ``offered``: rounds that proposed at least i tokens.
    """
    survival = [row["rate"] for row in block["marginal_survival"] if row["rate"] is not None]
    drafted = max(sum(offered), 1)
    rows = []
    for k in range(1, len(survival) + 1):
        tokens = float(expected_tokens_from_survival(survival[:k]))
        share = sum(offered[:k]) / drafted
        cost = 1 + share * (per_round["draft"] + per_round["verify"] + per_round["overhead"] - 1)
        rows.append({"k": k, "tokens_per_round": tokens, "speedup": tokens / cost})
    return rows


def break_even(cost: Mapping[str, Any], k: int, tokens_per_round: float) -> dict[str, float | None]:
    """Where the rounds of a chain would break even, and how far they are from it.

    A drafter that proposes k tokens in a share s of the rounds, each accepted with probability α, commits
    1 + s·(α + … + α^k) tokens a round.

    Returns:
        ``alpha`` at which they cost what they yield (None when not even 1 does), ``alpha_now``, which would yield
        ``tokens_per_round``, and ``draft_cost``, in plain steps a token, up to which they pay (None when none does).
    """
    proposed = cost["proposed_per_round"]
    if not proposed:
        return {"alpha": None, "alpha_now": None, "draft_cost": None}
    share = min(proposed / k, 1.0)
    needed, rest = cost["break_even_tokens_per_round"], cost["verify_cost_per_round"] + cost["overhead_cost_per_round"]
    spare = tokens_per_round - rest
    return {
        "alpha": alpha_for_tokens(1 + max(needed - 1, 0.0) / share, k),
        "alpha_now": alpha_for_tokens(1 + max(tokens_per_round - 1, 0.0) / share, k),
        "draft_cost": spare / proposed if spare >= 0 else None,
    }


def add_predictions_from_siblings(contenders: Sequence[dict[str, Any]]) -> None:
    """Fill ``cost.from_sibling``: what a drafter's largest measured k predicts for each smaller one under its rule."""
    chains = [c for c in contenders if c["k"]]  # neither plain decoding nor trees
    for contender in chains:
        siblings = [
            c
            for c in chains
            if (c["drafter"], c["verification"]) == (contender["drafter"], contender["verification"])
            and c["k"] > contender["k"]
        ]
        if not siblings:
            continue
        largest = max(siblings, key=lambda c: c["k"])
        _predict(contender["pooled"], contender["k"], largest["contender"], largest["pooled"])
        for kind, block in contender["by_kind"].items():
            if block is not None:
                _predict(block, contender["k"], largest["contender"], largest["by_kind"][kind])


def _predict(block: dict[str, Any], k: int, name: str, sibling: dict[str, Any]) -> None:
    row = next((row for row in sibling["cost"]["by_k"] if row["k"] == k), None)
    if row is not None:
        block["cost"]["from_sibling"] = {
            "contender": name,
            "tokens_per_round": row["tokens_per_round"],
            "speedup": row["speedup"],
            "relative_difference": row["speedup"] / block["speedup"]["decode"]["value"] - 1,
        }

"""Numbers by band: which turn of the conversation was answered, how long its prompt was, and where in the answer a round
starts. The bands of each family add up to the whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from spectrain.evaluation.answers import POSITION_EDGES, Answers, Clusters
from spectrain.evaluation.blocks import decode_speedup
from spectrain.evaluation.figures import Figure, measured

LAST_TURN = 4  # later ones are told together
PROMPT_EDGES = (64, 256, 1024, 4096)  # the longest prompt of a band


def by_band(own: Answers, plain: Answers) -> dict[str, list[dict[str, Any]]]:
    """Bands that hold at least one round, in order. Samples that do not say which turn they answer have no such band."""
    turns = np.array([min(turn or 0, LAST_TURN) for turn in own.turns])
    prompts = np.searchsorted(PROMPT_EDGES, own.prompt_tokens)
    names = [*(str(turn) for turn in range(1, LAST_TURN)), f"{LAST_TURN} and later"]
    return {
        "turn": [] if None in own.turns else _split(own, plain, turns - 1, names),
        "prompt tokens": _split(own, plain, prompts, _labels(PROMPT_EDGES, 1)),
        "answer position": _positions(own.clusters()),
    }


def _labels(edges: tuple[int, ...], first: int) -> list[str]:
    starts = [first, *(edge + 1 for edge in edges)]
    return [f"{start:,} to {edge:,}" for start, edge in zip(starts, edges, strict=False)] + [f"over {edges[-1]:,}"]


def _split(own: Answers, plain: Answers, band_N: Any, labels: list[str]) -> list[dict[str, Any]]:
    """Answers by band; plain decoding's, which may lie in another order, go with the same conversation and turn."""
    place = dict(zip(zip(own.conversations, own.turns, strict=True), band_N.tolist(), strict=True))
    plain_N = np.array([place[key] for key in zip(plain.conversations, plain.turns, strict=True)])
    rows = []
    for number in sorted(set(band_N.tolist())):
        here, there = own.clusters(band_N == number), plain.clusters(plain_N == number)
        if here.total("rounds"):
            paired = {"decode": decode_speedup(here, there)} if own.first.shape is not None else {}
            found = measured({"tokens": Figure(here.sums("committed"), here.sums("rounds")), **paired})
            rows.append(_band(labels[number], len(here), here.total("rounds"), found))
    return rows


def _positions(own: Clusters) -> list[dict[str, Any]]:
    rounds_CX, tokens_CX = own.sums("band_rounds"), own.sums("band_tokens")
    rows = []
    for label, rounds_C, tokens_C in zip(_labels(POSITION_EDGES, 2), rounds_CX.T, tokens_CX.T, strict=True):
        if rounds_C.sum():
            found = measured({"tokens": Figure(tokens_C, rounds_C)})
            rows.append(_band(label, int((rounds_C > 0).sum()), rounds_C.sum(), found))
    return rows


def _band(label: str, conversations: int, rounds: float, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "label": label,
        "conversations": conversations,
        "rounds": int(rounds),
        "tokens_per_round": found["tokens"],
        "decode_speedup": found.get("decode"),
    }

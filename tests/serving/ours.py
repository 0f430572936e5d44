"""What spectrain itself says of a drafter on the prompts that the server is given: tokens, rounds, intervals.

Counted as the server counts: every round drafts k tokens, also the one in which the answer ends, and what was drafted
beyond the end counts too. So the answer is decoded past its end here, and cut afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from spectrain.decoding import generate_batch
from spectrain.drafters.base import Drafter
from spectrain.drafters.ngram import NgramConfig, NgramDrafter, NgramState
from spectrain.evaluation.workbench import Prompt
from spectrain.exact.sampler import Sampler
from spectrain.intervals import ratio_interval
from spectrain.shapes import Chain
from spectrain.target import Target

Rounds = list[list[int]]  # [proposed, accepted] each


class EarliestNgram(NgramDrafter):
    """Prompt lookup by vLLM's rule: what followed the *earliest* match of the longest suffix, as far as it is written.

    It has no weights, so where its counts agree, both sides count alike.
    """

    def __init__(self, longest: int) -> None:
        super().__init__(NgramConfig(longest=longest))

    def _read(self, state: NgramState, tokens: Sequence[int]) -> None:
        for token in tokens:
            here = len(state.ids)
            for n in range(self.config.shortest, min(self.config.longest, here) + 1):
                state.follower.setdefault(tuple(state.ids[here - n :]), here)
            state.ids.append(token)

    def _continuations(self, state: NgramState, length: int) -> Iterator[list[int]]:
        source = next(self._lookup(state), None)
        if source is not None:
            yield state.ids[source : source + length]


def plain(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
    """Greedy answers without a drafter."""
    runs = generate_batch(target, None, [prompt.ids for prompt in prompts], seeds=[0] * len(prompts),
                          sampler=Sampler(), max_new_tokens=max_new_tokens, timed=False)  # fmt: skip
    return [run.tokens for run in runs]


def measured(
    target: Target, drafter: Drafter, prompts: Sequence[Prompt], max_new_tokens: int, k: int
) -> dict[str, Any]:
    """Each conversation's rounds, and acceptance by position with its interval over conversations."""
    # k more than an answer's last round can begin with, so that it drafts in full too.
    runs = generate_batch(target, drafter, [prompt.ids for prompt in prompts], seeds=[0] * len(prompts),
                          sampler=Sampler(), shape=Chain(k), max_new_tokens=max_new_tokens + k, eos_ids=(),
                          timed=False)  # fmt: skip
    rounds = [
        served_rounds(run.tokens, [(r.proposed, r.accepted, r.committed) for r in run.rounds], target.eos_ids,
                      max_new_tokens)
        for run in runs
    ]  # fmt: skip
    return {
        "k": k,
        "conversations": [
            {"id": prompt.id, "rounds": own, **_counts(own, k)} for prompt, own in zip(prompts, rounds, strict=True)
        ],
        "acceptance": acceptance(rounds, k),
    }


def acceptance(rounds: Sequence[Rounds], k: int) -> list[dict[str, float]]:
    """For each position the share of drafts accepted up to it, with its interval over conversations."""
    counts = [_counts(own, k) for own in rounds]
    drafts = [one["drafts"] for one in counts]
    return [asdict(ratio_interval([one["accepted"][i] for one in counts], drafts)) for i in range(k)]


def served_rounds(tokens: Sequence[int], committed: Sequence[tuple[int, int, int]], eos_ids: Collection[int],
                  max_new_tokens: int) -> Rounds:  # fmt: skip
    """The rounds that a server runs, of those that went on past its end: up to the one in which the answer ends.

    ``tokens`` go past the end too; ``committed`` has a round's proposed, accepted and committed tokens.
    """
    ends = (i + 1 for i, token in enumerate(tokens[:max_new_tokens]) if token in eos_ids)
    length, count, found = next(ends, max_new_tokens), 1, []  # the first token is the prefill's
    for proposed, accepted, new in committed:
        if count >= length:
            break
        if proposed:  # a server counts no draft where it has none
            found.append([proposed, accepted])
        count += new
    return found


def _counts(rounds: Rounds, k: int) -> dict[str, Any]:
    return {"drafts": len(rounds), "accepted": [sum(a > i for _, a in rounds) for i in range(k)]}

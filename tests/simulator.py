"""A seeded simulator of the measurement: i.i.d. acceptance with known α, known costs, noisy clocks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

STEP_S = 0.060
DRAFTERS = {
    # contender: (drafter, k, plain steps to draft a token, to verify a round, and for a round besides)
    "plain": ("plain", 0, 0.0, 1.0, 0.02),
    "ngram k=5": ("ngram", 5, 0.002, 1.6, 0.03),
    "eagle3 k=3": ("eagle3", 3, 0.10, 1.45, 0.05),
    "eagle3 k=5": ("eagle3", 5, 0.10, 1.55, 0.05),
}
TREE = "eagle3 dynamic tree of 16"
LOSSY = "eagle3 k=5 LOSSY typical"
# Asked for by name: they cost as much as the chain of the same depth, and accept a little more.
MORE = {TREE: ("eagle3", 5, 0.12, 1.9, 0.05), LOSSY: ("eagle3", 5, 0.10, 1.55, 0.05)}
DYNAMIC = {"type": "dynamic tree", "depth": 5, "nodes": 16, "top_k": 4}


def forced_row(**changes: Any) -> dict[str, Any]:
    """A teacher-forced row of a context."""
    alpha = changes.get("alpha", 0.5)
    return {
        "temperature": 1.0,
        "kind": "everything",
        "depth": 0,
        "alpha": alpha,
        "interval": {"value": alpha, "low": alpha - 0.05, "high": alpha + 0.05},
        "positions": 900,
        "conversations": 20,
        **changes,
    }


class Simulator:
    """``simulator.samples(...)`` → raw samples; ``simulator.context`` → what surrounds them."""

    tree, lossy = TREE, LOSSY
    forced_row = staticmethod(forced_row)
    context: dict[str, Any] = {  # noqa: RUF012
        "target": {"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "revision": "main"},
        "drafter": {"name": "eagle3-smollm2", "parameters": 9_400_000},
        "traffic": {"name": "support-desk", "digest": "sha256:5e1f", "conversations": 60, "chose_the_step": False},
        "device": {"name": "2-core CPU", "threads": 2, "dtype": "float32"},
        "versions": {"spectrain": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
        "seed": 0,
        "max_new_tokens": 96,
        "warmup": 2,
    }

    def samples(
        self,
        alphas: dict[str, dict[str, float]],
        *,
        conversations: int = 20,
        new_tokens: int = 96,
        temperature: float = 0.0,
        spread: float = 0.0,
        seed: int = 0,
        more: tuple[str, ...] = (),
    ) -> list[dict[str, Any]]:
        """``alphas``: kind → drafter → acceptance probability of every position; ``conversations`` a kind; ``more``:
        contenders besides the usual ones."""
        entries = DRAFTERS | {name: MORE[name] for name in more}
        rng = random.Random(seed)
        found = []
        for kind, by_drafter in alphas.items():
            for index in range(conversations):
                shift = rng.gauss(0, spread)
                length = rng.randint(new_tokens // 2, new_tokens + 20)
                for contender, (drafter, *_) in entries.items():
                    alpha = 0.0 if drafter == "plain" else by_drafter.get(drafter)
                    if alpha is not None:
                        alpha = min(max(alpha + shift, 0.0), 0.98) if drafter != "plain" else 0.0
                        sample = _generate(rng, contender, alpha, length, new_tokens)
                        found.append(sample | _labels(f"{kind}-{index}", kind, temperature))
        return found


def _labels(conversation: str, kind: str, temperature: float) -> dict[str, Any]:
    greedy = temperature == 0
    return {
        "conversation": conversation,
        "kind": kind,
        "temperature": temperature,
        "sampler": {"temperature": temperature, "top_k": None, "top_p": None},
        "seed": 0,
        "seed_index": 0,
        "turn": 1,
        "prompt_tokens": 40,
        "equal_to_plain": True if greedy else None,
        "first_difference": None,
    }


def drafting(contender: str, k: int) -> dict[str, Any]:
    """What a sample says of its contender's drafts."""
    lossy = "LOSSY" in contender
    if contender == TREE:
        return {"k": None, "shape": DYNAMIC, "verification": "token", "lossy": False}
    shape = {"type": "chain", "depth": k, "nodes": k} if k else None
    rule = "typical_lossy" if lossy else "block" if "block" in contender else "token" if k else None
    return {"k": k, "shape": shape, "verification": rule, "lossy": lossy}


def _generate(rng: random.Random, contender: str, alpha: float, length: int, budget: int) -> dict[str, Any]:
    """An answer of ``length`` tokens with EOS, or of ``budget`` tokens without."""
    drafter, k, draft, verify, overhead = (DRAFTERS | MORE)[contender]
    end, reason = min((length, "eos"), (budget, "budget"))
    rounds: list[list[Any]] = []
    seconds = {"draft_s": 0.0, "verify_s": 0.0, "overhead_s": 0.0}
    tokens = 1
    while tokens < end:
        proposed = k if drafter != "ngram" or rng.random() < 0.6 else 0
        accepted = next((i for i in range(proposed) if rng.random() >= alpha), proposed)
        committed = min(accepted + 1, end - tokens)
        nodes = 3 * proposed if contender == TREE else proposed
        rounds.append([proposed, accepted, committed, reason if committed <= accepted else None, nodes])
        tokens += committed
        seconds["draft_s"] += STEP_S * draft * proposed * rng.uniform(0.95, 1.05)
        seconds["verify_s"] += STEP_S * (verify if proposed else 1.0) * rng.uniform(0.95, 1.05)
        seconds["overhead_s"] += STEP_S * overhead * rng.uniform(0.9, 1.1)
    prefill_s = STEP_S * rng.uniform(2, 4)
    return {
        "contender": contender,
        "drafter": drafter,
        **drafting(contender, k),
        "new_tokens": tokens,
        "finished": reason,
        "rounds": rounds,
        "prefill_s": prefill_s,
        **seconds,
        "total_s": (prefill_s + sum(seconds.values())) * 1.002,
    }


def clocked(samples: Iterable[Mapping[str, Any]], factor: float, *, contender: str = "") -> list[dict[str, Any]]:
    """The samples as a device or (``contender``) one way of decoding would have made them in ``factor`` the time."""
    return [
        {key: value * factor if key.endswith("_s") and contender in ("", s["contender"]) else value
         for key, value in s.items()}
        for s in samples
    ]  # fmt: skip

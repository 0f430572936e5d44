"""What the report says in words: the verdict as a sentence, every number's meaning, how numbers look.

A missing number is a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DASH = "–"
PLAIN = "plain"
CHANGED = "the bundle's own, changed target"

DEFINITIONS = (
    (
        "tokens per round (τ)",
        "Committed tokens of a round, with the target's own repair or bonus token, clipped at the end of "
        "the answer and at the token budget.",
    ),
    (
        "accepted prefix length",
        "Accepted draft tokens of a full round, without repair or bonus. Full rounds are those that "
        "neither end of answer nor budget has clipped; there, the mean plus 1 equals tokens per round.",
    ),
    (
        "marginal survival",
        "P(first i draft tokens accepted): over all full rounds, whether or not they proposed i. Of a tree, P(a path "
        "of i tokens accepted).",
    ),
    (
        "conditional acceptance",
        "P(i-th accepted | first i−1 accepted): over full rounds that accepted those and proposed an i-th token. Of a "
        "tree, over those that were i deep anywhere: a path that ends early counts as a miss.",
    ),
    (
        "decode speedup",
        "Plain decoding's seconds per committed token divided by the contender's, prefill left out, on "
        "the same conversations.",
    ),
    (
        "speedup with prefill",
        "The same with everything from the prompt to the last token, divided by all new tokens.",
    ),
    (
        "tokens/s",
        "All new tokens divided by all seconds, prefill included. A rate of sums, not a mean of rates.",
    ),
    (
        "accepted draft tokens/s",
        "Draft tokens that reached the answer, divided by all seconds.",
    ),
    (
        "ms per token",
        "Median and 95th percentile over answers of an answer's decode time divided by its tokens.",
    ),
    (
        "c, v, o",
        "Draft seconds per proposed token, verification seconds per round and other seconds per round, "
        "all divided by the seconds of one plain decoding step. A tree has no c: its draft is measured as a whole.",
    ),
    (
        "break-even τ",
        "Tokens per round at which a round costs what plain decoding of as many tokens costs: k·c + v + o, or with the "
        "whole draft in the place of k·c.",
    ),
    (
        "predicted speedup",
        "τ ÷ (k·c + v + o), with the mean number of proposed tokens as k. Its difference from the "
        "measured one is time that no part accounts for. For smaller k: 1 + Σ survival up to k, at the "
        "same c, v and o; for chains alone.",
    ),
    (
        "tree",
        "A draft with several candidates for a position. It is as many tokens deep as its longest path, and has as "
        "many nodes as candidates in all.",
    ),
    (
        "block",
        "Block verification (arXiv 2403.10444): a chain is judged as a whole. It keeps the target's law and accepts "
        "as many tokens as judging one by one, or more.",
    ),
    (
        "LOSSY",
        "A rule that changes the law of the output, shown for comparison. Typical acceptance (arXiv 2401.10774) keeps "
        "what the target finds plausible. Never part of a verdict.",
    ),
    (
        "verdict",
        "On when the decode speedup of the fastest contender has an interval above 1 over at least 6 "
        "conversations, its rule keeps the target's law and its greedy output (near ties apart) is plain decoding's; "
        "otherwise off. The "
        "fastest of several is chosen after the fact, which flatters it slightly.",
    ),
    (
        "leaderboard",
        "Contenders by tokens per device-second: all new tokens divided by all seconds, prefill included. Each is set "
        "against the one above it on the same conversations; where the interval of their ratio holds 1, or there are "
        "fewer than 6 conversations, the two share a rank (1=). Neighbours are compared, so the first and the last of "
        "a long tie may differ. LOSSY contenders, and those that change the greedy output, have no rank.",
    ),
    (
        "memory",
        "The drafter's own weights, without what it borrows from the target, and the most that its state on the device "
        "(a cache, say) held after a round of any answer, in MiB.",
    ),
    (
        "training",
        "Wall time of the run that trained the drafter, validation included, on the machine that it ran on, and the "
        "answer tokens it was trained on, every epoch anew. A dash where no record of that run lies beside the bundle.",
    ),
    (
        "a target of its own",
        "A drafter may be trained together with its target, which then has another law than the original. It decodes "
        "with that target, is compared with plain decoding of it, named plain (drafter), and has no part in the "
        "ranking, nor in the verdict on the original. In a report on its bundle alone, plain is that target's.",
    ),
    (
        "drift",
        "How far such a target has moved: both read the answers that the original gives by greedy plain decoding, and "
        "their laws at T = 1 are compared at every token. KL(original ‖ moved) in nats a token; total variation, the "
        "share of tokens that the best coupling would draw differently; and the share of positions whose likeliest "
        "token is the same.",
    ),
    (
        "α",
        "Acceptance probability Σ min(p, q) over the full vocabulary after the sampler's transforms; "
        "teacher-forced means on given answers, without decoding.",
    ),
    (
        "timing",
        "The device is synchronised at both ends of every part; contenders take turns on the same "
        "conversations; warm-up is left out.",
    ),
)


def number(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def interval(value: Mapping[str, Any], digits: int = 2) -> str:
    if value["low"] is None:
        return number(value["value"], digits)
    low, high = number(value["low"], digits), number(value["high"], digits)
    return f"{number(value['value'], digits)} ({low}–{high})"


def percent(value: float | None, digits: int = 0) -> str:
    return DASH if value is None else f"{100 * value:.{digits}f}%"


def signed_percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:+.1f}%".replace("-", "−")


def milliseconds(value: float | None) -> str:
    return DASH if value is None else f"{value:,.{1 if value < 100 else 0}f}"


def cost(value: float | None) -> str:
    return number(value, 3)


def rank(row: Mapping[str, Any]) -> str:
    """A place of the leaderboard; "2=" where others share it, a dash without one."""
    return f"{row['rank']}{'=' if row['tied'] else ''}" if row["rank"] else DASH


def mebibytes(count: int | None) -> str:
    return DASH if count is None else number(count / (1 << 20), 1) if count else "0"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


FILTERS = {
    f.__name__: f for f in (number, interval, percent, signed_percent, milliseconds, cost, rank, mebibytes, plural)
}


def headline(verdict: Mapping[str, Any], *, changed: bool = False) -> str:
    """The verdict in a few words; ``changed`` as in ``law_sentence``."""
    if verdict["decision"] != "on":
        return "Leave it off"
    return f"Turn it on: {verdict['contender']}" + (f", with {CHANGED}" if changed else "")


def sentence(verdict: Mapping[str, Any], confidence: str, *, changed: bool = False) -> str:
    """The verdict as one sentence for a colleague, with the numbers it rests on; ``changed`` as in ``law_sentence``."""
    best = verdict["best"]
    if best is None:
        return f"Plain decoding it is: {verdict['reason']}."
    speedup, total = best["decode_speedup"], number(best["total_speedup"]["value"])
    tokens = number(best["tokens_per_round"]["value"])
    bounds, whose = "no interval", f" of {CHANGED}" if changed else ""
    if speedup["low"] is not None:
        bounds = f"{confidence} interval {number(speedup['low'])} to {number(speedup['high'])}"
    gain = (
        f"{best['contender']} decodes {number(speedup['value'])} times as fast as plain decoding{whose} ({bounds}; "
        f"{total} with prefill), committing {tokens} tokens per round"
    )
    if verdict["decision"] == "on":
        return f"{gain}."
    return f"At best, {gain}: {verdict['reason']}."


def kind_sentence(by_kind: Mapping[str, Mapping[str, Any]]) -> str:
    """Where it pays and where it does not, when there is more than one kind."""
    by_kind = {
        kind: verdict for kind, verdict in by_kind.items() if "/" not in kind
    }  # parents stand for what they hold
    if len(by_kind) < 2:
        return ""
    on = [
        f"{kind} ({verdict['best']['contender']}, {number(verdict['best']['decode_speedup']['value'])}×)"
        for kind, verdict in by_kind.items()
        if verdict["decision"] == "on"
    ]
    off = [kind for kind, verdict in by_kind.items() if verdict["decision"] != "on"]
    parts = [f"{word} for {', '.join(kinds)}" for word, kinds in (("on", on), ("off", off)) if kinds]
    return f"By kind: {'; '.join(parts)}."


def law_sentence(contenders: Sequence[Mapping[str, Any]], *, changed: bool = False) -> str:
    """Which contenders have the target's law, and which do not.

    ``changed``: what was measured is a target that its bundle changed in training, so that law is not the original's.
    """
    lawful, lossy = ([c for c in contenders if c["lossy"] is side] for side in (False, True))
    moved = [c["contender"] for c in lawful if changed or c.get("baseline", PLAIN) != PLAIN]
    exact = [c["contender"] for c in lawful if c["contender"] not in moved]
    parts = []
    if exact:
        parts.append(f"Exact in law, whatever is drafted: {', '.join(exact)}.")
    if moved:
        parts.append(
            f"Exact in the law of {CHANGED}, which is not the original's: {', '.join(moved)}. Plain decoding, which "
            "greedy outputs are compared with, is that target's."
        )
    if lossy:
        verb = "have" if len(lossy) > 1 else "has"
        named = ", ".join(c["contender"] for c in lossy)
        parts.append(f"Not exact: {named} {verb} another law than the target's, and no part in the verdict.")
    return " ".join(parts)


def drift_sentence(name: str, found: Mapping[str, Any]) -> str:
    """How far a drafter's target has moved from the original, over everything."""
    total, original = found["by_kind"]["everything"], found.get("original")  # documents may be older than the name
    origin = f", {original}, which it derives from" if original else ""
    return (
        f"The target that was trained with {name} is not the original{origin}: over "
        f"{plural(total['tokens'], 'token')} of the original's answers its law is {number(total['kl']['value'], 4)} "
        "nats a token away, and its likeliest token is the original's at "
        f"{percent(total['same_argmax']['value'], 1)} of them."
    )


def drafter_sentence(verdict: Mapping[str, Any], trained: str) -> str:
    """What the trained drafter buys, where another one is the fastest and would hide it."""
    own = verdict["by_drafter"].get(trained)
    best = verdict["overall"]["best"]
    if own is None or best is None or best["drafter"] == trained or own["overall"]["best"] is None:
        return ""
    speedup = own["overall"]["best"]["decode_speedup"]["value"]
    kinds = kind_sentence(own["by_kind"])
    return (
        f"The trained drafter {trained} by itself: {own['overall']['decision']} ({number(speedup)}×). {kinds}".strip()
    )

"""What the report says in words: the verdict as a sentence, how numbers look.

A missing number is a dash.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from spectrain.evaluation.leaves import EVERYTHING, PLAIN

DASH = "–"
CHANGED = "the bundle's own, changed target"


def number(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def interval(value: Mapping[str, Any] | None, digits: int = 2, key: str = "value") -> str:
    """A number with its interval, where it has one; ``key`` is what the document calls the number there."""
    if value is None or value[key] is None:
        return DASH
    if value["low"] is None:
        return number(value[key], digits)
    found, low, high = beside_one(value[key], value["low"], value["high"], digits)
    return f"{found} ({low}–{high})"


def beside_one(value: float, low: float, high: float, digits: int = 2) -> tuple[str, str, str]:
    """An estimate and its bounds; a bound that would look like 1 and is not has as many decimals as tell, and so has
    an estimate that would look to lie beyond it."""
    bounds = [_off_one(bound, digits) for bound in (low, high)]
    finer = any(text != number(bound, digits) for text, bound in zip(bounds, (low, high), strict=True))
    return (_off_one(value, digits) if finer else number(value, digits)), bounds[0], bounds[1]


def _off_one(value: float, digits: int) -> str:
    """A number that is not 1 to a millionth never looks like 1: whether a bound lies above 1 decides a verdict."""
    if abs(value - 1) > 1e-6:
        digits = next((more for more in range(digits, 7) if float(f"{value:.{more}f}") != 1), 7)
    return number(value, digits)


def rate(row: Mapping[str, Any]) -> str:
    """A row of acceptance by position."""
    return interval(row, 3, "rate")


def p_value(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"{value:.2g}"


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


def lengths(best_k: Mapping[str, int | None]) -> str:
    """The best draft length at each batch size; no length is "off"."""
    return ", ".join(f"batch {batch}: {f'k={k}' if k else 'off'}" for batch, k in best_k.items()) or DASH


FILTERS = {
    f.__name__: f
    for f in (number, interval, rate, p_value, percent, signed_percent, milliseconds, cost, rank, mebibytes, plural,
              lengths)
}  # fmt: skip


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
    gained = number(speedup["value"])
    tokens = number(best["tokens_per_round"]["value"])
    bounds, whose = "no interval", f" of {CHANGED}" if changed else ""
    if speedup["low"] is not None:
        gained, low, high = beside_one(speedup["value"], speedup["low"], speedup["high"])
        bounds = f"{confidence} interval {low} to {high}"
    gain = (
        f"{best['contender']} decodes {gained} times as fast as plain decoding{whose} ({bounds}; "
        f"{total} with prefill), committing {tokens} tokens per round"
    )
    if verdict["decision"] == "on":
        batch = verdict["up_to_batch"]
        pays = f"it pays up to batch {batch}" if batch != 1 else "it is not seen to pay in any beyond batch 1"
        return f"{gain}." + (f" Measured in batches, {pays}." if batch else "")
    return f"At best, {gain}: {verdict['reason']}."


def kind_sentence(by_kind: Mapping[str, Mapping[str, Any]]) -> str:
    """Where it pays and where it does not, when there is more than one kind."""
    by_kind = {kind: by_kind[kind] for kind in _outermost(by_kind)}
    if len(by_kind) < 2:
        return ""
    on = [
        f"{kind} ({verdict['best']['contender']}, {number(verdict['best']['decode_speedup']['value'])}×)"
        for kind, verdict in by_kind.items()
        if verdict["decision"] == "on"
    ]
    rest = {kind: verdict for kind, verdict in by_kind.items() if verdict["decision"] != "on"}
    few = [kind for kind, verdict in rest.items() if verdict["reason"].startswith("too few")]
    off = [kind for kind in rest if kind not in few]
    named = (("on", on), ("off", off), ("off, too few conversations to tell,", few))
    parts = [f"{word} for {', '.join(kinds)}" for word, kinds in named if kinds]
    return f"By kind: {'; '.join(parts)}."


def _outermost(kinds: Collection[str]) -> list[str]:
    """Parents stand for what they hold, but for one that holds everything: then those in it count."""
    found, parent = [kind for kind in kinds if "/" not in kind], ""
    while len(found) == 1:
        parent, found = found[0], [kind for kind in kinds if kind.rpartition("/")[0] == found[0]]
    return found or [kind for kind in kinds if kind == parent]


def law_sentence(
    contenders: Sequence[Mapping[str, Any]], *, changed: bool = False, faulty: Collection[str] = ()
) -> str:
    """Which contenders have the target's law, and which do not; ``faulty``: those of which a check failed.

    ``changed``: what was measured is a target that its bundle changed in training, so that law is not the original's.
    """
    lossy = [c for c in contenders if c["lossy"]]
    broken = [c["contender"] for c in contenders if c["contender"] in faulty]
    lawful = [c for c in contenders if c not in lossy and c["contender"] not in broken]
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
    if broken:
        parts.append(f"Exact in law by the rule, but found not to be: {', '.join(broken)}.")
    if lossy:
        verb = "have" if len(lossy) > 1 else "has"
        named = ", ".join(c["contender"] for c in lossy)
        parts.append(f"Not exact: {named} {verb} another law than the target's, and no part in the verdict.")
    return " ".join(parts)


def exactness_sentence(entries: Sequence[Mapping[str, Any]]) -> str:
    """How many greedy outputs are plain decoding's, by contender; empty where none was compared."""
    parts = [
        f"{e['contender']} {e['equal']}/{e['compared']}"
        + (f" ({e['near_ties']} at a near tie)" if e["near_ties"] else "")
        + (f" ({e['unexplained']} otherwise)" if e["unexplained"] else "")
        for e in entries
    ]
    return f"Greedy outputs equal to plain decoding's, token by token: {', '.join(parts)}." if parts else ""


def law_test_sentence(tests: Sequence[Mapping[str, Any]] | None) -> str:
    """What the test of the sampled tokens' law found; empty where nothing was sampled."""
    if not tests:
        return ""
    agree, differ = ([t for t in tests if t["agrees"] is side] for side in (True, False))
    parts = []
    if agree:
        least, found = min(t["adjusted_p_value"] for t in agree), max(t["detectable"] for t in agree)
        named, shown = ", ".join(t["contender"] for t in agree), p_value(least)
        parts.append(
            f"Sampled tokens have the target's law, as far as a test can tell: {named} (adjusted p "
            f"{'=' if shown == '1' else '≥'} {shown}; "
            f"a shift of {percent(found, 1)} in total variation would be found nine times in ten)."
        )
    for t in differ:
        whose = "as a lossy rule does" if t["lossy"] else "which an exact rule does not: this is a fault"
        parts.append(f"{t['contender']} has another law (adjusted p {p_value(t['adjusted_p_value'])}), {whose}.")
    return " ".join(parts)


def not_measured(document: Mapping[str, Any]) -> list[str]:
    """Sections that the report leaves out, and what to run to get them."""
    samplers, found = document["samplers"], []
    if document["load"] is None:
        found.append("Speed against batch size: run evaluate with --batch 1,2,4,8,16.")
    elif document["cost_model"]["goodput"] is None:
        found.append("Goodput at a request rate: run evaluate with --batch and --request-rate.")
    if all(block["sampler"]["temperature"] == 0 for block in samplers):
        found.append("The test of the output's law, and α where decoding went: run evaluate with --temperature 0,1.")
    elif all(block["sampler"]["temperature"] > 0 for block in samplers):
        found.append("Greedy outputs, token by token: run evaluate with --temperature 0,1.")
    numbers = [c["pooled"] for block in samplers for c in block["contenders"]]
    if all(n["energy_j_per_token"] is None for n in numbers):
        found.append("Energy: the device reports none.")
    return found


def drift_sentence(name: str, found: Mapping[str, Any]) -> str:
    """How far a drafter's target has moved from the original, over everything."""
    total, original = found["by_kind"][EVERYTHING], found.get("original")  # documents may be older than the name
    origin = f", {original}, which it derives from" if original else ""
    return (
        f"The target that was trained with {name} is not the original{origin}: over "
        f"{plural(total['tokens'], 'token')} of the original's answers its law is {number(total['kl']['value'], 4)} "
        "nats a token away, and its likeliest token is the original's at "
        f"{percent(total['same_argmax']['value'], 1)} of them."
    )


def drafter_sentence(verdict: Mapping[str, Any], trained: str | None) -> str:
    """What the trained drafter buys, where another one is the fastest and would hide it."""
    own = _hidden(verdict, trained)
    if own is None:
        return ""
    speedup = own["overall"]["best"]["decode_speedup"]["value"]
    kinds = kind_sentence(own["by_kind"])
    return (
        f"The trained drafter {trained} by itself: {own['overall']['decision']} ({number(speedup)}×). {kinds}".strip()
    )


def change_sentence(verdict: Mapping[str, Any], trained: str | None) -> str:
    """What would change the verdict; first of all for the trained drafter, where another one would hide it."""
    own, overall = _hidden(verdict, trained), verdict["overall"]
    if own is None or own["overall"]["decision"] == "on":
        return f"What would change it: {overall['would_change']}." if overall["would_change"] else ""
    found = [(f"for the trained {own['overall']['best']['contender']}", own["overall"]["would_change"])]
    found.append((f"for {overall['best']['contender']}", overall["would_change"]))
    return f"What would change it {'. And '.join(f'{who}: {what}' for who, what in found if what)}."


def _hidden(verdict: Mapping[str, Any], trained: str | None) -> Mapping[str, Any] | None:
    """The trained drafter's verdicts, where the verdict over all is about another one."""
    own: Mapping[str, Any] | None = verdict["by_drafter"].get(trained)
    best = verdict["overall"]["best"]
    if own is None or best is None or best["drafter"] == trained or own["overall"]["best"] is None:
        return None
    return own

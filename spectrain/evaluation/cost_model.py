"""What speculation should yield by the costs of its parts, at every batch size, beside what it was measured to yield.

A round of a chain takes k·c + v + o plain decoding steps: drafting, verification, the rest (see ``costs``). For single
requests the parts are those of the measured rounds themselves: they add up, and the difference only says that nothing
is missing. By batch they are those of rounds of other batches, which ``load`` decodes for that: with the tokens per
round of the measured batches they predict these batches' speedup, round by round with the requests that ran in each. A
batch shrinks as answers end, and what a round takes is no straight line in its requests. What no part accounts for is
the rest of the measured round. Other lengths than those measured are told by forwards timed by themselves,

    v(k, batch, context) = time of a forward of k + 1 tokens a request ÷ time of one of a single token,

linear between what was measured in tokens and context, and flat beyond, times the forward's share of a plain step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spectrain.evaluation.costs import break_even
from spectrain.evaluation.goodput import goodput
from spectrain.evaluation.leaves import PLAIN
from spectrain.evaluation.load_summary import PARTS
from spectrain.exact.cost import best_k, interpolate

Points = Sequence[tuple[float, float]]
Row = dict[str, Any]


def cost_model(samplers: Sequence[Row], load: Mapping[str, Any] | None, request_rates: Sequence[float]) -> Row:
    """The document's ``cost_model``.

    Returns:
        ``chains``: for every chain that keeps the target's law, under every sampler: c, v and o in plain steps, and
        ``v_by_k``, v at every length measured (0: plain decoding); ``predicted`` and ``measured`` decode speedup;
        ``alpha`` (as if all positions accepted alike), ``break_even_alpha`` and ``break_even_c`` (null: none is
        enough); ``best_k`` (0: off); ``unaccounted``, a share of the decode time; ``by_batch``: the same by batch size,
        where batches were measured with this sampler; and ``best_k_by_batch``.
        ``largest_difference`` between predicted and measured, for ``single`` requests, of single requests
        ``from_larger_k`` (a shorter chain told by the longest of its drafter) and ``by_batch``; and
        ``goodput`` at each request rate (null without rates or load).
    """
    lawful = [
        (sampler, contender)
        for sampler in samplers
        for contender in sampler["contenders"]
        if contender["k"] and not contender["lossy"]
    ]
    siblings = [contender["pooled"]["cost"]["from_sibling"] for _, contender in lawful]
    batches = Batches(load) if load else None
    chains = [
        _chain(sampler, contender, batches if load and load["sampler"] == sampler["name"] else None)
        for sampler, contender in lawful
    ]
    return {
        "chains": chains,
        "largest_difference": {
            "single": _largest(chains),
            "from_larger_k": _largest(row for row in siblings if row),
            "by_batch": _largest(row for chain in chains for row in chain["by_batch"]),
        },
        "goodput": goodput(load, request_rates) if load and request_rates else None,
    }


def _largest(rows: Iterable[Row]) -> float | None:
    return max((abs(row["relative_difference"]) for row in rows), default=None)


def _chain(sampler: Row, contender: Row, batches: Batches | None) -> Row:
    numbers = contender["pooled"]
    cost, seconds, tokens = numbers["cost"], numbers["seconds"], numbers["tokens_per_round"]["value"]
    family = _family(sampler, contender)
    by_name = {c["contender"]: c for c in sampler["contenders"]}
    edge = break_even(cost, contender["k"], tokens)
    points = _verification_by_k(family, by_name[contender["baseline"]])
    by_batch = _by_batch(contender, family[-1], batches) if batches else []
    return {
        "sampler": sampler["name"],
        **{name: contender[name] for name in ("contender", "drafter", "k", "verification")},
        "c": cost["draft_cost_per_token"],
        "v": cost["verify_cost_per_round"],
        "v_by_k": {str(int(k)): v for k, v in points},
        "o": cost["overhead_cost_per_round"],
        "tokens_per_round": tokens,
        "predicted": cost["predicted_speedup"],
        "measured": numbers["speedup"]["decode"],
        "relative_difference": cost["relative_difference"],
        "unaccounted": seconds["unaccounted"] / (seconds["total"] - seconds["prefill"]),
        "alpha": edge["alpha_now"],
        "break_even_alpha": edge["alpha"],
        "break_even_c": edge["draft_cost"],
        "best_k": _best_k(family[-1], lambda k: interpolate(points, k)),
        "best_k_by_batch": {str(row["batch"]): row["best_k"] for row in by_batch},
        "by_batch": by_batch,
    }


def _family(sampler: Row, contender: Row) -> list[Row]:
    """The chains of the same drafter under the same rule, shortest first."""
    same = ("drafter", "verification", "baseline")
    found = [c for c in sampler["contenders"] if c["k"] and all(c[name] == contender[name] for name in same)]
    return sorted(found, key=lambda c: c["k"])


def _verification_by_k(family: Sequence[Row], plain: Row) -> Points:
    """(k, v) of plain decoding and of every chain of a drafter, by the clocks of the acceptance measurement."""
    step_s = family[0]["pooled"]["cost"]["plain_step_ms"] / 1e3
    first = (0.0, plain["pooled"]["seconds"]["verify"] / plain["pooled"]["rounds"] / step_s)
    return [first, *((float(c["k"]), c["pooled"]["cost"]["verify_cost_per_round"]) for c in family)]


def _best_k(longest: Row, v: Any, c: float | None = None, o: float | None = None) -> int:
    """The length of the highest speedup up to the longest measured, by that one's survival; 0 when none pays."""
    cost, depth = longest["pooled"]["cost"], longest["k"]
    share = cost["proposed_per_round"] / depth  # a drafter may find nothing to propose
    c = (cost["draft_cost_per_token"] or 0.0) if c is None else c
    o = cost["overhead_cost_per_round"] if o is None else o
    survival = [row["rate"] for row in longest["pooled"]["marginal_survival"] if row["rate"] is not None]
    return best_k(survival, share * c, [v(k) + o for k in range(len(survival) + 1)]).k


# --- by batch -----------------------------------------------------------------------------------------------------


class Rounds:
    """Seconds of rounds by how many requests share them, by the parts of rounds timed at ``batch``."""

    def __init__(self, load: Mapping[str, Any], batch: int) -> None:
        drafting = [row for row in load["drafting"] if row["batch"] == batch]
        self._parts = {name: [r for r in drafting if r["contender"] == name] for name in _names(load)}
        lengths = [row["answer_tokens"] for row in load["rows"] if row["contender"] == PLAIN]
        context = load["prompt_tokens"] + sum(lengths) / len(lengths) / 2
        forwards = _by_rows([row for row in load["verification"] if row["batch"] == batch])
        self._forwards = [(float(rows), interpolate(points, context)) for rows, points in forwards.items()]

    def knows(self, contender: str) -> bool:
        return bool(self._parts.get(contender) and self._parts.get(PLAIN))

    def part(self, contender: str, name: str, running: float) -> float:
        """Of a round's seconds (``draft_s``, ``verify_s``, ``overhead_s``), ``proposed_per_round`` or ``rows``, the
        mean."""
        return interpolate([(row["running"], row[name]) for row in self._parts[contender]], running)

    def round_s(self, contender: str, running: float) -> float:
        """What a round should take by its parts; of plain decoding, a step."""
        return sum(self.part(contender, name, running) for name in PARTS)

    def verify_s(self, rows: float, running: float) -> float:
        """Verifying ``rows`` tokens a request, as no contender did: by forwards alone, and a plain step's forward."""
        ratio = interpolate(self._forwards, rows) / interpolate(self._forwards, 1)
        return self.part(PLAIN, "verify_s", running) * ratio

    def decode_s(self, contender: str, row: Row) -> tuple[float, float]:
        """Seconds that all rounds of a row should take by their parts, and how many requests they hold in all."""
        counts = [(float(running), count) for running, count in row["rounds_by_running"].items()]
        seconds = sum(count * self.round_s(contender, running) for running, count in counts)
        return seconds, sum(count * running for running, count in counts)


class Batches:
    """What was measured under load by batch size: every contender's rows, and the parts of rounds."""

    def __init__(self, load: Mapping[str, Any]) -> None:
        self._rows = {(row["contender"], row["batch"]): row for row in load["rows"]}
        self._rounds = {size: Rounds(load, size) for size in {row["batch"] for row in load["rows"]}}

    def of(self, contender: str) -> list[Row]:
        """A contender's rows that have a speedup, smallest batch first as they were measured."""
        return [row for (name, _), row in self._rows.items() if name == contender and row["decode_speedup"]]

    def plain(self, size: int) -> Row:
        return self._rows[PLAIN, size]

    def rounds(self, size: int) -> Rounds:
        return self._rounds[size]


def _names(load: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["contender"] for row in load["rows"]))


def _by_rows(forwards: Sequence[Row]) -> dict[int, list[tuple[float, float]]]:
    """Tokens of a request in a forward → (context, seconds)."""
    found: dict[int, list[tuple[float, float]]] = {}
    for row in forwards:
        found.setdefault(row["rows"], []).append((row["context"], row["seconds"]))
    return found


def _by_batch(contender: Row, longest: Row, batches: Batches) -> list[Row]:
    name, found = contender["contender"], []
    for row in batches.of(name):
        rounds = batches.rounds(row["batch"])
        if rounds.knows(name) and rounds.knows(longest["contender"]):
            found.append(_at_batch(contender, longest, rounds, row, batches.plain(row["batch"])))
    return found


def _at_batch(contender: Row, longest: Row, rounds: Rounds, row: Row, plain: Row) -> Row:
    """Costs with the whole batch running; the prediction round by round, with as many requests as ran in each."""
    name, batch, running = contender["contender"], row["batch"], row["running_in_decode"]
    (own_s, shares), (plain_s, plain_shares) = (rounds.decode_s(who, r) for who, r in ((name, row), (PLAIN, plain)))
    predicted = row["tokens_per_round"] * shares / own_s / (plain_shares / plain_s)
    round_s = own_s / sum(row["rounds_by_running"].values())
    costs = _costs(rounds, name, batch)
    ahead = _costs(rounds, longest["contender"], batch)
    per_token = (ahead["rows"] - 1) / longest["k"]  # below 1 where some rounds propose nothing
    best = _best_k(
        longest,
        lambda k: rounds.verify_s(1 + k * per_token, batch) / rounds.round_s(PLAIN, batch),
        ahead["draft_cost_per_token"],
        ahead["overhead_cost_per_round"],
    )
    edge = break_even(costs, contender["k"], row["tokens_per_round"])
    return {
        "batch": batch,
        "running": running,
        "c": costs["draft_cost_per_token"],
        "v": costs["verify_cost_per_round"],
        "o": costs["overhead_cost_per_round"],
        "tokens_per_round": row["tokens_per_round"],
        "predicted": predicted,
        "measured": row["decode_speedup"],
        "relative_difference": predicted / row["decode_speedup"]["value"] - 1,
        "unaccounted": 1 - round_s / row["round_s"],
        "break_even_alpha": edge["alpha"],
        "break_even_c": edge["draft_cost"],
        "best_k": best,
    }


def _costs(rounds: Rounds, name: str, batch: float) -> Row:
    """A contender's costs in plain steps of the same batch, under the names that ``costs.cost_block`` gives them."""
    step = rounds.round_s(PLAIN, batch)
    draft, verify, overhead, proposed, rows = (
        rounds.part(name, part, batch) for part in (*PARTS, "proposed_per_round", "rows")
    )
    return {
        "proposed_per_round": proposed,
        "rows": rows,
        "draft_cost_per_token": draft / proposed / step if proposed else 0.0,
        "verify_cost_per_round": verify / step,
        "overhead_cost_per_round": overhead / step,
        "break_even_tokens_per_round": (draft + verify + overhead) / step,
    }

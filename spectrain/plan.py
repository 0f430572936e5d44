"""Whether speculation would pay, from a few numbers: the what-if calculator. It needs no model, and imports none."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from spectrain.cli_options import command_parser, lengths, numbers, one, option
from spectrain.errors import SpectrainError
from spectrain.exact.cost import Length, alpha_for_tokens, by_length, geometric_survival, interpolate
from spectrain.output import telling

LENGTHS = "1..8"
DEAREST, CHEAPEST = 1e6, 1e-6  # plain decoding steps; beyond them nothing that comes out is a number


@dataclass(frozen=True)
class Plan:
    """What is known: P(first i accepted) for i = 1…; costs in plain decoding steps, v by draft length from 0."""

    survival: list[float]
    c: float
    v: list[float]
    o: float = 0.0
    alpha: float | None = None
    contender: str | None = None
    batch: int | None = None
    notes: tuple[str, ...] = ()

    def rows(self) -> list[Length]:
        """Every draft length; the rest of a round costs as much as its verification does: by the round."""
        return by_length(self.survival, self.c, [v + self.o for v in self.v])


def plan(arguments: Sequence[str], name: str = "spectrain plan") -> None:
    """Say whether speculation would pay, from a few numbers."""
    parser = command_parser(
        name,
        "Tokens per round, speedup and where it breaks even, for every draft length, from an acceptance and costs: c\n"
        "to draft a token, v to verify a round, o for the rest of it, in plain decoding steps at the same batch.\n"
        "The acceptance is --alpha (as if alike at every position), --survival, --tau (as published), or that of\n"
        "a report, with --report; what is given besides takes the place of what was measured. Needs no model.",
        f"{name} --alpha .7 --c .1 --v 1.2 --k 1..8\n"
        f"  {name} --tau 3.5 --k 5 --c .08\n"
        f"  {name} --report runs/quickstart/acceptance.json --batch 8",
    )
    _options(parser)
    options = parser.parse_args(arguments)
    options.batch = one(options.batch, "--batch")
    _check_costs(options)
    found = _measured(options) if options.report else _given(options)
    lengths = _lengths(options.k, len(found.survival)) if options.tau is None else range(1, len(found.survival) + 1)
    rows = [row for row in found.rows() if row.k in lengths]
    with telling(options.json) as tell:
        tell(_document(found, rows), _text(found, rows))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alpha", type=float, metavar="P", help="acceptance probability of every draft token")
    parser.add_argument(
        "--survival",
        type=numbers,
        metavar="NUMBERS",
        help="P(first i draft tokens accepted), i = 1, 2, ..., with commas",
    )
    parser.add_argument(
        "--tau", type=float, metavar="TOKENS", help="tokens per round at the length --k: tells the α that it implies"
    )
    option(parser, "--k", otherwise=f"{LENGTHS}, or as far as survival is known")
    parser.add_argument("--c", type=float, metavar="STEPS", help="steps that drafting a token takes")
    parser.add_argument("--v", type=numbers, metavar="NUMBERS",
                        help="steps that verifying a round takes: for all k, or each from 1 (default: 1)")  # fmt: skip
    parser.add_argument("--o", type=float, metavar="STEPS", help="steps that the rest of a round takes (default: 0)")
    option(parser, "--batch", "one size", otherwise="1")
    option(parser, "--report", "measured numbers take the place of those not given")
    parser.add_argument(
        "--contender",
        metavar="NAME",
        help="of that report, a chain (default: the trained drafter's best, or without one the verdict's)",
    )
    option(parser, "--json", "every draft length, and the best")


# --- given --------------------------------------------------------------------------------------------------------


def _given(options: argparse.Namespace) -> Plan:
    if options.contender is not None:
        raise SpectrainError("--contender names one of a report; give the report with --report, or leave it out")
    found = _acceptance(options)
    if found is None:
        raise SpectrainError("no acceptance: expected one of --alpha, --survival, --tau, or --report, a report")
    if options.c is None:
        raise SpectrainError("--c is missing: what drafting a token costs, in plain steps; for instance --c 0.1")
    survival, alpha = found
    notes: tuple[str, ...] = ()
    if options.v is None:
        if options.batch not in (None, 1):
            raise SpectrainError(
                f"--batch {options.batch}: what a verification costs at that batch is not known; give it with --v, or "
                "--report one that was measured with --batch"
            )
        notes = ("v = 1 is assumed: that a verification costs what a plain step does; give --v to change it",)
    v = _verification(options.v or (1.0,), len(survival))
    return Plan(survival, options.c, v, options.o or 0.0, alpha, batch=options.batch, notes=notes)


def _acceptance(options: argparse.Namespace) -> tuple[list[float], float | None] | None:
    """Survival by draft length and the α behind it, from the one option that says it; None where none does."""
    given = [flag for flag in ("alpha", "survival", "tau") if getattr(options, flag) is not None]
    if len(given) > 1:
        raise SpectrainError(f"--{given[0]} and --{given[1]} both say the acceptance; leave one out")
    if not given:
        return None
    if options.survival is not None:
        return list(options.survival), None
    if options.alpha is not None:
        return geometric_survival(options.alpha, max(_lengths(options.k))), options.alpha
    if len(options.k or ()) != 1:
        raise SpectrainError("--tau: give the draft length that it was measured at, one, for instance --tau 3.5 --k 5")
    (k,) = options.k
    alpha = alpha_for_tokens(options.tau, k)
    if alpha is None:
        raise SpectrainError(
            f"--tau {options.tau:g}: a round of k={k} commits at most {k + 1} tokens; if it was "
            "measured with a tree, no α is implied"
        )
    return geometric_survival(alpha, k), alpha


def _check_costs(options: argparse.Namespace) -> None:
    for flag in ("c", "o"):
        value = getattr(options, flag)
        if value is not None and not (0 <= value <= DEAREST):
            raise SpectrainError(f"--{flag} {value:g}: expected a cost in plain decoding steps, from 0 to {DEAREST:g}")
    if options.v is not None and not all(CHEAPEST <= value <= DEAREST for value in options.v):
        raise SpectrainError(
            f"--v {_shown(options.v)}: expected costs in plain decoding steps, each from {CHEAPEST:g} to {DEAREST:g}"
        )


def _verification(given: Sequence[float], longest: int) -> list[float]:
    """v by draft length from 0, which nobody asks for."""
    values = list(given)
    if len(values) == 1:
        values *= longest
    if len(values) < longest:
        raise SpectrainError(
            f"--v {_shown(given)}: {len(values)} costs for draft lengths up to {longest}; give one or {longest}"
        )
    return [1.0, *values[:longest]]


def _lengths(asked: Sequence[int] | None, known: int | None = None) -> Sequence[int]:
    """Draft lengths, of which no more than ``known`` can be told."""
    found = asked or (lengths(LENGTHS) if known is None else range(1, known + 1))
    if known is not None and max(found) > known:
        raise SpectrainError(f"--k {_shown(found)}: survival is known up to {known} tokens; lower --k")
    return found


# --- measured -----------------------------------------------------------------------------------------------------


def _measured(options: argparse.Namespace) -> Plan:
    """A chain of a report, under its first sampler; options take the place of what was measured."""
    from spectrain.evaluation.document import read_document

    document = read_document(options.report)
    sampler = document["samplers"][0]
    chains = {c["contender"]: c for c in document["cost_model"]["chains"] if c["sampler"] == sampler["name"]}
    chain = _chain(options, document, chains)
    numbers = next(c for c in sampler["contenders"] if c["contender"] == chain["contender"])["pooled"]
    survival = [row["rate"] for row in numbers["marginal_survival"] if row["rate"] is not None]
    family = [
        c for c in chains.values() if (c["drafter"], c["verification"]) == (chain["drafter"], chain["verification"])
    ]
    # A drafter that finds nothing to propose in some rounds costs less than k·c: c is told by the place in a draft.
    share = numbers["cost"]["proposed_per_round"] / chain["k"]
    if options.batch is None or (options.batch == 1 and not chain["by_batch"]):  # all of it was of single requests
        costs, points = chain, [(float(k), v) for k, v in chain["v_by_k"].items()]
    else:
        costs = _at_batch(options, document, chain)
        ours = [(c["k"], row["v"]) for c in family for row in c["by_batch"] if row["batch"] == options.batch]
        points = [(0.0, _plain_v(document["load"], options.batch)), *ours]
    found = Plan(survival, (costs["c"] or 0.0) * share, [interpolate(points, k) for k in range(len(survival) + 1)],
                 costs["o"], chain["alpha"], chain["contender"], options.batch,
                 _taken(options, document, chain["contender"]))  # fmt: skip
    given = _acceptance(options)
    if given is not None:
        found = replace(found, survival=given[0], alpha=given[1])
    v = found.v if options.v is None else _verification(options.v, len(found.survival))
    notes = found.notes
    if len(v) <= len(found.survival):
        v = [interpolate(points, k) for k in range(len(found.survival) + 1)]
    if options.v is None and len(found.survival) > (longest := int(max(points)[0])):
        notes += (f"v was measured up to k={longest}, and is taken to stay what it is there; give --v to change it",)
    c, o = (found.c if options.c is None else options.c), (found.o if options.o is None else options.o)
    return replace(found, v=v, c=c, o=o, notes=notes)


def _chain(options: argparse.Namespace, document: dict[str, Any], chains: dict[str, dict[str, Any]]) -> dict[str, Any]:
    name = options.contender or _planned(document)
    if name not in chains:
        found = f"found {', '.join(chains)}; name one with --contender" if chains else "it has none"
        what = "its verdict is about none" if name is None else f"{name!r} is no chain of this report"
        raise SpectrainError(f"{options.report}: {what}; {found}")
    return chains[name]


def _planned(document: dict[str, Any]) -> str | None:
    """The contender that the report's verdict is about; the trained drafter's best where it is about another one."""
    from spectrain.evaluation.trained import fastest_trained

    block = document["samplers"][0]
    verdict, trained = block["verdict"], fastest_trained(document, block)
    best = (verdict["by_drafter"][trained] if trained else verdict)["overall"]["best"]
    return best["contender"] if best else None


def _taken(options: argparse.Namespace, document: dict[str, Any], name: str) -> tuple[str, ...]:
    """Says which contender was taken, where nobody named it and the report's verdict is about another one."""
    best = document["samplers"][0]["verdict"]["overall"]["best"]
    if options.contender is not None or best is None or best["contender"] == name:
        return ()
    return (f"{name} is taken, the trained drafter's best; the report's best is {best['contender']}: plan it with "
            f"--contender '{best['contender']}'",)  # fmt: skip


def _at_batch(options: argparse.Namespace, document: dict[str, Any], chain: dict[str, Any]) -> dict[str, Any]:
    rows = {row["batch"]: row for row in chain["by_batch"]}
    if options.batch not in rows:
        measured = ", ".join(map(str, rows))
        found = f"{chain['contender']} was measured at {measured}" if rows else "it was measured without batches"
        raise SpectrainError(
            f"--batch {options.batch}: {options.report}: {found}; evaluate with --batch {options.batch}"
        )
    return rows[options.batch]


def _plain_v(load: dict[str, Any], batch: int) -> float:
    """The forward's share of a plain step of the whole batch."""
    from spectrain.evaluation.leaves import PLAIN

    plain = [row for row in load["drafting"] if (row["contender"], row["batch"]) == (PLAIN, batch)]
    row = max(plain, key=lambda row: row["running"])
    return float(row["verify_s"] / (row["verify_s"] + row["overhead_s"]))


# --- told ---------------------------------------------------------------------------------------------------------


def _best(rows: Sequence[Length]) -> Length | None:
    best = max(rows, key=lambda row: row.speedup)
    return best if best.speedup > 1 else None


def _document(found: Plan, rows: Sequence[Length]) -> dict[str, Any]:
    best = _best(rows)
    values = {**asdict(found), "notes": list(found.notes), "rows": [asdict(row) for row in rows]}
    return {**values, "best": {"k": best.k, "speedup": best.speedup} if best else {"k": 0, "speedup": 1.0}}


def _text(found: Plan, rows: Sequence[Length]) -> str:
    best = _best(rows)
    about = [f"α {found.alpha:.3f}" if found.alpha is not None else "survival as given", f"c {found.c:.3g}"]
    values = [found.v[row.k] for row in rows]
    spread = f"{values[0]:.3g}" + (f" to {values[-1]:.3g}" if values[-1] != values[0] else "")
    about += [f"v {spread}", f"o {found.o:.3g}"]
    head = ", ".join(filter(None, [found.contender, f"batch {found.batch}" if found.batch else "", *about]))
    lines = [f"{head} (costs in plain decoding steps)", ""]
    heads = ("k", "tokens per round", "round cost", "speedup", "break-even α", "break-even c")
    cells = [
        (str(r.k), f"{r.tokens_per_round:.3f}", f"{r.round_cost:.3f}", f"{r.speedup:.3f}", _or_none(r.break_even_alpha),
         _or_none(r.break_even_c))
        for r in rows
    ]  # fmt: skip
    lines += [
        "  ".join(cell.rjust(len(head)) for cell, head in zip(row, heads, strict=True)) for row in (heads, *cells)
    ]
    word = f"k={best.k}, {best.speedup:.2f} times as fast as plain decoding" if best else "off: no length here pays"
    return "\n".join([*lines, "", f"best: {word}", *(f"note: {note}" for note in found.notes)])


def _shown(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _or_none(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"

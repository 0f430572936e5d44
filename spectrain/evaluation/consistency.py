"""Whether a document agrees with itself: what is named was measured, verdicts are about what stands beside them.

``contradictions`` has what can be said of two places, ``sums`` the numbers of a contender, ``load_checks`` batches and
the cost model. All of it comes after the shape is known to be right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectrain.errors import SpectrainError
from spectrain.evaluation.contradictions import CONTRADICTS, at_most, check_values, known, named_once, same
from spectrain.evaluation.faults import departures, not_exact
from spectrain.evaluation.kinds import measured_kinds
from spectrain.evaluation.leaves import LOSSY, ON, PLAIN
from spectrain.evaluation.load_checks import check_cost_model, check_load
from spectrain.evaluation.sums import check_beside, check_numbers, check_parts

Block = Mapping[str, Any]
Blocks = Mapping[str, Block]


def check_consistency(document: Block) -> None:
    """Raise ``SpectrainError`` that names the place, where two places of a document contradict one another."""
    check_values(document)
    at_most("statistics.confidence", document["statistics"]["confidence"],
            document["statistics"]["adjusted_confidence"], "statistics.adjusted_confidence is")  # fmt: skip
    named_once((block["name"] for block in document["samplers"]), "samplers")
    samplers: dict[str, Blocks] = {}
    for number, block in enumerate(document["samplers"]):
        samplers[block["name"]] = _sampler(block, f"samplers[{number}]")
    for number, row in enumerate(document["teacher_forced"]):
        same(f"teacher_forced[{number}].alpha", row["alpha"], row["interval"]["value"], "its interval is of")
    for number, row in enumerate(document["calibration"]):
        counted = sum(found["count"] for found in row["bins"])
        same(f"calibration[{number}].positions", row["positions"], counted, "its bins come to")
    if document["load"] is not None:
        check_load(document["load"], samplers)
    check_cost_model(document, samplers)
    _check_faults(document)


def _check_faults(document: Block) -> None:
    """Nothing is on where a check found that output is not the target's, whichever sampler or contender it was."""
    faulty = departures(document["samplers"])
    places = {f"load.by_batch[{i}]": row for i, row in enumerate((document["load"] or {"by_batch": ()})["by_batch"])}
    for number, block in enumerate(document["samplers"]):
        for place, found in _verdicts(block["verdict"], f"samplers[{number}].verdict"):
            places |= {f"{place}.overall": found["overall"]}
            places |= {f"{place}.by_kind.{kind}": verdict for kind, verdict in found["by_kind"].items()}
    on = next((place for place, verdict in places.items() if verdict["decision"] == ON), None)
    if faulty and on is not None:
        raise SpectrainError(f"{on}.decision is {ON!r}, but a check failed, {not_exact(faulty)}: {CONTRADICTS}")


# --- samplers -----------------------------------------------------------------------------------------------------


def _sampler(block: Block, path: str) -> Blocks:
    """The contenders by name."""
    for number, contender in enumerate(block["contenders"]):
        _labelled(contender, f"{path}.contenders[{number}]")
    names = named_once((c["contender"] for c in block["contenders"]), f"{path}.contenders")
    contenders, places = {c["contender"]: c for c in block["contenders"]}, {n: i for i, n in enumerate(names)}
    known(f"{path}.contenders, of which one is plain decoding: the first", PLAIN, names[:1])
    named_once(block["kinds"], f"{path}.kinds")
    for name, contender in contenders.items():
        here = f"{path}.contenders[{places[name]}]"
        same(f"{here}.by_kind has kinds that", sorted(contender["by_kind"]), sorted(block["kinds"]), "the sampler has")
        for place, numbers in _numbers(contender):
            check_numbers(numbers, f"{here}.{place}", contender["depth"])
        check_parts(contender, here)
        same(f"{here}.pooled.conversations", contender["pooled"]["conversations"], block["conversations"],
             "the sampler has")  # fmt: skip
    decoded = list(measured_kinds(contenders[PLAIN]))
    for name, contender in contenders.items():
        here = f"{path}.contenders[{places[name]}]"
        same(
            f"{here}.by_kind has figures of kinds that", list(measured_kinds(contender)), decoded, "plain has them of:"
        )
        known(f"{here}.baseline", contender["baseline"], names)
        for place, numbers in _numbers(contender):
            baseline = dict(_numbers(contenders[contender["baseline"]]))[place]
            check_beside(numbers, baseline, f"{here}.{place}")
            if (sibling := (numbers["cost"] or {}).get("from_sibling")) is not None:
                known(f"{here}.{place}.cost.from_sibling.contender", sibling["contender"], names)
    _beside(block, contenders, path)
    for here, found in _verdicts(block["verdict"], f"{path}.verdict"):
        same(f"{here}.by_kind has kinds that", sorted(found["by_kind"]), sorted(block["kinds"]), "the sampler has")
        _verdict(found["overall"], contenders, None, f"{here}.overall")
        for kind, verdict in found["by_kind"].items():
            _verdict(verdict, contenders, kind, f"{here}.by_kind.{kind}")
    for drafter in block["verdict"]["by_drafter"]:
        known(f"{path}.verdict.by_drafter", drafter, [c["drafter"] for c in contenders.values()])
    return contenders


def _verdicts(verdict: Block, path: str) -> list[tuple[str, Block]]:
    """Over all drafters and of each: an ``overall`` and ``by_kind``."""
    return [(path, verdict), *((f"{path}.by_drafter.{name}", own) for name, own in verdict["by_drafter"].items())]


def _numbers(contender: Block) -> list[tuple[str, Block]]:
    return [("pooled", contender["pooled"]), *((f"by_kind.{k}", n) for k, n in measured_kinds(contender).items())]


def _labelled(contender: Block, path: str) -> None:
    """It is what its shape says, and a rule that changes the law says so wherever its name is read."""
    rule = contender["verification"] or ""
    if not rule.endswith("_lossy") == contender["lossy"] == (LOSSY in contender["contender"]):
        raise SpectrainError(
            f"{path}: {contender['contender']!r} was verified with {rule!r}, lossy is {contender['lossy']!r}: a rule "
            f"that changes the law of the output must be called {LOSSY}, and no other may be; measure again"
        )
    shape = contender["shape"] or {"type": "chain", "depth": 0, "nodes": 0}
    for key in ("depth", "nodes"):
        same(f"{path}.{key}", contender[key], shape[key], "its shape has")
    same(f"{path}.k", contender["k"], shape["depth"] if shape["type"] == "chain" else None, "its shape has")
    for place, numbers in _numbers(contender):
        for key in ("speedup", "cost"):
            there, expected = numbers[key] is not None, contender["shape"] is not None
            same(f"{path}.{place}.{key} (whether it is there)", there, expected, "what drafts has one:")


def _beside(block: Block, contenders: Blocks, path: str) -> None:
    """Exactness, the law test and the leaderboard, each of contenders that were measured."""
    for number, row in enumerate(block["exactness"]):
        here = f"{path}.exactness[{number}]"
        known(f"{here}.contender", row["contender"], contenders)
        differ = row["near_ties"] + row["unexplained"]
        same(f"{here}.compared", row["compared"], row["equal"] + differ, "equal, near_ties and unexplained come to")
        same(f"{here}.differences has a length that", len(row["differences"]), differ, "of answers that differ is")
    for number, row in enumerate(block["distribution"] or ()):
        here = f"{path}.distribution[{number}]"
        known(f"{here}.contender", row["contender"], contenders)
        same(f"{here}.tokens", row["tokens"], sum(row["bins"]), "its bins come to")
        at_most(f"{here}.p_value", row["p_value"], row["adjusted_p_value"], "adjusted_p_value is")
    for name in ("exactness", "distribution"):
        named_once((row["contender"] for row in block[name] or ()), f"{path}.{name}")
    if (board := block["leaderboard"]) is not None:
        _board(board, contenders, None, f"{path}.leaderboard")
        for kind, found in (board.get("by_kind") or {}).items():
            known(f"{path}.leaderboard.by_kind", kind, measured_kinds(contenders[PLAIN]))
            _board(found, contenders, kind, f"{path}.leaderboard.by_kind.{kind}")


def _board(board: Block, contenders: Blocks, kind: str | None, path: str) -> None:
    listed = named_once((row["contender"] for side in ("ranked", "apart") for row in board[side]), path)
    same(f"{path} has contenders that", sorted(listed), sorted(contenders), "the sampler has")
    for side in ("ranked", "apart"):
        for number, row in enumerate(board[side]):
            here, numbers = f"{path}.{side}[{number}]", _of_kind(contenders[row["contender"]], kind)
            for key in ("tokens_per_second", "accepted_draft_tokens_per_second", "speedup", "tokens_per_round"):
                same(f"{here}.{key}", row[key], numbers[key], "the contender has")
            same(f"{here}.rank (whether there is one)", row["rank"] is not None, side == "ranked", "by its list:")
            if row["above"] is not None:
                known(f"{here}.above.contender", row["above"]["contender"], listed)


def _of_kind(contender: Block, kind: str | None) -> Block:
    found: Block = contender["pooled"] if kind is None else contender["by_kind"][kind]
    return found


def _verdict(verdict: Block, contenders: Blocks, kind: str | None, path: str) -> None:
    """It is about a contender that is there, with that one's numbers, and on only where those are above 1."""
    best, on = verdict["best"], verdict["decision"] == ON
    chosen = best if on and best is not None else {"contender": None, "k": 0}
    for key in ("contender", "k"):
        same(
            f"{path}.{key}", verdict[key], chosen[key], f"by the decision, {verdict['decision']!r}, and the best it is"
        )
    if best is not None:
        known(f"{path}.best.contender", best["contender"], [n for n, c in contenders.items() if not c["lossy"]])
        contender = contenders[best["contender"]]
        known(f"{path}.best, on a kind that", kind, [None, *measured_kinds(contender)])
        numbers = _of_kind(contender, kind)
        for key in ("drafter", "k", "depth", "nodes", "verification"):
            same(f"{path}.best.{key}", best[key], contender[key], "the contender has")
        for key in ("conversations", "tokens_per_round"):
            same(f"{path}.best.{key}", best[key], numbers[key], "the contender has")
        for part in ("decode", "total"):
            speedup = (numbers["speedup"] or {}).get(part)
            same(f"{path}.best.{part}_speedup", best[f"{part}_speedup"], speedup, "the contender has")
    if on and (best is None or verdict["adjusted"] is None or not (verdict["adjusted"]["low"] or 0) > 1):
        raise SpectrainError(f"{path}.decision is {ON!r}, but its adjusted interval is not above 1: {CONTRADICTS}")

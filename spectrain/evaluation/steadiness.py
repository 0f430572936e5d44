"""Whether the clock was steady: numbers that a machine hardly has by itself, and two passes that disagree.

Other work on a machine slows whatever is measured just then. Where that was plain decoding, a drafter looks faster
than it can be, and nothing in its interval says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectrain.evaluation.wording import number

SLACK = 1.02  # a contender that hardly ever drafts is as fast as plain decoding, now a little faster, now slower
QUICK = 0.75  # reading more rows takes no less time, but kernels like some shapes better: 0.85 was seen on CPUs
AGAIN = "measure again with nothing else running"


def unsteady(document: Mapping[str, Any]) -> list[str]:
    """What a reader should know of the clock before any number that it gave; empty where it looks steady."""
    samplers = document["samplers"]
    unlikely = [told for block in samplers for told in _unlikely(block, several=len(samplers) > 1)]
    found = [
        f"Hard to believe: {'; '.join(unlikely)}. Most likely other work on the machine disturbed the clock: {AGAIN}."
    ]
    return list(filter(None, [*(found if unlikely else []), batches_of_one(document)]))


def batches_of_one(document: Mapping[str, Any]) -> str:
    """That batches of 1 were judged otherwise than single requests, where they were; else empty."""
    load = document["load"]
    row = next((row for row in (load or {"by_batch": ()})["by_batch"] if row["batch"] == 1), None)
    block = next((block for block in document["samplers"] if load and block["name"] == load["sampler"]), None)
    if row is None or block is None:
        return ""
    overall = block["verdict"]["overall"]
    names = [None if verdict["decision"] == "off" else verdict["contender"] for verdict in (overall, row)]
    drafters = {c["contender"]: c["drafter"] for c in block["contenders"]}
    one, batch = (name and drafters.get(name, name) for name in names)
    undecided = any(verdict["reason"].startswith("too few") for verdict in (overall, row))
    if one == batch or undecided:
        return ""
    single, batched = (f"{name} is on" if name else "nothing is on" for name in names)
    return (
        f"One request at a time, {single}; under load, in batches of 1, {batched} ({block['name']}). Both time the "
        f"same thing and disagree, so the clock was not steady or there was too little to tell: {AGAIN}, on more "
        "conversations."
    )


def _unlikely(block: Mapping[str, Any], *, several: bool) -> list[str]:
    """Contenders of a sampler that gain more than they commit, or whose forward passes are quicker than plain's."""
    by_name, found = {c["contender"]: c["pooled"] for c in block["contenders"]}, []
    for contender in block["contenders"]:
        numbers, plain = contender["pooled"], by_name.get(contender["baseline"])
        if contender["shape"] is None or numbers["speedup"] is None or plain is None:
            continue
        speedup, tokens = numbers["speedup"]["decode"]["value"], numbers["tokens_per_round"]["value"]
        told = []
        if speedup > SLACK * tokens:
            told.append(f"decodes {number(speedup)} times as fast, committing {number(tokens)} tokens per round")
        # Against plain's own forwards, not its whole steps: on a small model much of a step is overhead.
        forward = _forward_s(numbers) / _forward_s(plain) if _forward_s(plain) else 1.0
        if forward < QUICK:
            told.append(f"verifies a round in {number(forward)} of the time that plain decoding's forward pass takes")
        if told:
            where = f", {block['name']}," if several else ""
            found.append(f"{contender['contender']}{where} {' and '.join(told)}")
    return found


def _forward_s(numbers: Mapping[str, Any]) -> float:
    return float(numbers["seconds"]["verify"] / numbers["rounds"])

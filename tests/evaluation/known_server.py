"""A server whose times are known by formula, as raw lines of a load measurement, and documents with them."""

from spectrain.evaluation.document import check_document
from spectrain.evaluation.load_summary import summarise_load
from spectrain.evaluation.summary import summarise

FLOOR, PER_ROW, OVER = 0.050, 0.004, 0.006  # seconds: a forward of b·rows tokens takes FLOOR + PER_ROW·b·rows
DRAFT = 0.005  # to draft a token for the whole batch
TAU = {"eagle3 k=3": 2.4, "eagle3 k=5": 2.8}
TOKENS, PROMPT = 49, 40


def forward(batch, rows):
    return FLOOR + PER_ROW * batch * rows


def round_s(name, batch):
    k = 0 if name == "plain" else int(name[-1])
    return forward(batch, k + 1) + k * DRAFT + OVER


def line(batch, *, lost=0.0, groups=8, ending=False, other=1.0):
    """What a server with these costs gives; ``lost``: a share of every round that no part accounts for; ``ending``:
    half of the requests end half-way; ``other``: how much slower the rounds are that half of them share."""
    verification = [{"context": 64, "rows": r, "seconds": [forward(batch, r)] * 3} for r in (1, 4, 6)]
    parts, samples = [], []
    for name in ("plain", *TAU):
        k = 0 if name == "plain" else int(name[-1])
        steps = (TOKENS - 1) / TAU.get(name, 1.0)
        shares = [[batch // 2, steps / 2], [batch, steps / 2]] if ending and batch > 1 else [[batch, steps]]
        slower = {running: other if running < batch else 1.0 for running, _ in shares}
        for running, slow in slower.items():
            parts.append({"contender": name, "running": running, "rounds": 10, "proposed": 10 * running * k,
                          "rows": 10 * (k + 1), "draft_s": slow * 10 * k * DRAFT,
                          "verify_s": slow * 10 * forward(running, k + 1),
                          "overhead_s": slow * 10 * OVER})  # fmt: skip
        rounds = sum(running * count for running, count in shares)
        for group in range(groups):
            decode = sum(count * slower[running] * round_s(name, running) for running, count in shares)
            decode *= (1 + (lost if k else 0)) * (1 + group / 1000)
            samples.append({"contender": name, "drafter": name.split()[0], "k": k, "batch": batch, "group": group,
                            "prompts": ["p"] * batch, "tokens": TOKENS * batch, "seconds": decode + 0.02 * batch,
                            "prefill_s": 0.02 * batch, "decode_s": decode, "rounds": rounds, "steps": steps,
                            "committed": rounds * TAU.get(name, 1.0), "running": batch,
                            "rounds_by_running": shares, "identical": batch})  # fmt: skip
    return {"batch": batch, "verification": verification, "parts": parts, "samples": samples}


def load_of(lines, **changes):
    return {"sampler": "greedy", "groups": 8, "repeats": 3, "max_new_tokens": TOKENS, "prompt_tokens": PROMPT,
            **summarise_load(lines), **changes}  # fmt: skip


def document(samples, simulator, lines, rates=()):
    name = summarise(samples, context=simulator.context)["samplers"][0]["name"]
    context = {**simulator.context, "load": load_of(lines, sampler=name), "request_rates": list(rates)}
    found = summarise(samples, context=context)
    check_document(found)
    return found

"""What an acceptance document holds: every key, as far as those who read documents need it.

``document`` checks documents against it, ``schema`` publishes it. What a leaf may hold is said by its key: ``leaves``.
"""

from __future__ import annotations

SCHEMA = "spectrain.acceptance/4"

# None is a leaf; a list has one shape for all its items; "*" stands for every key of an object. All have to be there;
# with a "?" at the end a key may be null, and with "??" also be missing: not every measurement has it.
_INTERVAL = {"value": None, "low?": None, "high?": None}
_SPEEDUP = {"decode": _INTERVAL, "total": _INTERVAL}
_COST = {
    "proposed_per_round": None,
    "nodes_per_round": None,
    "draft_cost_per_token?": None,
    "draft_cost_per_round": None,
    "verify_cost_per_round": None,
    "overhead_cost_per_round": None,
    "break_even_tokens_per_round": None,
    "predicted_speedup": None,
    "measured_speedup": None,
    "relative_difference": None,
    "by_k": [{"k": None, "tokens_per_round": None, "speedup": None}],
    "best_k?": None,
    "from_sibling?": {"contender": None, "speedup": None, "relative_difference": None},
}
_BOUNDS = {"low?": None, "high?": None}
_NUMBERS = {
    "conversations": None,
    "decoded??": None,
    "rounds": None,
    "clipped_rounds": None,
    "clipped": dict.fromkeys(("eos", "budget", "stop")),
    "tokens": None,
    "new_tokens": None,
    "proposed_draft_tokens": None,
    "accepted_draft_tokens": None,
    "tokens_per_round": _INTERVAL,
    "tokens_per_full_round?": _INTERVAL,
    "accepted_prefix": {
        "mean?": None,
        "interval?": _INTERVAL,
        "histogram": [None],
        "shares": [{"accepted": None, "share?": None, **_BOUNDS}],
    },
    "marginal_survival": [{"position": None, "rate?": None, "accepted": None, "rounds": None, **_BOUNDS}],
    "conditional_acceptance": [{"position": None, "rate?": None, "accepted": None, "proposed": None, **_BOUNDS}],
    "visited_alpha?": [{"position": None, "value?": None, "positions": None, **_BOUNDS}],
    "energy_j_per_token?": _INTERVAL,
    "memory": dict.fromkeys(("target_bytes?", "drafter_bytes?", "cache_bytes?", "state_bytes?")),
    "advice": {"tokens_per_round": {"half_width?": None, "conversations_for": {"*?": None}}},
    "seconds": dict.fromkeys(("prefill", "draft", "verify", "overhead", "unaccounted", "total")),
    "tokens_per_second": _INTERVAL,
    "decode_tokens_per_second": _INTERVAL,
    "accepted_draft_tokens_per_second": _INTERVAL,
    "latency_ms": dict.fromkeys(("token_p50", "token_p95", "prefill_p50", "prefill_p95")),
    "speedup?": _SPEEDUP,
    "cost?": _COST,
}
_BAND = {
    "label": None,
    "conversations": None,
    "rounds": None,
    "tokens_per_round": _INTERVAL,
    "decode_speedup?": _INTERVAL,
}
_BANDS = {name: [_BAND] for name in ("turn", "prompt tokens", "answer position")}
_DISTRIBUTION = dict.fromkeys(
    ("contender", "lossy", "tokens", "statistic", "p_value", "adjusted_p_value", "agrees", "detectable")
)
_BIN = dict.fromkeys(("low", "high", "count", "confidence?", "accepted?"))
_CALIBRATION = {
    **dict.fromkeys(("drafter", "source", "sampler", "depth?", "positions", "ece", "mean_confidence", "hit_rate")),
    "bins": [_BIN],
}
_VERDICT = {
    "decision": None,
    "contender?": None,
    "k?": None,
    "reason": None,
    "best?": {
        "contender": None,
        "drafter": None,
        "k?": None,
        "depth": None,
        "nodes": None,
        "verification": None,
        "conversations": None,
        "tokens_per_round": _INTERVAL,
        "decode_speedup": _INTERVAL,
        "total_speedup": _INTERVAL,
    },
    "comparisons": None,
    "adjusted?": _INTERVAL,
    "up_to_batch?": None,
    "would_change": None,
    "conversations_needed?": None,
}
_VERDICTS = {"overall": _VERDICT, "by_kind": {"*": _VERDICT}}
_EXACTNESS = {
    "contender": None,
    "lossy": None,
    "compared": None,
    "equal": None,
    "near_ties": None,
    "unexplained": None,
    "near_tie_gap": None,
    "differences": [{"conversation": None, "kind": None, "position?": None, "logit_gap?": None}],
}
_ENTRY = {
    **dict.fromkeys(("rank?", "tied", "why?", "contender", "drafter", "k?", "depth", "nodes", "verification?")),
    "above?": {"contender": None, "ratio": _INTERVAL},
    "tokens_per_second": _INTERVAL,
    "accepted_draft_tokens_per_second": _INTERVAL,
    "speedup?": _SPEEDUP,
    "tokens_per_round": _INTERVAL,
    **dict.fromkeys(("alpha?", "draft_cost_per_round?", "verify_cost_per_round?")),
    **dict.fromkeys(("drafter_bytes?", "state_bytes?", "training_seconds?", "training_answer_tokens?")),
}
_BOARD = {"ranked": [_ENTRY], "apart": [_ENTRY]}
_BOARDS = {**_BOARD, "by_kind??": {"*": _BOARD}}
_LOAD = {
    **dict.fromkeys(("sampler", "groups", "repeats", "max_new_tokens", "prompt_tokens")),
    "batches": [None],
    "context_tokens": [None],
    "verification": [dict.fromkeys(("batch", "context", "k", "rows", "seconds", "v"))],
    "lines": [dict.fromkeys(("batch", "context", "points", "floor_s", "seconds_per_row", "largest_residual"))],
    "drafting": [
        {
            **dict.fromkeys(("contender", "batch", "rounds", "running", "proposed_per_round", "rows")),
            **dict.fromkeys(("draft_s", "verify_s", "overhead_s")),
        }
    ],
    "rows": [
        {
            **dict.fromkeys(("contender", "drafter", "k?", "batch", "groups", "answers", "identical?")),
            **dict.fromkeys(("tokens_per_second", "decode_tokens_per_second", "tokens_per_round?", "answer_tokens")),
            **dict.fromkeys(("round_s?", "prefill_s_per_request", "running", "running_in_decode?", "pays")),
            "rounds_by_running": {"*": None},
            "speedup?": _INTERVAL,
            "decode_speedup?": _INTERVAL,
        }
    ],
    "crossovers": [dict.fromkeys(("contender", "drafter", "k?", "largest_paying_batch?", "sentence"))],
    "largest_paying_batch": {"*?": None},
    "by_batch": [
        {
            **dict.fromkeys(("batch", "decision", "contender?", "k?", "reason", "comparisons")),
            "speedup?": _INTERVAL,
            "adjusted?": _INTERVAL,
        }
    ],
}
_CHAIN_COSTS = {
    **dict.fromkeys(("c?", "v", "o", "tokens_per_round", "predicted", "relative_difference", "unaccounted")),
    **dict.fromkeys(("break_even_alpha?", "break_even_c?", "best_k")),
    "measured": _INTERVAL,
}
_STATE = dict.fromkeys(
    ("contender", "k?", "capacity", "saturated", "running?", "tokens_per_second?", "latency_ms_per_token?")
)
_COST_MODEL = {
    "chains": [
        {
            **dict.fromkeys(("sampler", "contender", "drafter", "k", "verification", "alpha?")),
            **_CHAIN_COSTS,
            "v_by_k": {"*": None},
            "best_k_by_batch": {"*": None},
            "by_batch": [{"batch": None, "running": None, **_CHAIN_COSTS}],
        }
    ],
    "largest_difference": dict.fromkeys(("single?", "from_larger_k?", "by_batch?")),
    "goodput?": [
        {
            **dict.fromkeys(("request_rate", "prompt_tokens", "answer_tokens", "sentence")),
            "contenders": [_STATE],
            "best": {"contender": None, "k?": None},
        }
    ],
}
_MOVED = {"conversations": None, "tokens": None, **dict.fromkeys(("kl", "total_variation", "same_argmax"), _INTERVAL)}
DOCUMENT = {
    "schema": None,
    "context": {
        "target": {"name": None},
        "drafter": {"name": None},
        "traffic": dict.fromkeys(("name", "digest", "conversations", "chose_the_step?")),
        "device": {"name": None, "threads": None, "dtype": None},
        "versions": {"*": None},
        "stopped_early??": dict.fromkeys(("rule", "half_width", "asked")),
        "left_out??": [{"drafter": None, "reason": None}],
        "drafters??": {"*?": {"training??": {"curve??": [dict.fromkeys(("seconds", "tokens_per_round"))]}}},
    },
    "statistics": dict.fromkeys(("confidence", "resamples", "seed", "method", "comparisons", "adjusted_confidence")),
    "teacher_forced": [
        {
            **dict.fromkeys(("temperature", "kind", "depth", "alpha", "positions", "conversations")),
            "interval": _INTERVAL,
        }
    ],
    "calibration": [_CALIBRATION],
    "draft_vocabulary": [{"drafter": None, "kind": None, "coverage": _INTERVAL, "tokens": None}],
    "drift??": {"*": {"original??": None, "by_kind": {"everything": _MOVED, "*": _MOVED}}},
    "samplers": [
        {
            "name": None,
            "sampler": {"temperature": None},
            "conversations": None,
            "kinds": [None],
            "contenders": [
                {
                    "contender": None,
                    "drafter": None,
                    "k?": None,
                    "shape?": {"type": None, "depth": None, "nodes": None},
                    "depth": None,
                    "nodes": None,
                    "verification?": None,
                    "lossy": None,
                    "baseline": None,
                    "pooled": _NUMBERS,
                    "by_kind": {"*?": _NUMBERS},
                    "by_band": _BANDS,
                }
            ],
            "exactness": [_EXACTNESS],
            "distribution?": [{**_DISTRIBUTION, "bins": [None]}],
            "leaderboard?": _BOARDS,
            "verdict": {**_VERDICTS, "by_drafter": {"*": _VERDICTS}},
        }
    ],
    "load?": _LOAD,
    "cost_model": _COST_MODEL,
}

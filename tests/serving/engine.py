"""One start of vLLM, in an environment of its own: python -P engine.py JOB RESULT.

Knows nothing of spectrain, whose transformers may be another. A job has ``model``, ``prompts`` (token ids),
``max_new_tokens``, ``max_model_len`` and ``speculative_config`` (or null); the result has the greedy ``tokens``, what
the server counted in all (``counters``), and each request's own ``rounds`` as [proposed, accepted].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COUNTED = "vllm:spec_decode_num_"


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Start, answer every prompt in one batch, and read the counters."""
    import vllm

    speculative = job["speculative_config"]
    counted = {"per_request_spec_decode_metrics": "detailed"} if speculative else {}  # refused without
    llm = vllm.LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,  # compiling takes longer than what is compared
        max_model_len=job["max_model_len"],
        max_num_seqs=len(job["prompts"]),
        speculative_config=speculative,
        disable_log_stats=False,
        **counted,
    )
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], greedy)]
    counters = {
        metric.name.removeprefix(COUNTED): metric.values if hasattr(metric, "values") else metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(COUNTED)
    }
    return {
        "vllm": vllm.__version__,
        "tokens": [list(output.token_ids) for output in outputs],
        "rounds": [_rounds(output.spec_decode_metrics) for output in outputs],
        "counters": counters,
    }


def _rounds(metrics: Any) -> list[list[int]]:
    found = metrics.to_dict() if metrics else {}
    steps = zip(found.get("per_step_drafted", []), found.get("per_step_accepted", []), strict=True)
    return [list(step) for step in steps]


if __name__ == "__main__":
    result = serve(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")

"""What users call the settings that lie recorded beside what was made with them: a recipe's key, or a flag.

A record's own keys are for machines: digests, and settings as the code has them. Whoever tells where two records part
gives the names of here to ``first_difference``.
"""

from __future__ import annotations

LONGEST = 64  # draft tokens a round that anybody may ask for
Names = dict[str, str]

# What is measured, by the field of its settings; the flags are those of spectrain evaluate and compare.
FLAGS: Names = {
    "k": "--k",
    "trees": "--tree",
    "verification": "--verification",
    "samplers": "--temperature",
    "conversations": "--conversations",
    "max_new_tokens": "--max-new-tokens",
    "seed": "--seed",
    "stop_at": "--stop-at",
}
LOAD_FLAGS: Names = {
    "batch": "--batch",
    "context": "--context",
    "groups": "--batch-groups",
    "request_rates": "--request-rate",
}

_TARGET: Names = {
    "model": "the target's weights (target.name, target.revision)",
    "prompt_ids": "the prompts as the target's chat template renders them (data.chat_template_kwargs)",
    "eos_ids": "the ids that end an answer, which the target's generation_config.json and tokenizer say",
}
ANSWERS: Names = {
    **_TARGET,
    "prompts": "the chats (data.train, data.heldout)",
    "config": "regenerate",
    "server": "regenerate.server",
    "dtype": "target.dtype",
}
FEATURES: Names = {
    **_TARGET,
    "rows": "rows (of data.train or data.heldout, data.max_length)",
    "tokenizer_size": "the number of tokens of target.name",
    "compute_dtype": "target.dtype",
    "store_dtype": "data.feature_dtype",
    "taps": "drafter.tap_layers",
    "teacher_top_k": "data.teacher_top_k",
}
ROWS: Names = {
    f"{side}.digest": f"the tokens of the rows (data.{side}, data.chat_template_kwargs, regenerate, target)"
    for side in ("train", "heldout")
}
RUN: Names = {
    "micro_batches_per_step": "micro-batches of a step, training.accumulation times the processes",
    "features": "what is trained on (data.train, data.max_length, data.features, data.feature_dtype, "
    "data.teacher_top_k, target)",
    "prompts": "the chats that on-policy rows begin with (data.train)",
    "warm_start.weights": "the weights of warm_start.bundle",
}
MEASURED: Names = {
    **_TARGET,
    **{f"config.{field}": f"{flag}, in a recipe evaluation.{field}" for field, flag in FLAGS.items()},
    "config": "evaluation",
    "traffic": "the chats (--traffic, in a recipe data.heldout)",
    "count": "how many chats (--conversations, in a recipe evaluation.conversations)",
    "dtype": "--dtype, in a recipe target.dtype",
    "threads": "torch's threads (OMP_NUM_THREADS)",
    "weights": "the target's weights",
    "bundle": "the bundle's weights",
    "baselines": "--baselines, in a recipe baselines",
    "measured_trees": "ranks.json of a bundle, measured_trees",
    # Batches of requests.
    **{f"load.{field}": f"{flag}, in a recipe evaluation.load.{field}" for field, flag in LOAD_FLAGS.items()},
    "load": "evaluation.load",
    "contenders": "what is drafted (--k, --tree, --verification), contenders",
    "prompts": "the chats (--traffic, in a recipe data.heldout)",
    "sampler": "the first of --temperature, in a recipe evaluation.samplers",
    "max_new_tokens": "--max-new-tokens, in a recipe evaluation.max_new_tokens",
    "seed": "--seed, in a recipe evaluation.seed",
}

"""How far a target that was trained with its drafter has moved from the one that training started from.

Both read the same answers, and their laws are compared at every position that an answer's token was drawn from. The
answers are the original's own, by greedy plain decoding of the measured prompts.

Shapes: B = 1 row, T tokens, N answer positions, C of them at once, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from spectrain.data.conversations import Conversation
from spectrain.decoding import generate_plain
from spectrain.errors import SpectrainError
from spectrain.evaluation.acceptance import prompt_ids
from spectrain.evaluation.begun import lines_by
from spectrain.evaluation.figures import STATISTICS
from spectrain.evaluation.leaves import EVERYTHING
from spectrain.evaluation.samples import kind_and_parents
from spectrain.evaluation.workbench import shown_name
from spectrain.exact.sampler import Sampler
from spectrain.intervals import ratio_interval
from spectrain.target import Target

ANSWERS = "greedy plain decoding of the original"
MEASURES = ("kl", "total_variation", "same_argmax")


def drift(name: str, original: Target, moved: Target, conversations: Sequence[Conversation], max_new_tokens: int,
          file: Path) -> dict[str, Any]:  # fmt: skip
    """The drift of the target that belongs to ``name``, for the document.

    Args:
        conversations: their prompts are answered by ``original``, with at most ``max_new_tokens`` tokens.
        file: a JSON line a conversation is kept here; what is there already for ``name`` is not measured again.

    Returns:
        ``original`` (what it derives from), ``answers`` (whose they are), ``max_new_tokens`` and ``by_kind``:
        "everything" and each kind, parents too → ``conversations``, ``tokens``, and with intervals ``kl`` (original ||
        moved, nats a token), ``total_variation`` and ``same_argmax`` (share of positions).

    Raises:
        SpectrainError: the targets have not the same number of ids.
    """
    if original.tokenizer_size != moved.tokenizer_size:
        raise SpectrainError(
            f"drift of {name}: its target has {moved.tokenizer_size} ids, the original {original.tokenizer_size}; "
            "expected as many"
        )
    lines = lines_by(file, lambda line: (line["drafter"], line["conversation"]))
    known = {conversation: line for (drafter, conversation), line in lines.items() if drafter == name}
    with file.open("a", encoding="utf-8") as out:
        for conversation in conversations:
            if conversation.id not in known:
                sums = _conversation(original, moved, prompt_ids(original, conversation, max_new_tokens),
                                     max_new_tokens)  # fmt: skip
                line = {"drafter": name, "conversation": conversation.id, "kind": conversation.kind, **sums}
                out.write(json.dumps(line) + "\n")
                out.flush()
                known[conversation.id] = line
    return {"original": shown_name(original.name), "answers": ANSWERS, "max_new_tokens": max_new_tokens,
            "by_kind": drift_table(known[conversation.id] for conversation in conversations)}  # fmt: skip


def _conversation(original: Target, moved: Target, prompt: list[int], max_new_tokens: int) -> dict[str, float]:
    for target in (original, moved):
        target.tap(())
    answer = generate_plain(original, prompt, sampler=Sampler(), max_new_tokens=max_new_tokens).tokens
    return law_distances(original, moved, prompt, answer)


@torch.inference_mode()
def law_distances(original: Target, moved: Target, prompt: Sequence[int], answer: Sequence[int],
                  chunk: int = 64) -> dict[str, float]:  # fmt: skip
    """Sums over the positions of ``answer``: ``kl``, ``total_variation``, ``same_argmax``, and ``tokens`` of them.

    The laws are the targets' own, at T = 1 over all ids; logits of ``chunk`` positions are held at once, in float64.
    """
    ids = [*prompt, *answer]
    states = []
    for target in (original, moved):
        ids_BT = torch.tensor([ids[:-1]], device=target.device)
        states.append(target.forward(ids_BT).hidden_BTH[0, len(prompt) - 1 :])
    heads = [target.head.first(target.tokenizer_size) for target in (original, moved)]
    sums = dict.fromkeys(MEASURES, 0.0)
    for start in range(0, len(answer), chunk):
        p_CV, q_CV = (
            head.logits(state_NH[start : start + chunk]).double().log_softmax(-1).to(original.device)
            for head, state_NH in zip(heads, states, strict=True)
        )
        sums["kl"] += max(float((p_CV.exp() * (p_CV - q_CV)).sum()), 0.0)  # but for rounding it is never less
        sums["total_variation"] += float((p_CV.exp() - q_CV.exp()).abs().sum() / 2)
        sums["same_argmax"] += float((p_CV.argmax(-1) == q_CV.argmax(-1)).sum())
    return {"tokens": len(answer), **sums}


def drift_table(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sums of conversations → means a token by kind, with intervals that resample whole conversations."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {EVERYTHING: []}
    for line in lines:
        for kind in (EVERYTHING, *kind_and_parents(line["kind"] or "unlabelled")):
            by_kind.setdefault(kind, []).append(line)
    return {
        kind: {
            "conversations": len(members),
            "tokens": sum(line["tokens"] for line in members),
            **{name: _mean([m[name] for m in members], [m["tokens"] for m in members]) for name in MEASURES},
        }
        for kind, members in [(EVERYTHING, by_kind.pop(EVERYTHING)), *sorted(by_kind.items())]
    }


def _mean(sums_C: Sequence[float], tokens_C: Sequence[int]) -> dict[str, float | None]:
    if len(sums_C) < 2:
        return {"value": sums_C[0] / tokens_C[0], "low": None, "high": None}
    return asdict(ratio_interval(sums_C, tokens_C, **STATISTICS))

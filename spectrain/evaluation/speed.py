"""Decoding speed beside transformers' own decoders: one target, the same prompts, greedy, contenders in turn.

Every contender answers every prompt in an order drawn anew for each, so that what else the machine does falls on all of
them alike. Rates are sums over sums; intervals resample prompts, the same ones on both sides of a ratio.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from spectrain.decoding import Generation, generate
from spectrain.drafters import Drafter
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.drafters.ngram import NgramConfig, NgramDrafter
from spectrain.evaluation.acceptance import output_difference
from spectrain.evaluation.wording import DASH, interval, number, percent
from spectrain.evaluation.workbench import Prompt, Stopwatch, table
from spectrain.exact.sampler import Sampler
from spectrain.intervals import Interval, ratio_of_ratios_interval
from spectrain.measures import pooled_rate
from spectrain.shapes import Chain, DynamicTree, Shape
from spectrain.target import Target

WARM_UP = 8  # tokens of every contender that are thrown away: first calls allocate and tune
PLAIN = "transformers plain"
GREEDY = Sampler()


@dataclass(frozen=True)
class Answer:
    """New tokens, how often the target ran for them, and what happened when the decoder tells."""

    tokens: list[int]
    forwards: int
    trace: Generation | None = None


@dataclass(frozen=True)
class Contender:
    """A decoder: ``run(prompt, max_new_tokens, parts)``, where ``parts`` asks for a clock on every part of a round.

    ``plain`` names the contender its speedup is over, ``peers`` those of transformers that do the same.
    """

    name: str
    run: Callable[[Sequence[int], int, bool], Answer]
    plain: str
    peers: tuple[str, ...] = ()
    drafter: Drafter | None = None


def contenders(target: Target, k: int, draft: LanguageModelDrafter, trained: Drafter | None = None,
               tree: DynamicTree | None = None) -> list[Contender]:  # fmt: skip
    """All decoders at draft length ``k``. ``draft`` is a language-model drafter, whose model also assists transformers;
    ``trained`` one of a bundle, as a chain and as ``tree``."""
    constant = {"num_assistant_tokens": k, "num_assistant_tokens_schedule": "constant"}
    assisted, usual = f"transformers assisted k={k}", "transformers assisted, defaults"
    lookup = f"transformers lookup k={k}"
    found = [
        _transformers(PLAIN, target),
        _spectrain("plain", target, None, None, PLAIN),
        # Without a threshold its model drafts as many tokens as ours; with the default it stops where it is unsure.
        _transformers(assisted, target, draft.model, {**constant, "assistant_confidence_threshold": 0.0}),
        _transformers(usual, target, draft.model, {}),
        _spectrain(f"small draft k={k}", target, draft, Chain(k), assisted, usual),
        _transformers(lookup, target, prompt_lookup_num_tokens=k),
        _spectrain(f"ngram k={k}", target, NgramDrafter(NgramConfig()), Chain(k), lookup),
        # transformers looks for two tokens at most.
        _spectrain(f"ngram of 2 k={k}", target, NgramDrafter(NgramConfig(longest=2)), Chain(k), lookup),
    ]
    if trained is not None:
        family = trained.config.type
        found.append(_spectrain(f"{family} k={k}", target, trained, Chain(k)))
        if trained.trees and tree is not None:
            found.append(_spectrain(f"{family} {tree.describe()}", target, trained, tree))
    return found


def small_draft(target: Target) -> LanguageModelDrafter:
    """A draft model of the target's own first, middle and last layer, embedding and head. Nothing was trained."""
    counts_V = torch.zeros(target.vocab_size, dtype=torch.long)
    return LanguageModelDrafter.build(LanguageModelConfig(), target, counts_V).eval()


def widest_tree(depth: int, nodes: int) -> DynamicTree:
    """The dynamic tree of this depth with the usual width, and as many nodes as were asked for or as it can have."""
    width = DynamicTree.top_k
    return DynamicTree(depth, width, min(nodes, width + (depth - 1) * width**2))


def _spectrain(name: str, target: Target, drafter: Drafter | None, shape: Shape | None, *peers: str) -> Contender:
    def run(prompt: Sequence[int], max_new_tokens: int, parts: bool) -> Answer:
        settings: dict[str, Any] = {"sampler": GREEDY, "max_new_tokens": max_new_tokens, "timed": parts}
        trace = generate(target, drafter, prompt, shape=shape, **settings)
        return Answer(trace.tokens, 1 + len(trace.rounds), trace)

    return Contender(f"spectrain {name}", run, "spectrain plain", peers, drafter)


def _transformers(name: str, target: Target, assistant: PreTrainedModel | None = None,
                  assisting: dict[str, Any] | None = None, **settings: Any) -> Contender:  # fmt: skip
    """``assisting`` goes to the assistant's own generation config: as arguments of ``generate`` they are ignored."""
    eos = list(target.eos_ids)
    ending = {"eos_token_id": eos, "pad_token_id": eos[0]} if eos else {}

    def run(prompt: Sequence[int], max_new_tokens: int, parts: bool) -> Answer:
        target.tap(())
        if assistant is not None:
            assistant.generation_config = GenerationConfig(**(assisting or {}))
        # The model's own generation config fills what is None: nothing that would change the greedy law may.
        config = GenerationConfig(do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, repetition_penalty=1.0,
                                  no_repeat_ngram_size=0, **ending, **settings)  # fmt: skip
        ids = torch.tensor([list(prompt)], device=target.device)
        with _counted(target.model) as calls:
            output = target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config,
                                           assistant_model=assistant)  # fmt: skip
        return Answer(output[0, len(prompt) :].tolist(), len(calls))

    return Contender(name, run, PLAIN)


@contextmanager
def _counted(model: nn.Module) -> Any:
    """A list that grows by one with every forward."""
    calls: list[None] = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        hook.remove()


def measure(target: Target, entries: Sequence[Contender], prompts: Sequence[Prompt], max_new_tokens: int, seed: int, *,
            progress: bool = True) -> list[dict[str, Any]]:  # fmt: skip
    """One sample for every prompt and contender: tokens, seconds of the whole call, and how it differs from plain."""
    for entry in entries:
        entry.run(prompts[0].ids, min(WARM_UP, max_new_tokens), False)
    samples = []
    with tqdm(total=len(prompts) * len(entries), desc="decode", unit="answer", disable=not progress) as bar:
        for prompt in prompts:
            order = list(entries)
            random.Random(f"{seed}/{prompt.id}").shuffle(order)
            found = {}
            for entry in order:
                bar.set_postfix_str(entry.name)
                found[entry.name] = _sample(target.device, entry, prompt, max_new_tokens)
                bar.update()
            plain = found[PLAIN][0].tokens
            for entry in entries:
                answer, sample = found[entry.name]
                samples.append(sample | {"difference": _difference(target, prompt, answer.tokens, plain)})
    return samples


def _difference(target: Target, prompt: Prompt, tokens: list[int], plain: list[int]) -> dict[str, Any] | None:
    """Where an output leaves transformers' plain one; ``padding`` says that the latter there has an id that no
    tokenizer knows (a row of the head that pads it), which ours never gives."""
    if tokens == plain:
        return None
    found = output_difference(target, prompt.ids, tokens, plain)
    padding = found["position"] < len(plain) and plain[found["position"]] >= target.tokenizer_size
    return {**found, "logit_gap": None if padding else found["logit_gap"], "padding": padding}


def _sample(device: torch.device, entry: Contender, prompt: Prompt,
            max_new_tokens: int) -> tuple[Answer, dict[str, Any]]:  # fmt: skip
    with Stopwatch(device) as watch:
        answer = entry.run(prompt.ids, max_new_tokens, False)
    sample = {
        "prompt": prompt.id,
        "kind": prompt.kind,
        "contender": entry.name,
        "tokens": len(answer.tokens),
        "seconds": watch.seconds,
        "forwards": answer.forwards,
    }
    return answer, sample | _parts(device, entry, prompt, max_new_tokens, answer, watch)


def _parts(device: torch.device, entry: Contender, prompt: Prompt, max_new_tokens: int, answer: Answer,
           watch: Stopwatch) -> dict[str, Any]:  # fmt: skip
    """Rounds of an answer of ours, and its seconds in and outside the models' forwards.

    A clock on every part holds an accelerator up, so there the parts come from another run than the speed.
    """
    if answer.trace is None:
        return {"rounds": None, "parts": None}
    if device.type != "cpu":
        with Stopwatch(device) as watch:
            answer = entry.run(prompt.ids, max_new_tokens, True)
    trace = answer.trace
    assert trace is not None
    # What a drafter without weights does is no forward.
    inside = trace.prefill_s + trace.verify_s + (trace.draft_s if isinstance(entry.drafter, nn.Module) else 0.0)
    return {
        "rounds": [[r.proposed, r.accepted, r.committed, r.clipped] for r in trace.rounds],
        "parts": {"total_s": watch.seconds, "outside_s": watch.seconds - inside, "draft_s": trace.draft_s,
                  "verify_s": trace.verify_s, "prefill_s": trace.prefill_s},
    }  # fmt: skip


def summarise(samples: Sequence[dict[str, Any]], entries: Sequence[Contender]) -> dict[str, Any]:
    """``rows``, one a contender, and ``comparisons`` of ours with its peers in transformers."""
    by_name = {entry.name: [s for s in samples if s["contender"] == entry.name] for entry in entries}

    def ratio(name: str, base: str) -> dict[str, float]:
        return asdict(_faster(by_name[name], by_name[base]))

    rows = []
    for entry in entries:
        own = by_name[entry.name]
        speedup = ratio(entry.name, entry.plain) if entry.name != entry.plain else None
        rows.append({"contender": entry.name, **_numbers(own), "speedup": speedup})
    comparisons = [
        {"spectrain": entry.name, "transformers": peer, "ratio": ratio(entry.name, peer)}
        for entry in entries
        for peer in entry.peers
    ]
    return {"rows": rows, "comparisons": comparisons}


def _faster(own: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> Interval:
    sums = [[sample[part] for sample in side] for side in (own, base) for part in ("tokens", "seconds")]
    return ratio_of_ratios_interval(*sums)


def _numbers(own: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rounds = [r for sample in own for r in sample["rounds"] or ()]
    parts = [sample["parts"] for sample in own if sample["parts"]]
    # transformers' first forward reads the prompt and verifies at once; ours reads it first, apart from the rounds.
    tokens, times = sum(r[2] for r in rounds), len(rounds)
    if not rounds:
        tokens, times = sum(s["tokens"] for s in own), sum(s["forwards"] for s in own)
    return {
        "tokens_per_second": pooled_rate([s["tokens"] for s in own], [s["seconds"] for s in own], "tokens/s"),
        "tokens_per_round": tokens / times,
        "overhead": sum(p["outside_s"] for p in parts) / sum(p["total_s"] for p in parts) if parts else None,
        "prompts": len(own),
        "identical": sum(s["difference"] is None for s in own),
        "differences": [{"prompt": s["prompt"], **s["difference"]} for s in own if s["difference"]],
    }


def render(document: dict[str, Any]) -> str:
    """The document as two Markdown tables and, where outputs differ, a list."""
    rows, comparisons = document["rows"], document["comparisons"]
    heads = ("decoder", "tokens/s", "over plain (95%)", "τ", "overhead", "identical")
    speeds = table(heads, [[
        row["contender"], number(row["tokens_per_second"], 1), interval(row["speedup"]) if row["speedup"] else DASH,
        number(row["tokens_per_round"]), percent(row["overhead"], 1),
        f"{row['identical']}/{row['prompts']}",
    ] for row in rows])  # fmt: skip
    ratios = table(("spectrain ÷ transformers", "ratio of tokens/s (95%)"), [
        [f"{c['spectrain'].removeprefix('spectrain ')} ÷ {c['transformers'].removeprefix('transformers ')}",
         interval(c["ratio"])] for c in comparisons
    ])  # fmt: skip
    differing = [
        f"differs: {row['contender']}, {d['prompt']}, token {d['position']}: "
        + ("transformers gives an id of the head's padding" if d["padding"] else f"logit gap {d['logit_gap']}")
        for row in rows
        for d in row["differences"]
    ]
    return "\n".join([speeds, "", ratios, *differing])

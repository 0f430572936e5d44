"""A drafter's ranks measured on chats, and the tree that they make, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from spectrain.attention import context
from spectrain.data.batches import live_batch
from spectrain.data.conversations import Conversation, EncodedRow, encode_all
from spectrain.data.dropped import Dropped
from spectrain.drafters import TrainableDrafter
from spectrain.drafters.ranks import accuracy_at, measure_ranks, measured_tree
from spectrain.drafters.tree_search import expected_accepted
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.target import FeatureBatch, Target

RANKED_DEPTHS = 5


def chat_ranks(target: Target, drafter: TrainableDrafter, conversations: Sequence[Conversation],
               samplers: Sequence[Sampler], dropped: Dropped | None = None, *,
               progress: bool = True) -> dict[str, Any]:  # fmt: skip
    """The ranks of a drafter (see drafters/ranks.py) on the answers that the chats hold.

    ``dropped``: the rows that were left out so far, where those that the template refuses may be, too.
    SpectrainError for a drafter that fills no trees, a chat without an answer, or answers too short to draft.
    """
    if not drafter.trees:
        raise SpectrainError(f"{drafter.config.type} proposes chains, no trees; there is nothing to measure for it")
    without = next((c.id for c in conversations if all(m.role != "assistant" for m in c.messages)), None)
    if without is not None:
        raise SpectrainError(
            f"conversation {without!r} has no answer to measure the drafter's tokens on; give chats with the target's "
            "answers, such as the run's data/train.jsonl"
        )
    rows, unusable = encode_all(conversations, target.tokenizer, context(target.config), drop_bad=dropped is not None)
    if unusable["too_long"]:
        print(f"note: {unusable['too_long']} chats longer than the target's context are left out", flush=True)
    left_out = unusable if dropped is None else dropped + unusable
    if left_out.listing():
        print(f"left out: {left_out}\n{left_out.listing()}", flush=True)
    batches = _batches(target, drafter, rows, progress)
    ranks = measure_ranks(drafter, batches, target.head, samplers, depths=RANKED_DEPTHS)
    if not ranks["positions"][0]:
        raise SpectrainError(
            "no answer is long enough for the first draft depth, so there is nothing to measure the drafter's tokens "
            "on; give longer answers"
        )
    return ranks


def _batches(target: Target, drafter: TrainableDrafter, rows: Sequence[EncodedRow],
             progress: bool) -> Iterator[FeatureBatch]:  # fmt: skip
    target.tap(drafter.tap_layers)
    for row in tqdm(rows, desc="ranks", unit="row", disable=not progress):
        yield live_batch(target, [row])


def render_ranks(ranks: dict[str, Any], samplers: Sequence[Sampler], nodes: int) -> str:
    """For every sampler a table, percent by depth and rank, and the best tree of so many nodes."""
    return "\n\n".join(_table(ranks, sampler, nodes) for sampler in samplers)


def _table(ranks: dict[str, Any], sampler: Sampler, nodes: int) -> str:
    accuracy = accuracy_at(ranks, sampler)
    tree = measured_tree(ranks, sampler, nodes)
    head = [f"{sampler.describe()}: how often the target's token has this rank, %"]
    head.append(f"{'depth':>5} {'positions':>9}" + "".join(f"{f'#{rank}':>7}" for rank in range(len(accuracy[0]))))
    rows = [
        f"{depth:>5} {count:>9}" + "".join(f"{100 * value:>7.1f}" for value in values)
        for depth, (count, values) in enumerate(zip(ranks["positions"], accuracy, strict=True), start=1)
    ]
    paths = ";".join(",".join(map(str, path)) for path in tree.paths)
    accepted = expected_accepted(tree, accuracy)
    found = f"best tree of {tree.nodes} nodes, depth {tree.depth}: {accepted:.2f} draft tokens accepted a round, if"
    lines = [*head, *rows, f"{found} depths succeed independently", f"--tree '{tree.children}:{paths}'"]
    if tree.nodes < nodes:
        lines.append(
            f"it has fewer than the {nodes} nodes asked for: of {len(accuracy)} depths and {len(accuracy[0])} ranks "
            "that were measured, no other path was ever the target's"
        )
    return "\n".join(lines)

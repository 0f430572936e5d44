"""The audit of a recipe's chats: what would be trained on, by the target's tokenizer alone, before anything is made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrain.attention import context
from spectrain.config import Recipe, load_recipe
from spectrain.data.audit import Side, describe
from spectrain.data.audit_table import not_answered, table
from spectrain.data.batches import answer_counts
from spectrain.data.conversations import encode_usable, load_conversations
from spectrain.data.dropped import ALWAYS, Dropped
from spectrain.data.preview import chosen, colours, render_row
from spectrain.data.split import LeakReport, find_leaks
from spectrain.data.template_variables import choose_template_kwargs
from spectrain.drafters.vocabulary import draft_vocabulary
from spectrain.files import atomic_file, write_json
from spectrain.foresight import few_heldout, other_sampler
from spectrain.identity import tokenizer_size
from spectrain.preflight import drafter_faults, load_tokenizer, on_paper
from spectrain.traffic import read_traffic, usable


def audit(options: argparse.Namespace) -> bool:
    """Count what a recipe would train on and show some of it; whether ``prepare`` would take it."""
    found = audit_recipe(load_recipe(options.recipe, options.overrides))
    colour = colours(sys.stdout)
    print(table(found.document))
    print(_heading(found.document, "in green" if colour else "in [[ ]]"))
    for row, why in chosen(found.sides["train"].rows, found.sides["train"].chats):
        print(render_row(row, found.tokenizer, colour, why))
    print(f"\nnumbers: {found.folder / 'audit.json'}, {found.folder / 'audit.md'}")
    return not found.stops


def _heading(document: Mapping[str, Any], how: str) -> str:
    if not_answered(document):
        return (
            f"The chats of the files, their own answers {how}: the last makes way for the target's, which alone is "
            "trained on.\n"
        )
    return f"What is trained on, supervised tokens {how}:\n"


@dataclass(frozen=True)
class Audit:
    """``document`` holds numbers, ids and places; ``sides`` the rows, for showing some. ``stops`` says why
    ``prepare`` would refuse this traffic, if it would."""

    document: dict[str, Any]
    sides: dict[str, Side]
    tokenizer: Any
    stops: list[str]
    folder: Path


def audit_recipe(recipe: Recipe) -> Audit:
    """Count what the recipe would train on; ``data/audit.json`` and ``audit.md`` in its prepared folder.

    Every bad row is counted, also where ``prepare`` would stop at the first. Answers by the target are counted where
    they are there already; else those in the files.
    """
    tokenizer, config = load_tokenizer(recipe.target)
    limit = context(config.get_text_config(decoder=True))
    choose_template_kwargs(tokenizer, recipe.data.chat_template_kwargs)
    data, folder = recipe.data, recipe.prepared_data
    traffic = read_traffic(data, drop_bad=True, answers=recipe.regenerate is None)
    leaks = find_leaks(traffic.train, traffic.heldout)
    traffic = usable(recipe, traffic, tokenizer, limit)
    sides = {}
    for side, chats in traffic.sides.items():
        answers = folder / f"{side}.jsonl"
        made = recipe.regenerate is not None and answers.is_file()
        chats = load_conversations(answers) if made else chats
        rows, dropped = encode_usable(chats, tokenizer, data.max_length, drop_bad=True)
        if recipe.regenerate is not None and not made:
            # The file's last answers make way for the target's: what is wrong with them is no matter.
            dropped = Dropped()
        sides[side] = Side(chats, rows, traffic.dropped[side] + dropped, made)
    stops = [*drafter_faults(recipe, on_paper(recipe, config, tokenizer)), *_stops(recipe, sides, leaks)]
    notes = [*few_heldout(recipe, traffic.train, traffic.heldout), *other_sampler(recipe)]
    document = describe(sides, tokenizer, data.max_length, leaks, _draft_ids(recipe, sides["train"], tokenizer))
    document |= {"target": recipe.target.name, "bad_rows": data.bad_rows, "split": traffic.split, "stops": stops,
                 "notes": notes, "answers_by_target": recipe.regenerate is not None}  # fmt: skip
    write_json(folder / "audit.json", document)
    with atomic_file(folder / "audit.md") as path:
        path.write_text(table(document), encoding="utf-8")
    return Audit(document, sides, tokenizer, stops, folder)


def _stops(recipe: Recipe, sides: Mapping[str, Side], leaks: LeakReport) -> list[str]:
    data, found = recipe.data, []
    found += [
        f"{name}: every conversation is left out: {side.dropped}" for name, side in sides.items() if not side.chats
    ]
    crowded = sum(side.dropped["no_room"] for side in sides.values())
    if crowded and data.bad_rows == "error":
        asked = "" if recipe.regenerate is None else f"regenerate.max_new_tokens {recipe.regenerate.max_new_tokens}, "
        found.append(
            f"{crowded} prompts leave no room in the target's context for their answer ({asked}"
            f"evaluation.max_new_tokens {recipe.evaluation.max_new_tokens}); lower what is asked for"
        )
    if data.bad_rows == "error":
        harmless = (*ALWAYS, "duplicate", "no_room")
        bad = sum(side.dropped.total - sum(side.dropped[reason] for reason in harmless) for side in sides.values())
        found += [f"{bad} rows cannot be used (data.bad_rows=drop leaves them out)"] if bad else []
    if leaks.leaks:
        found.append(f"{len(leaks.leaks)} held-out conversations are also in training")
    if data.near_duplicates == "error" and leaks.near_duplicates:
        found.append(str(leaks))
    return found


def _draft_ids(recipe: Recipe, train: Side, tokenizer: Any) -> frozenset[int] | None:
    """The ids that a drafter with a vocabulary of its own could name; None where it has the target's."""
    _, columns = recipe.drafter.limits
    if columns is None or not train.rows:
        return None
    size = tokenizer_size(tokenizer)
    return frozenset(draft_vocabulary(answer_counts(train.rows, size), columns, size).tolist())

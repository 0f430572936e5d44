"""The chats of a recipe: read, split and checked in one way, whoever asks; and the audit of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from spectrain.attention import context
from spectrain.config import DataConfig, Recipe, TargetConfig
from spectrain.data.audit import Side, describe
from spectrain.data.audit_table import table
from spectrain.data.conversations import Conversation, encode_usable, load_conversations, render_prompt
from spectrain.data.dropped import ALWAYS, Dropped, RowError, leaving_out
from spectrain.data.split import LeakReport, check_leaks, find_leaks, split_conversations, without_duplicates
from spectrain.data.template import set_template_kwargs
from spectrain.drafters.vocabulary import draft_vocabulary
from spectrain.errors import SpectrainError
from spectrain.files import atomic_file, write_json

SIDES = ("train", "heldout")


@dataclass(frozen=True)
class Traffic:
    """Both sides of the split, and what was left out of each. ``split`` says how it was drawn, where it was."""

    train: list[Conversation]
    heldout: list[Conversation]
    dropped: dict[str, Dropped]
    split: str | None = None

    @property
    def sides(self) -> dict[str, list[Conversation]]:
        return {"train": self.train, "heldout": self.heldout}

    def check_not_empty(self) -> None:
        for side, chats in self.sides.items():
            if not chats:
                dropped = self.dropped[side]
                raise SpectrainError(f"{side}: every conversation is left out: {dropped}\n{dropped.listing()}")


@contextlib.contextmanager
def offering_to_drop() -> Iterator[None]:
    """An error of one row says that such rows may be left out."""
    try:
        yield
    except RowError as error:
        raise SpectrainError(f"{error} (or leave such rows out, counted: data.bad_rows=drop)") from error


def read_traffic(data: DataConfig, *, drop_bad: bool, answers: bool) -> Traffic:
    """The chats of both sides. ``answers``: whether the files' own count where duplicates are dropped."""
    dropped = {side: Dropped() for side in SIDES}
    found = {side: dropped[side] if drop_bad else None for side in SIDES}
    with offering_to_drop():
        train = load_conversations(list(data.train), found["train"])
        heldout = load_conversations(list(data.heldout), found["heldout"]) if data.heldout else None
    split = None
    if heldout is None:
        parts = split_conversations(train, heldout_fraction=data.heldout_fraction, seed=data.seed)
        train, heldout = list(parts.train), list(parts.heldout)
        split = f"heldout_fraction {data.heldout_fraction:g}, seed {data.seed}"
    if data.duplicates == "drop":
        train = without_duplicates(train, dropped["train"], answers=answers)
    return Traffic(train, heldout, dropped, split)


def check_traffic(data: DataConfig, traffic: Traffic) -> LeakReport:
    """Refuse leaks, and near-duplicates where the recipe says so."""
    return check_leaks(traffic.train, traffic.heldout, refuse_near=data.near_duplicates == "error")


def usable(recipe: Recipe, traffic: Traffic, tokenizer: Any, limit: int | None) -> Traffic:
    """Without the chats whose prompt the template refuses, or leaves no room for an answer; they are counted.

    ``limit`` is the target's context in tokens, if it has one. What is asked of the target is left out at once
    where its row would be too long.
    """
    asked = recipe.regenerate.max_new_tokens if recipe.regenerate else 0
    budgets = {"train": asked, "heldout": max(asked, recipe.evaluation.max_new_tokens)}
    longest = recipe.data.max_length - 1 if asked else None
    sides = {}
    for side, chats in traffic.sides.items():
        room = limit - budgets[side] if limit is not None and budgets[side] else None
        lengths = longest if side == "train" else None
        sides[side] = _renderable(chats, tokenizer, room, lengths, traffic.dropped[side])
    return Traffic(**sides, dropped=traffic.dropped, split=traffic.split)


def _renderable(chats: Sequence[Conversation], tokenizer: Any, room: int | None, longest: int | None,
                dropped: Dropped) -> list[Conversation]:  # fmt: skip
    kept = []
    for chat in chats:
        with leaving_out(dropped, chat.place):
            length = len(render_prompt(chat, tokenizer))
            for reason, most in (("too_long", longest), ("no_room", room)):
                if most is not None and length > most:
                    raise RowError(reason, f"{chat.place}: a prompt of {length} tokens, {most} at most")
            kept.append(chat)
    return kept


# --- audit ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Audit:
    """``document`` holds numbers, ids and places; ``sides`` the rows, for showing some. ``stops`` says why
    ``prepare`` would refuse this traffic, if it would."""

    document: dict[str, Any]
    sides: dict[str, Side]
    tokenizer: Any
    stops: list[str]
    folder: Path


def load_tokenizer(config: TargetConfig) -> tuple[Any, int | None]:
    """The target's tokenizer and its context in tokens, from its tokenizer files and config.json: no weights."""
    try:
        where: dict[str, Any] = {"revision": config.revision, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(config.name, **where)
        settings = AutoConfig.from_pretrained(config.name, **where).get_text_config(decoder=True)
    except Exception as error:  # each library that reads a part of the folder raises its own kinds
        raise SpectrainError(
            f"target {config.name!r}: its tokenizer and config.json do not load: {type(error).__name__}: {error}"
        ) from error
    return tokenizer, context(settings)


def audit_recipe(recipe: Recipe) -> Audit:
    """Count what the recipe would train on; ``data/audit.json`` and ``audit.md`` in its prepared folder.

    Every bad row is counted, also where ``prepare`` would stop at the first. Answers by the target are counted where
    they are there already; else those in the files.
    """
    tokenizer, limit = load_tokenizer(recipe.target)
    set_template_kwargs(tokenizer, recipe.data.chat_template_kwargs)
    data, folder = recipe.data, Path(recipe.prepared or recipe.output) / "data"
    traffic = read_traffic(data, drop_bad=True, answers=recipe.regenerate is None)
    leaks = find_leaks(traffic.train, traffic.heldout)
    traffic = usable(recipe, traffic, tokenizer, limit)
    sides = {}
    for side, chats in traffic.sides.items():
        answers = folder / f"{side}.jsonl"
        made = recipe.regenerate is not None and answers.is_file()
        chats = load_conversations(answers) if made else chats
        rows, dropped = encode_usable(chats, tokenizer, data.max_length, drop_bad=True)
        sides[side] = Side(chats, rows, traffic.dropped[side] + dropped, made)
    stops = _stops(data, sides, leaks)
    document = describe(sides, tokenizer, data.max_length, leaks, _draft_ids(recipe, sides["train"], tokenizer))
    document |= {"target": recipe.target.name, "bad_rows": data.bad_rows, "split": traffic.split, "stops": stops,
                 "answers_by_target": recipe.regenerate is not None}  # fmt: skip
    write_json(folder / "audit.json", document)
    with atomic_file(folder / "audit.md") as path:
        path.write_text(table(document), encoding="utf-8")
    return Audit(document, sides, tokenizer, stops, folder)


def _stops(data: DataConfig, sides: Mapping[str, Side], leaks: LeakReport) -> list[str]:
    found = []
    if data.bad_rows == "error":
        harmless = (*ALWAYS, "duplicate")
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
    size = max(tokenizer.get_vocab().values()) + 1
    counts_V = torch.zeros(size, dtype=torch.long)
    for row in train.rows:
        answers = torch.tensor(row.ids)[torch.tensor(row.mask, dtype=torch.bool)]
        counts_V += torch.bincount(answers, minlength=size)
    return frozenset(draft_vocabulary(counts_V, columns, size).tolist())

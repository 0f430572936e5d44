"""The chats of a recipe: read, split and checked in one way, whoever asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spectrain.config import DataConfig, Recipe
from spectrain.data.conversations import Conversation, load_conversations, render_prompt
from spectrain.data.dropped import BadRowsError, Dropped, RowError, leaving_out
from spectrain.data.split import LeakReport, check_leaks, split_conversations, without_duplicates
from spectrain.errors import SpectrainError

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
def offering_to_drop(how: str = "data.bad_rows=drop") -> Iterator[None]:
    """An error of one row says that such rows may be left out, and how."""
    try:
        yield
    except RowError as error:
        raise BadRowsError(error, how) from error


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
        sides[side] = renderable(chats, tokenizer, room, lengths, traffic.dropped[side])
    return Traffic(**sides, dropped=traffic.dropped, split=traffic.split)


def renderable(chats: Sequence[Conversation], tokenizer: Any, room: int | None, longest: int | None,
               dropped: Dropped) -> list[Conversation]:  # fmt: skip
    """The chats whose prompt the template renders in at most ``room`` and ``longest`` tokens, where there are such
    limits; the others are counted in ``dropped``."""
    kept = []
    for chat in chats:
        with leaving_out(dropped, chat.place):
            length = len(render_prompt(chat, tokenizer))
            for reason, most in (("too_long", longest), ("no_room", room)):
                if most is not None and length > most:
                    raise RowError(reason, f"{chat.place}: a prompt of {length} tokens, {most} at most")
            kept.append(chat)
    return kept

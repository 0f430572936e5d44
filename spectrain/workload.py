"""How much a recipe has to do: how many rows and tokens it trains on and holds out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from spectrain.attention import context
from spectrain.config import Recipe
from spectrain.data.conversations import Conversation, encode_all, render_prompt
from spectrain.data.template_variables import choose_template_kwargs
from spectrain.errors import SpectrainError
from spectrain.traffic import Traffic, offering_to_drop, read_traffic, usable

COUNTS_FILE = "counts.json"  # of a prepared run
ROW_TOKENS = 1024


@dataclass(frozen=True)
class Side:
    """Rows of one side of the split; ``tokens`` of all, ``answer`` of them answer tokens."""

    rows: int
    tokens: int
    answer: int

    @property
    def mean(self) -> tuple[int, int]:
        """Tokens of a mean row, and answer tokens among them: whole numbers, 1 or more."""
        tokens = max(2, round(self.tokens / self.rows))
        return tokens, min(max(1, round(self.answer / self.rows)), tokens - 1)


@dataclass(frozen=True)
class Workload:
    """What is trained on and what is held out; ``source`` says where the counts come from. ``lengths`` are the tokens
    of every training row, in order, where counting them gave them."""

    train: Side
    heldout: Side
    source: str
    lengths: tuple[int, ...] | None = field(default=None, repr=False)

    def describe(self) -> dict[str, Any]:
        return {"train": asdict(self.train), "heldout": asdict(self.heldout), "source": self.source}


def workload(recipe: Recipe, *, tokens: int | None = None, answer_share: float | None = None,
             row_tokens: int | None = None) -> Workload:  # fmt: skip
    """Token counts: as given; else of a prepared run; else of the recipe's files by the target's tokenizer."""
    if tokens is not None:
        return _given(recipe, tokens, answer_share, row_tokens)
    if answer_share is not None or row_tokens is not None:
        raise SpectrainError("--answer-share and --row-tokens describe what --tokens counts; give --tokens as well")
    counts = recipe.prepared_data / COUNTS_FILE
    if counts.is_file():
        found = json.loads(counts.read_text(encoding="utf-8"))
        sides = [Side(found[s]["rows"], found[s]["tokens"], found[s]["answer_tokens"]) for s in ("train", "heldout")]
        return Workload(sides[0], sides[1], f"counted in a prepared run ({counts})")
    return _counted(recipe)


def _given(recipe: Recipe, tokens: int, share: float | None, row_tokens: int | None) -> Workload:
    if share is None:
        raise SpectrainError("--tokens needs --answer-share: which share of them are answers, for instance 0.4")
    if tokens < 2 or not 0 < share <= 1:
        raise SpectrainError(
            f"--tokens {tokens} --answer-share {share}: expected 2 or more, and a share above 0 up to 1"
        )
    length = row_tokens or min(ROW_TOKENS, recipe.data.max_length)
    if not 2 <= length <= recipe.data.max_length:
        raise SpectrainError(f"--row-tokens {length}: expected from 2 to data.max_length, {recipe.data.max_length}")
    held = round(tokens * recipe.data.heldout_fraction)
    sides = [Side(max(1, round(n / length)), n, round(n * share)) for n in (tokens, max(2, held))]
    return Workload(
        sides[0],
        sides[1],
        f"as given, in rows of {length} tokens; held out: {recipe.data.heldout_fraction:.0%} of them",
    )


def _counted(recipe: Recipe) -> Workload:
    files = (*recipe.data.train, *recipe.data.heldout)
    missing = [name for name in files if not Path(name).is_file()]
    tokenizer = None if missing else local_tokenizer(recipe)
    if tokenizer is None:
        what = (
            f"{missing[0]} is not here"
            if missing
            else f"the tokenizer of {recipe.target.name!r} is not in a folder here"
        )
        raise SpectrainError(
            f"the tokens of the traffic cannot be counted: {what}; say how many there are with --tokens N and which "
            "share are answers with --answer-share, for instance --tokens 50000000 --answer-share 0.5"
        )
    with offering_to_drop():
        counted = [_lengths(recipe, chats, tokenizer) for chats in usable_traffic(recipe, tokenizer).sides.values()]
    train, heldout = (Side(len(rows), sum(t for t, _ in rows), sum(a for _, a in rows)) for rows in counted)
    answers = "its answers as long as regenerate.max_new_tokens allows" if recipe.regenerate else "with their answers"
    known = tuple(tokens for tokens, _ in counted[0]) if recipe.regenerate is None else None
    return Workload(train, heldout, f"counted in the recipe's files, {answers}", known)


def local_tokenizer(recipe: Recipe) -> Any | None:
    """The target's tokenizer with the recipe's template settings; None where it does not lie in a folder here."""
    folder = Path(recipe.target.name)
    if not (folder / "tokenizer_config.json").is_file():
        return None
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    choose_template_kwargs(tokenizer, recipe.data.chat_template_kwargs)
    return tokenizer


def bad_rows(recipe: Recipe) -> str:
    """Where the rows lie that preparing would leave out if it may: reasons and places, on one line."""
    data = recipe.data.model_copy(update={"bad_rows": "drop"})
    dropped = usable_traffic(recipe.model_copy(update={"data": data}), local_tokenizer(recipe)).dropped
    return "; ".join(line.strip() for side in dropped.values() for line in side.listing().splitlines())


def usable_traffic(recipe: Recipe, tokenizer: Any) -> Traffic:
    """The recipe's chats as preparing them would leave them; the target's config.json counts where it lies here."""
    drop_bad, folder = recipe.data.bad_rows == "drop", Path(recipe.target.name)
    traffic = read_traffic(recipe.data, drop_bad=drop_bad, answers=recipe.regenerate is None)
    if not drop_bad:
        return traffic
    limit = None
    if (folder / "config.json").is_file():
        limit = context(AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config(decoder=True))
    return usable(recipe, traffic, tokenizer, limit)


def _lengths(recipe: Recipe, chats: Sequence[Conversation], tokenizer: Any) -> list[tuple[int, int]]:
    """Tokens of every row, and answer tokens among them: as long as they may be where they are yet to be written."""
    limit, regenerate = recipe.data.max_length, recipe.regenerate
    if regenerate is None:
        rows, _ = encode_all(chats, tokenizer, limit, drop_bad=recipe.data.bad_rows == "drop")
        return [(len(row.ids), sum(row.mask)) for row in rows]
    prompts = [len(render_prompt(chat, tokenizer)) for chat in chats]
    answers = [min(regenerate.max_new_tokens, limit - prompt) for prompt in prompts]
    lengths = [(prompt + answer, answer) for prompt, answer in zip(prompts, answers, strict=True) if answer > 0]
    if not lengths:
        raise SpectrainError(f"every prompt is longer than data.max_length, {limit} tokens; raise it")
    return lengths

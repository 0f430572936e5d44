"""Training rows written while the drafter learns, so that it is trained on prefixes as it will meet them.

Each of these rows is a prompt of the training side and sampled text; its law is the target's on that very prefix,
computed live. The text is one of two kinds:

- ``draft``: the drafter's own. It proposes a chain, the target reads it, and all of it is kept, unverified. Of a small
  draft this is a sample of its own law (2306.13649; one of the data sources of 2310.08461). It teaches the way back
  from the drafter's own mistakes.
- ``rounds``: what draft and verification with this drafter leave. That is the target's own law, sampled anew.

What a generation wrote is kept beside the checkpoints: an interrupted run goes on with the same rows.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from accelerate.utils import gather_object
from pydantic import BaseModel, ConfigDict, Field, model_validator

from spectrain.attention import context
from spectrain.data.batches import live_batch, plan_epoch
from spectrain.data.conversations import Conversation, EncodedRow, render_prompt
from spectrain.decoding import generate_batch
from spectrain.decoding.requests import stream_seed
from spectrain.decoding.unverified import draft_text
from spectrain.drafters.base import TrainableDrafter
from spectrain.drafters.scoring import evaluating
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.files import write_json
from spectrain.shapes import Chain, check_shape
from spectrain.target import FeatureBatch, Target


class OnPolicyConfig(BaseModel):
    """How many micro-batches are on-policy, and how their text is written."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    share: float = Field(0.5, gt=0, lt=1, description="of all micro-batches; the prepared rows still come every epoch")
    prefixes: Literal["draft", "rounds"] = Field("draft", description="the drafter's own text, or decoded text")
    refresh: int = Field(100, ge=1, description="optimizer steps between one generation and the next")
    chats: int = Field(32, ge=1, description="prompts that a generation answers, over all processes")
    batch_size: int = Field(32, ge=1, description="of them at once on a process")
    k: int = Field(5, ge=1, description="draft tokens a round")
    max_new_tokens: int = Field(128, ge=1)
    sampler: Sampler = Field(default_factory=lambda: Sampler(temperature=1.0))
    seed: int = 0

    @model_validator(mode="after")
    def _something_new(self) -> OnPolicyConfig:
        if self.prefixes == "rounds" and self.sampler.greedy:
            raise ValueError(
                "on-policy rounds at temperature 0 repeat the target's greedy answers in every generation; set "
                "sampler.temperature above 0, or prefixes: draft"
            )
        return self


@dataclass(frozen=True)
class Prompts:
    """Prompts to go on from, by conversation; the target that reads them; the longest row that may come of one."""

    target: Target
    ids: dict[str, list[int]]
    max_length: int


def training_prompts(
    config: OnPolicyConfig | None, target: Target, conversations: Sequence[Conversation], max_length: int
) -> Prompts | None:
    """The conversations up to their last answer, as a server would feed them; None for a run that asks for none."""
    if config is None:
        return None
    return Prompts(target, {c.id: render_prompt(c, target.tokenizer) for c in conversations}, max_length)


@dataclass
class Pool:
    """Rows of a generation, cut into micro-batches pass by pass, each pass shuffled anew. ``first`` is the number of
    the run's on-policy micro-batch that comes first."""

    rows: list[EncodedRow]
    first: int
    tokens: int
    seed: int
    _planned: list[list[int]] = field(default_factory=list)
    _passes: int = 0

    def micro_batch(self, number: int) -> list[EncodedRow]:
        while len(self._planned) <= number - self.first:
            lengths = [len(row.ids) for row in self.rows]
            self._planned += plan_epoch(lengths, self.tokens, self.seed, self._passes)
            self._passes += 1
        return [self.rows[row] for row in self._planned[number - self.first]]


class OnPolicy:
    """Keeps a run in rows: new ones before steps 1, 1 + refresh, ..., in ``folder``/step-000101.json and so on.

    All they depend on is the weights, the step and the settings. ``tokens`` bounds a micro-batch.
    """

    def __init__(self, config: OnPolicyConfig, prompts: Prompts, drafter: TrainableDrafter, folder: Path,
                 accelerator: Accelerator, tokens: int) -> None:  # fmt: skip
        check_shape(Chain(config.k), deepest=drafter.deepest, columns=drafter.columns, trees=drafter.trees,
                    name=f"training.on_policy: {drafter.name}")  # fmt: skip
        self.config, self.target, self.drafter, self.folder = config, prompts.target, drafter, folder
        self.accelerator, self.tokens = accelerator, tokens
        limits = {"training.micro_batch_tokens": tokens, "data.max_length": prompts.max_length}
        if (limit := context(self.target.config)) is not None:
            limits["the target's context"] = limit
        name = min(limits, key=limits.__getitem__)
        room = limits[name] - config.max_new_tokens
        self.prompts = {chat: ids for chat, ids in prompts.ids.items() if len(ids) <= room}
        self.left_out = len(prompts.ids) - len(self.prompts)
        if not self.prompts:
            raise SpectrainError(
                f"none of the {len(prompts.ids)} training prompts leaves room for {config.max_new_tokens} new tokens "
                f"within {name}, {limits[name]}; raise that, or lower training.on_policy.max_new_tokens"
            )
        self._pool: Pool | None = None

    def generation(self, step: int) -> int:
        """The step before which the rows of optimizer step ``step`` were written."""
        return step - (step - 1) % self.config.refresh

    def prepare(self, step: int, first: int, kept: Sequence[int]) -> dict[str, Any] | None:
        """Have the rows of this step at hand; what a new generation wrote, and its seconds.

        ``first`` is the number of the next on-policy micro-batch. ``kept`` are the steps of the checkpoints there are:
        what they would go on with stays on disk.
        """
        start = self.generation(step)
        if start != step:
            if self._pool is None:
                self._pool = self._load(start)
            return None
        started = time.perf_counter()
        written = self._write(step)
        rows = [row for row in written if sum(row.mask) >= self.drafter.shifts()[0]]
        if not rows:
            raise SpectrainError(
                f"nothing to train on in the {len(written)} on-policy rows of step {step}: none has "
                f"{self.drafter.shifts()[0]} tokens, which the first draft depth needs; train on prepared rows first"
            )
        self._pool = Pool(rows, first, self.tokens, self.config.seed)
        self._save(step, kept)
        return {
            "rows": len(rows), "tokens": sum(sum(row.mask) for row in rows), "too_short": len(written) - len(rows),
            "prompts_left_out": self.left_out, "seconds": time.perf_counter() - started,
        }  # fmt: skip

    def micro_batches(self, numbers: range) -> list[list[EncodedRow]]:
        """The on-policy micro-batches of these numbers, of the rows at hand."""
        assert self._pool is not None
        return [self._pool.micro_batch(number) for number in numbers]

    def features(self, rows: Sequence[EncodedRow]) -> FeatureBatch:
        """What the target says on these rows."""
        self.target.tap(self.drafter.tap_layers)
        return live_batch(self.target, rows)

    # --- rows ---------------------------------------------------------------------------------------------------

    def _write(self, step: int) -> list[EncodedRow]:
        """Every process answers its part; all get all rows, in the same order."""
        chats = self._chats((step - 1) // self.config.refresh)
        part = list(enumerate(chats))[self.accelerator.process_index :: self.accelerator.num_processes]
        rows: list[tuple[int, EncodedRow]] = []
        with evaluating(self.drafter):
            for start in range(0, len(part), self.config.batch_size):
                batch = part[start : start + self.config.batch_size]
                prompts = [self.prompts[chat] for _, chat in batch]
                seeds = [stream_seed(self.config.seed, step, number) for number, _ in batch]
                for (number, chat), prompt, text in zip(batch, prompts, self._text(prompts, seeds), strict=True):
                    mask = [0] * len(prompt) + [1] * len(text)
                    rows.append((number, EncodedRow(chat, "on-policy", prompt + text, mask)))
        return [row for _, row in sorted(gather_object(rows), key=lambda numbered: numbered[0])]

    def _text(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        config = self.config
        if config.prefixes == "draft":
            return draft_text(self.target, self.drafter, prompts, sampler=config.sampler, k=config.k,
                              max_new_tokens=config.max_new_tokens, seeds=seeds)  # fmt: skip
        generations = generate_batch(self.target, self.drafter, prompts, sampler=config.sampler, shape=Chain(config.k),
                                     max_new_tokens=config.max_new_tokens, seeds=seeds, timed=False)  # fmt: skip
        return [generation.tokens for generation in generations]

    def _chats(self, generation: int) -> list[str]:
        """The prompts of a generation: all in turn, reshuffled after each turn."""
        names = sorted(self.prompts)
        chosen: list[str] = []
        for at in range(generation * self.config.chats, (generation + 1) * self.config.chats):
            turn, place = divmod(at, len(names))
            if not chosen or place == 0:
                order = list(names)
                random.Random(f"{self.config.seed}/{turn}").shuffle(order)
            chosen.append(order[place])
        return chosen

    # --- files --------------------------------------------------------------------------------------------------

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.json"

    def _save(self, step: int, kept: Sequence[int]) -> None:
        assert self._pool is not None
        if self.accelerator.is_main_process:
            rows = [{"conversation": row.conversation, "ids": row.ids, "mask": row.mask} for row in self._pool.rows]
            write_json(self._file(step), {"step": step, "first": self._pool.first, "rows": rows})
            needed = {self._file(self.generation(done + 1)) for done in kept} | {self._file(step)}
            for file in set(self.folder.glob("step-*.json")) - needed:
                file.unlink()
        self.accelerator.wait_for_everyone()

    def _load(self, step: int) -> Pool:
        file = self._file(step)
        if not file.exists():
            raise SpectrainError(
                f"on-policy rows {file} are missing, which the latest checkpoint goes on with; put them back, or "
                "delete the checkpoints beside them and start over"
            )
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = [EncodedRow(row["conversation"], "on-policy", row["ids"], row["mask"]) for row in found["rows"]]
        return Pool(rows, found["first"], self.tokens, self.config.seed)

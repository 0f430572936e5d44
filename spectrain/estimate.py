"""What a recipe will take, before anything is fetched or started: parameters, memory, disk and time.

Sizes are counted, not guessed: target and drafter are built without weights, and the drafter's own training step is run
on shapes alone. Time is operations and bytes over a device's rates; what had to be assumed is listed with the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from spectrain import interop
from spectrain.attention import context
from spectrain.blueprint import (
    Blueprint,
    HeadRows,
    Pass,
    Step,
    blueprint_drafter,
    cache_bytes,
    parameters,
    target_pass,
    training_step,
)
from spectrain.config import Recipe
from spectrain.drafters import TrainableDrafter, family_of
from spectrain.errors import SpectrainError
from spectrain.fetching import refused
from spectrain.head_loss import CHUNK
from spectrain.identity import tokenizer_size
from spectrain.rates import Rates
from spectrain.weights import check_no_file, floating_dtype
from spectrain.workload import Side, Workload

CHUNK_COPIES = 8  # matrices of chunk x columns in float32 that a loss and its gradient hold at once
LAW_COPIES = 4  # matrices of batch x vocabulary in float32 that sampling holds
BATCH_TOKENS = 2048  # of one forward of feature extraction
FLOAT = 4
MOMENTS = 2
OPTIMIZER_TRAFFIC = 28  # bytes a value: weight, gradient and both moments read, all but the gradient written
PADDING = "padding is not counted: real runs take some more optimizer steps"
ASSUMPTIONS = (
    "attention is counted in full, not halved for its causal mask",
    f"a loss and its gradient hold {CHUNK_COPIES} float32 matrices of {CHUNK} rows x columns",
    "answers: every batch uses up its budget of regenerate.max_new_tokens, at full bandwidth: at least so long",
    PADDING,
    "preparation runs on one process, whatever their number",
    "not counted: what the allocator loses, and libraries' own buffers (leave 10% and 1 GiB)",
)


def load_config(recipe: Recipe, recipe_path: Path, given: str | None = None) -> PreTrainedConfig:
    """The target's config.json: as given; in the target's folder; beside the recipe; or that file from the Hub."""
    beside = recipe_path.parent / "config.json"
    local = Path(recipe.target.name) / "config.json"
    source = Path(given) if given else local if local.is_file() else beside if beside.is_file() else None
    if given and not Path(given).is_file():
        raise SpectrainError(f"--config {given} does not exist; give the config.json of the target")
    name = str(source) if source else recipe.target.name
    check_no_file(recipe.target.name)
    revision = None if source else recipe.target.revision
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # each library that reads a config raises its own kinds
        raise SpectrainError(
            f"the configuration of target {recipe.target.name!r} cannot be read from {source or 'a folder or the Hub'} "
            f"({refused(error, name, revision)}); give its config.json with --config"
        ) from error


def blueprint(recipe: Recipe, config: PreTrainedConfig) -> Blueprint:
    """The recipe's target on paper; its tokenizer says how many ids exist, where it is in a folder here."""
    kind, folder, size = floating_dtype(recipe.target.dtype), Path(recipe.target.name), None
    if (folder / "tokenizer_config.json").is_file():
        size = tokenizer_size(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    return Blueprint(config, kind, name=recipe.target.name, tokenizer_size=size)


def estimate(recipe: Recipe, target: Blueprint, work: Workload, rates: Rates | Callable[[], Rates],
             processes: int = 1) -> dict[str, Any]:  # fmt: skip
    """Everything as plain numbers: bytes, seconds, counts. ``rates`` that have to be measured first may be a function:
    it is called once the recipe is known to make a drafter."""
    if not recipe.drafter.trainable:
        raise SpectrainError(
            f"drafter type {recipe.drafter.type!r} has nothing to train, so there is nothing to estimate"
        )
    if processes < 1:
        raise SpectrainError(f"--processes {processes}: expected 1 or more")
    interop.format_for_type(family_of(recipe.drafter))
    # Before a drafter is built, which may put adapters into it.
    held = parameters(target.model), sum(p.nbytes for p in target.model.parameters())
    drafter = blueprint_drafter(recipe.drafter, target)
    rates = rates if isinstance(rates, Rates) else rates()
    plan = _Plan(recipe, target, drafter, work, rates, processes, held)
    return {
        "target": recipe.target.name,
        "drafter": recipe.drafter.type,
        "processes": processes,
        "parameters": {"target": plan.target_parameters, "drafter": plan.held, "trainable": plan.trainable},
        "traffic": work.describe(),
        "rates": {"flops": rates.flops, "bandwidth": rates.bandwidth, "utilisation": rates.utilisation,
                  "source": rates.source},
        "memory": plan.memory(),
        "disk": plan.disk(),
        "time": plan.time(),
        "assumptions": list(ASSUMPTIONS),
    }  # fmt: skip


class _Plan:
    def __init__(self, recipe: Recipe, target: Blueprint, drafter: TrainableDrafter, work: Workload, rates: Rates,
                 processes: int, held: tuple[int, int]) -> None:  # fmt: skip
        self.recipe, self.target, self.drafter, self.work = recipe, target, drafter, work
        self.rates, self.processes = rates, processes
        self.target_parameters, self.target_bytes = held
        self.taps = recipe.drafter.taps(target)
        self.held = parameters(drafter)
        self.trainable = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
        self.feature_dtype, self.live = getattr(torch, recipe.data.feature_dtype), recipe.data.features == "live"

    @cache  # noqa: B019 (a plan lives as long as its estimate)
    def _step(self, rows: int, length: int, answer: int, **settings: Any) -> Step:
        return training_step(self.drafter, self.target, rows=rows, length=length, answer=answer,
                             feature_dtype=self.feature_dtype, half=self.recipe.training.precision == "bf16",
                             **settings)  # fmt: skip

    @cache  # noqa: B019
    def _pass(self, rows: int, length: int) -> Pass:
        return target_pass(self.target, rows, length, self.taps)

    @cached_property
    def _cache_bytes(self) -> int:
        return cache_bytes(self.target)

    # --- memory -----------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, Any]:
        """Parts and peak of each stage, bytes of one process."""
        stages = {**({} if self.live else {"features": self._features()}), "training": self._training()}
        return {"answers": self._answers(), **stages} if self.recipe.regenerate else stages

    def _length(self) -> int:
        return min(self.recipe.data.max_length, context(self.target.config) or self.recipe.data.max_length)

    def _answers(self) -> dict[str, int]:
        settings, length = self.recipe.regenerate, self._length()
        assert settings is not None
        batch, prompt = min(settings.batch_size, self.work.train.rows), max(1, length - settings.max_new_tokens)
        parts = {
            "target": self.target_bytes,
            "cache": batch * length * self._cache_bytes,
            "prompts": target_pass(self.target, batch, prompt).peak_bytes,
            "laws": batch * self.target.vocab_size * FLOAT * LAW_COPIES,
        }
        return _summed(parts, apart=("prompts", "laws"))

    def _features(self) -> dict[str, int]:
        return _summed({"target": self.target_bytes, **self._target_pass(BATCH_TOKENS)})

    def _target_pass(self, tokens: int) -> dict[str, int]:
        """What the target computes to give the features of so many tokens."""
        length = self._length()
        forward = self._pass(max(1, tokens // length), length).peak_bytes
        return {"forward": forward, "laws": CHUNK * self.target.vocab_size * FLOAT * 2}

    def _training(self) -> dict[str, int]:
        training, length = self.recipe.training, self._length()
        rows = max(1, training.micro_batch_tokens // length)
        answer = min(length - 1, self.recipe.regenerate.max_new_tokens if self.recipe.regenerate else length - 1)
        step = self._step(rows, length, answer, accumulate=training.accumulation > 1)
        held = sum(t.nbytes for t in (*self.drafter.parameters(), *self.drafter.buffers()))
        gradients = self.trainable * FLOAT
        moments = self._moments()
        buckets = gradients if self.processes > 1 else 0
        heads = max(map(self._head_bytes, step.heads), default=0)
        resting = self.target_bytes + held + moments + buckets
        # Before the activations are there, but perhaps beside the gradients of an earlier micro-batch.
        live = sum(self._target_pass(training.micro_batch_tokens).values()) if self.live else 0
        return {
            "target": self.target_bytes, "drafter": held, "moments": moments, "gradients": gradients,
            "gradient_buckets": buckets, "activations": step.kept_bytes, "head_chunk": heads, "live_features": live,
            # The optimizer's own temporary is as large as a moment, when the activations are gone.
            "peak": resting + max(step.peak_bytes, step.kept_bytes + heads, 2 * gradients, gradients + live),
        }  # fmt: skip

    def _moments(self) -> int:
        return self.trainable * MOMENTS * (1 if self.recipe.optim.name == "adamw_8bit" else FLOAT)

    def _head_bytes(self, head: HeadRows) -> int:
        """Logits of a chunk and what a loss makes of them; the head cut to its columns and cast; its gradient."""
        weight = head.columns * head.width
        cut = weight * self.target.dtype.itemsize if head.reduced else 0
        cast = weight * 2 if head.trained and self.recipe.training.precision == "bf16" else 0
        chunk = min(CHUNK, head.rows) * head.columns * FLOAT * CHUNK_COPIES
        return chunk + cut + cast + (weight * FLOAT if head.trained else 0)

    # --- disk -------------------------------------------------------------------------------------------------

    def disk(self) -> dict[str, int]:
        """Bytes, the whole run's; ``feature_bytes_per_token`` of one token in the store (0: nothing is stored)."""
        per_token = 0 if self.live else bytes_per_token(self.recipe, self.target)
        state = sum(t.nbytes for t in self.drafter.state_dict().values())
        moved = self._step(1, *self.work.train.mean, progress=1.0).moves_target
        bundle = self._bundle_bytes() + (self.target_bytes if moved else 0)
        checkpoint = bundle + state + self._moments()
        # Scores are against the whole law: what is held out has no likeliest tokens stored.
        heldout = 0 if self.live else bytes_per_token(self.recipe, self.target, top_k=False)
        features = per_token * self.work.train.tokens + heldout * self.work.heldout.tokens
        # Besides the latest ones there are the best, and while one is written it too.
        checkpoints = checkpoint * (self.recipe.training.keep + 1 + (self.recipe.training.select == "best"))
        return {
            "feature_bytes_per_token": per_token, "features": features, "bundle": bundle, "checkpoint": checkpoint,
            "checkpoints": checkpoints, "target": self.target_bytes, "total": features + checkpoints + bundle,
        }  # fmt: skip

    def _bundle_bytes(self) -> int:
        name = type(self.target.model).__name__
        _, tensors = interop.format_for(self.drafter).from_drafter(self.drafter, "target", [name])
        return sum(tensor.nbytes for tensor in tensors.values())

    # --- time -------------------------------------------------------------------------------------------------

    def time(self) -> dict[str, float]:
        """Seconds of each stage; and ``training_flops_per_token``."""
        sides = (self.work.train, self.work.heldout)
        train_flops, validate_flops = self._row_flops()
        tokens, training = self.work.train.tokens, self.recipe.training
        an_epoch = max(1, -(-tokens // (training.micro_batch_tokens * training.accumulation * self.processes)))
        steps = min(an_epoch * training.epochs, training.steps or an_epoch * training.epochs)
        epochs = steps / an_epoch
        speed = self.rates.effective
        validations = max(1, steps // training.validate_every)
        seconds: dict[str, float] = {
            "answers": sum(map(self._answer_seconds, sides)) if self.recipe.regenerate else 0.0,
            "features": 0.0 if self.live else sum(s.rows * self._feature_flops(s) for s in sides) / speed,
            "training": self.work.train.rows * epochs * train_flops / speed / self.processes
            + steps * self.trainable * OPTIMIZER_TRAFFIC / self.rates.bandwidth,
            "validation": validations * self.work.heldout.rows * validate_flops / speed / self.processes,
        }
        total, mean = sum(seconds.values()), self.work.train.mean[0]
        return {**seconds, "total": total, "steps": steps, "training_flops_per_token": train_flops / mean,
                "training_tokens_per_second": tokens * epochs / seconds["training"]}  # fmt: skip

    def _row_flops(self) -> tuple[float, int]:
        """Operations on a mean row: in training, on average over its phases; and in validation."""
        shape = self.work.train.mean
        ends = [self._step(1, *shape, progress=at) for at in (0.0, 1.0)]
        same = ends[0].flops == ends[1].flops
        steps = ends[:1] if same else [self._step(1, *shape, progress=at / 8) for at in range(1, 9)]
        asked = self.recipe.loss.teacher == "target" and self.recipe.data.teacher_top_k is None
        heads = [head for step in steps for head in step.heads]
        flops = sum(step.flops for step in steps) + sum(h.flops + asked * h.teacher_flops for h in heads)
        depths = min(filter(None, (self.recipe.training.validation_depths, self.drafter.deepest)))
        scored = self._step(1, *shape, depths=depths)
        validation = scored.forward_flops + sum(h.forward_flops + h.teacher_flops for h in scored.heads)
        live = [self._feature_flops(side) if self.live else 0 for side in (self.work.train, self.work.heldout)]
        return flops / len(steps) + live[0], validation + live[1]

    def _feature_flops(self, side: Side) -> int:
        """Operations of the target on a mean row."""
        length, answer = side.mean
        return self._pass(1, length).flops + answer * self._head_flops()

    def _answer_seconds(self, side: Side) -> float:
        """Prompts at the device's operations; then a step for every token of a batch, which takes as long as the
        slower of reading weights and cache, and computing."""
        settings = self.recipe.regenerate
        assert settings is not None
        length, answer = side.mean
        prompt = max(1, length - answer)
        whole, start = self._pass(1, length).flops, self._pass(1, prompt).flops
        batches = -(-side.rows // settings.batch_size)
        steps = batches * settings.max_new_tokens
        embedding = 0 if self.target.config.tie_word_embeddings else self.target.embedding_weight.nbytes
        cached = side.rows * answer * (prompt + answer / 2) * self._cache_bytes
        reading = (steps * (self.target_bytes - embedding) + cached) / self.rates.bandwidth
        computing = side.rows * (whole - start + answer * self._head_flops()) / self.rates.effective
        return side.rows * start / self.rates.effective + max(reading, computing)

    def _head_flops(self) -> int:
        return 2 * self.target.hidden_size * self.target.vocab_size


def _summed(parts: Mapping[str, int], apart: tuple[str, ...] = ()) -> dict[str, int]:
    """Parts and their peak; those ``apart`` are never there at the same time."""
    together = sum(size for name, size in parts.items() if name not in apart)
    return {**parts, "peak": together + max((parts[name] for name in apart), default=0)}


def bytes_per_token(recipe: Recipe, target: Blueprint, *, top_k: bool = True) -> int:
    """Bytes of one token in the feature store: id and argmax (8 each), mask, normaliser, last state and taps; and the
    likeliest tokens with their log-probabilities, where they are kept."""
    values = target.hidden_size * (1 + len(recipe.drafter.taps(target)))
    kept = (recipe.data.teacher_top_k or 0) if top_k else 0
    return 8 + 8 + 1 + FLOAT + values * getattr(torch, recipe.data.feature_dtype).itemsize + kept * (4 + FLOAT)

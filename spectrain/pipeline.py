"""A run from chats to a report, in stages that each finish or resume: prepare, train, evaluate.

Everything a run makes lies in the recipe's ``output`` folder: ``training/``, ``bundle/``, ``evaluation/``, and at the
top ``acceptance.json`` with the reports made from it. ``data/`` (answers, counts) and ``features/`` lie there too, or
in ``prepared``, where recipes with the same target and traffic share them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from spectrain import preflight
from spectrain.attention import context
from spectrain.bundle import REPORT_FILE, Belonging, Trained, save_drafter
from spectrain.config import Recipe
from spectrain.data.batches import answer_counts, plan_epoch, some_rows
from spectrain.data.conversations import Conversation, EncodedRow, encode_all, load_conversations
from spectrain.data.feature_rows import FeatureRows, LiveFeatures, check_lengths
from spectrain.data.features import extract_features, store_key
from spectrain.data.split import conversations_digest
from spectrain.data.template_variables import choose_template_kwargs
from spectrain.distributed import processes, whole
from spectrain.drafters import TrainableDrafter, family_of
from spectrain.drafters.ranks import RANKS_FILE, measure_ranks
from spectrain.errors import SpectrainError
from spectrain.evaluation.acceptance import AcceptanceConfig
from spectrain.evaluation.bundles import Asked, evaluate_bundle
from spectrain.files import atomic_folder, holds, json_digest, write_json
from spectrain.foresight import few_heldout, few_steps, other_sampler
from spectrain.interop import WEIGHTS_FILE
from spectrain.manifest import read_manifest
from spectrain.occupied import working_in
from spectrain.on_policy import training_prompts
from spectrain.places import check_writable
from spectrain.regenerate import regenerate
from spectrain.reload import check_reload
from spectrain.run_record import check_same_run
from spectrain.schedule import Curriculum
from spectrain.target import Target, load_target
from spectrain.traffic import Traffic, check_traffic, offering_to_drop, read_traffic, usable
from spectrain.training import Trainer
from spectrain.warm_start import find_start, warm_start

RANKED_TOKENS = 2000  # answer tokens that the ranks of a bundle are measured on
RowCheck = Callable[[Sequence[EncodedRow], dict[str, Any]], None]


@dataclass(frozen=True)
class Prepared:
    """Chats with answers, and the features of their rows, stored or live."""

    train: list[Conversation]
    heldout: list[Conversation]
    train_rows: list[EncodedRow]
    heldout_rows: list[EncodedRow]
    train_store: FeatureRows
    heldout_store: FeatureRows
    split: str | None = None  # how the held-out part was drawn, where it was
    asked: str | None = None  # digest of the held-out chats before they were answered anew, where they were

    def digests(self) -> dict[str, str]:
        found = {"train": conversations_digest(self.train), "heldout": conversations_digest(self.heldout)}
        more = {"split": self.split, "heldout_asked": self.asked}
        return found | {name: value for name, value in more.items() if value is not None}


class Run:
    """One recipe on its way. Stages may be called in any order: each does what it needs and is not there yet."""

    def __init__(self, recipe: Recipe, *, progress: bool = True) -> None:
        self.recipe, self.folder, self.progress = recipe, Path(recipe.output), progress
        self.prepared = Path(recipe.prepared or recipe.output)
        check_writable("output", self.folder)
        check_writable("prepared", self.prepared)

    @cached_property
    def target(self) -> Target:
        config, state = self.recipe.target, processes()
        if config.device_map is not None and state.num_processes > 1:
            raise SpectrainError(
                f"target.device_map spreads the target over all devices, and {state.num_processes} processes would "
                "each do so; prepare with one process, or leave it out"
            )
        device = str(state.device) if config.device == "auto" else config.device  # each process has its own
        target = load_target(
            config.name, revision=config.revision, dtype=config.dtype, device=device, attention=config.attention,
            device_map=config.device_map,
        )  # fmt: skip
        choose_template_kwargs(target.tokenizer, self.recipe.data.chat_template_kwargs)
        return target

    def say(self, text: str) -> None:
        if self.progress and processes().is_main_process:
            print(text, flush=True)

    def note(self, notes: Iterable[str]) -> None:
        for text in notes:
            self.say(f"note: {text}")

    def run(self) -> Path:
        """Everything; the path of ``acceptance.json``. What evaluating would stop for is told before training."""
        preflight.check_training(self.recipe)
        _, heldout = self.conversations()  # before the target is loaded
        with offering_to_drop():
            preflight.check_measurable(self.target, heldout, self.recipe.evaluation)
        self.train()
        return self.evaluate()

    # --- prepare ----------------------------------------------------------------------------------------------

    def conversations(self) -> tuple[list[Conversation], list[Conversation]]:
        """Train and held-out chats, checked for leaks, and the recipe with them as far as no weights are needed; once
        however many stages ask."""
        return self._traffic.train, self._traffic.heldout

    @cached_property
    def _traffic(self) -> Traffic:
        preflight.check_recipe(self.recipe)
        data, drop_bad = self.recipe.data, self.recipe.data.bad_rows == "drop"
        traffic = read_traffic(data, drop_bad=drop_bad, answers=self.recipe.regenerate is None)
        self.say(str(check_traffic(data, traffic)))
        if drop_bad:
            traffic = usable(self.recipe, traffic, self.target.tokenizer, context(self.target.config))
            traffic.check_not_empty()
        self.note([*few_heldout(self.recipe, traffic.train, traffic.heldout), *other_sampler(self.recipe)])
        return traffic

    def prepare(self, check: RowCheck = lambda rows, key: None) -> Prepared:
        """Split, let the target answer, encode, and extract features. The main process works, then the others read.

        ``check`` sees the training rows and their features' key before any are extracted, and may refuse them.
        """
        with working_in(self.recipe.prepared_data), processes().main_process_first(), offering_to_drop():
            return self._prepare(check)

    def _prepare(self, check: RowCheck) -> Prepared:
        sides = dict(zip(("train", "heldout"), self.conversations(), strict=True))  # before the target is loaded
        data, taps = self.recipe.data, self.recipe.drafter.taps(self.target)
        preflight.check_context(self.recipe, self.target)
        asked = conversations_digest(sides["heldout"]) if self.recipe.regenerate else None
        if self.recipe.regenerate is not None:
            for side, chats in sides.items():
                path = regenerate(self.target, self.target.identity().digest, chats, self.recipe.regenerate,
                                  self.prepared / "data" / f"{side}.jsonl", progress=self.progress)  # fmt: skip
                sides[side] = load_conversations(path)
        rows, keys, counts = {}, {}, {}
        for side, chats in sides.items():
            rows[side], unusable = encode_all(chats, self.target.tokenizer, data.max_length,
                                              drop_bad=data.bad_rows == "drop")  # fmt: skip
            dropped = self._traffic.dropped[side] + unusable
            top_k = data.teacher_top_k if side == "train" else None  # scores are against the whole law
            keys[side] = store_key(rows[side], self.target, self.target.identity().digest, taps, data.feature_dtype,
                                   top_k)  # fmt: skip
            answer = sum(sum(row.mask) for row in rows[side])
            counts[side] = {"conversations": len(chats), "rows": len(rows[side]), **dropped.describe(),
                            "tokens": sum(len(row.ids) for row in rows[side]), "answer_tokens": answer,
                            "digest": keys[side]["rows"]}  # fmt: skip
            tokens = f"{counts[side]['tokens']} tokens, {answer} of answers"
            self.say(f"{side}: {len(rows[side])} rows, {tokens}; dropped: {dropped}")
            if dropped.listing():
                self.say(dropped.listing())
        preflight.check_same_rows(self.prepared / "data" / "counts.json", counts)
        for side in sides:
            check_lengths(rows[side], self.target)
        if data.features == "stored":  # of live ones nothing is extracted before the trainer looks at them
            check(rows["train"], keys["train"])
        stores = {side: self._features(side, rows[side], keys[side]) for side in sides}
        write_json(self.prepared / "data" / "counts.json", counts)
        return Prepared(**sides, train_rows=rows["train"], heldout_rows=rows["heldout"], train_store=stores["train"],
                        heldout_store=stores["heldout"], split=self._traffic.split, asked=asked)  # fmt: skip

    def _features(self, side: str, rows: list[EncodedRow], key: dict[str, Any]) -> FeatureRows:
        if self.recipe.data.features == "live":
            return LiveFeatures(rows, self.target, key)
        folder = self.prepared / "features" / "-".join([side, *map(str, key["taps"]), *_top(key)])
        store = extract_features(folder, rows, self.target, key, progress=self.progress)
        self.say(f"{side} features: {store.describe()}")
        return store

    # --- train ------------------------------------------------------------------------------------------------

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    def train(self) -> Path:
        """Train the drafter and leave its bundle; a finished run is not repeated, an interrupted one goes on."""
        with working_in(preflight.training_folder(self.recipe)):
            return self._train()

    def _train(self) -> Path:
        preflight.check_training(self.recipe)
        self.conversations()  # what is wrong with them is told before the target is loaded
        preflight.check_device(self.target.device, processes().device)
        start = self._start()  # before hours of preparation
        origin = None if start is None else self._origin(start)
        record, folder = preflight.record_of(self.recipe, origin), preflight.training_folder(self.recipe)
        check_same_run(folder, record)

        def check(rows: Sequence[EncodedRow], key: dict[str, Any]) -> None:
            Curriculum([len(row.ids) for row in rows], self.recipe.training, processes().num_processes).total_steps()
            check_same_run(folder, {**record, "features": json_digest(key)}, ("prompts",))

        prepared = self.prepare(check)
        counts_V = answer_counts(prepared.train_rows, self.target.vocab_size)
        torch.manual_seed(self.recipe.training.seed)
        drafter = family_of(self.recipe.drafter).build(self.recipe.drafter, self.target, counts_V)
        if start is not None:
            self._warm_start(drafter, start)
        recipe = self.recipe.model_dump(mode="json")
        sampler = asdict(self.recipe.regenerate.sampler) if self.recipe.regenerate else {}

        def save(folder: Path) -> None:
            save_drafter(folder, drafter, Belonging.to(self.target), Trained(sampler, recipe, prepared.digests()))

        trainer = Trainer(drafter, self.target.head, prepared.train_store, prepared.heldout_store,
                          loss=self.recipe.loss, optim=self.recipe.optim, config=self.recipe.training,
                          folder=folder, save_bundle=save, settings=recipe, origin=origin,
                          prompts=training_prompts(self.recipe.training.on_policy, self.target, prepared.train,
                                                   self.recipe.data.max_length))  # fmt: skip
        self.note([] if trainer.finished else few_steps(self.recipe, trainer.total_steps))
        trainer.run()
        with whole(drafter):
            chosen = trainer.checkpoints.at(trainer.chosen) / "bundle"
            if processes().is_main_process and not holds(self.bundle, chosen):
                with atomic_folder(self.bundle) as partial:
                    shutil.copytree(chosen, partial, dirs_exist_ok=True)
                    if self.recipe.training.verify_bundle:
                        check_reload(partial, drafter, self.target, name=self.bundle)
                    self._write_ranks(partial, drafter, prepared.train_store)
        processes().wait_for_everyone()
        self.say(f"bundle: {self.bundle} ({trainer.choice})")
        return self.bundle

    def _write_ranks(self, folder: Path, drafter: TrainableDrafter, store: FeatureRows) -> None:
        """What measured trees are made from; on training rows, so that held-out chats stay unseen."""
        if not drafter.trees:
            return
        config, rows = self.recipe.training, some_rows(store, RANKED_TOKENS, self.recipe.training.seed)
        lengths = [store.length(row) for row in rows]
        plan = plan_epoch(lengths, max(config.micro_batch_tokens, max(lengths)), config.seed, 0)
        batches = (store.batch([rows[i] for i in batch], self.target.device) for batch in plan)
        ranks = measure_ranks(drafter, batches, self.target.head, self.recipe.evaluation.samplers,
                              depths=config.validation_depths)  # fmt: skip
        write_json(folder / RANKS_FILE, ranks)

    def _start(self) -> Path | None:
        """The folder of the bundle that the recipe starts from, if it names one."""
        config = self.recipe.warm_start
        if config is None:
            return None
        if Path(config.bundle).resolve() == self.bundle.resolve():
            raise SpectrainError(
                f"warm_start.bundle {config.bundle} is what this run will write; choose another output"
            )
        with processes().main_process_first():
            return find_start(config.bundle, config.revision, self.recipe.drafter.type, self.target)

    def _origin(self, start: Path) -> dict[str, Any]:
        """What identifies the weights of the bundle in ``start``, and how they are taken."""
        remap = self.recipe.warm_start is not None and self.recipe.warm_start.remap
        return {"weights": read_manifest(start).files[WEIGHTS_FILE], "remap": remap}

    def _warm_start(self, drafter: TrainableDrafter, folder: Path) -> None:
        """Give a new drafter the weights of the bundle in ``folder``.

        A run that goes on from its checkpoint does this too, and then the checkpoint's weights replace these.
        """
        remap = self.recipe.warm_start is not None and self.recipe.warm_start.remap
        self.note(warm_start(drafter, folder, self.target, remap=remap))

    # --- evaluate ---------------------------------------------------------------------------------------------

    def evaluate(self, config: AcceptanceConfig | None = None, output: Path | None = None) -> Path:
        """Measure the bundle and the baselines on the held-out chats; ``acceptance.json`` and the reports."""
        _, heldout = self.conversations()
        if not self.bundle.is_dir():
            raise SpectrainError(f"there is no bundle at {self.bundle} yet; train first")
        names = ", ".join(Path(p).name for p in self.recipe.data.heldout) or "held-out share of the training files"
        asked = Asked(heldout, config or self.recipe.evaluation, output or self.folder, names, self.recipe.baselines,
                      self._traffic.dropped["heldout"].by_reason(), self.progress)  # fmt: skip
        path = evaluate_bundle(self.bundle, self.target, asked)
        if processes().is_main_process:
            write_json(self.bundle / REPORT_FILE, json.loads(path.read_text(encoding="utf-8")))
        return path


def _top(key: dict[str, Any]) -> list[str]:
    """What a store's folder adds to its name where it also holds the likeliest tokens."""
    return [] if key["teacher_top_k"] is None else [f"top{key['teacher_top_k']}"]

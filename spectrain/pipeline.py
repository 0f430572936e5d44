"""A run from chats to a report, in stages that each finish or resume: prepare, train, evaluate.

Everything a run makes lies in the recipe's ``output`` folder: ``data/`` (answers, rows), ``features/``, ``training/``,
``bundle/``, ``evaluation/``, and at the top ``acceptance.json`` with the reports made from it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from accelerate import PartialState

from spectrain.bundle import save_drafter
from spectrain.config import Recipe
from spectrain.data.conversations import Conversation, EncodedRow, encode_all, load_conversations
from spectrain.data.features import FeatureStore, extract_features, store_key
from spectrain.data.split import check_leaks, conversations_digest, split_conversations
from spectrain.drafters import family_of
from spectrain.errors import SpectrainError
from spectrain.evaluation.acceptance import AcceptanceConfig
from spectrain.evaluation.bundles import evaluate_bundle
from spectrain.files import atomic_folder, file_digest, write_json
from spectrain.regenerate import regenerate
from spectrain.target import Target, load_target
from spectrain.training import Trainer


@dataclass(frozen=True)
class Prepared:
    """Chats with answers, and the features of their rows."""

    train: list[Conversation]
    heldout: list[Conversation]
    train_rows: list[EncodedRow]
    train_store: FeatureStore
    heldout_store: FeatureStore

    def digests(self) -> dict[str, str]:
        return {"train": conversations_digest(self.train), "heldout": conversations_digest(self.heldout)}


class Run:
    """One recipe on its way. Stages may be called in any order: each does what it needs and is not there yet."""

    def __init__(self, recipe: Recipe, *, progress: bool = True) -> None:
        self.recipe, self.folder, self.progress = recipe, Path(recipe.output), progress

    @cached_property
    def target(self) -> Target:
        config = self.recipe.target
        device = str(PartialState().device)  # each process has its own
        return load_target(
            config.name, revision=config.revision, dtype=config.dtype, device=device, attention=config.attention
        )

    def say(self, text: str) -> None:
        if self.progress and PartialState().is_main_process:
            print(text, flush=True)

    # --- prepare ----------------------------------------------------------------------------------------------

    def conversations(self) -> tuple[list[Conversation], list[Conversation]]:
        """Train and held-out chats, checked for leaks; read and checked once however many stages ask."""
        return self._sides

    @cached_property
    def _sides(self) -> tuple[list[Conversation], list[Conversation]]:
        data = self.recipe.data
        train = load_conversations(list(data.train))
        if data.heldout:
            heldout = load_conversations(list(data.heldout))
        else:
            parts = split_conversations(train, heldout_fraction=data.heldout_fraction, seed=data.seed)
            train, heldout = list(parts.train), list(parts.heldout)
        self.say(str(check_leaks(train, heldout)))
        return train, heldout

    def prepare(self) -> Prepared:
        """Split, let the target answer, encode, and extract features. The main process works, then the others read."""
        with PartialState().main_process_first():
            return self._prepare()

    def _prepare(self) -> Prepared:
        data = self.recipe.data
        sides = dict(zip(("train", "heldout"), self.conversations(), strict=True))
        if self.recipe.regenerate is not None:
            for side, chats in sides.items():
                path = regenerate(self.target, self.target.identity().digest, chats, self.recipe.regenerate,
                                  self.folder / "data" / f"{side}.jsonl", progress=self.progress)  # fmt: skip
                sides[side] = load_conversations(path)
        taps = self.recipe.drafter.taps(self.target)
        rows, stores, counts = {}, {}, {}
        for side, chats in sides.items():
            rows[side], dropped = encode_all(chats, self.target.tokenizer, data.max_length)
            key = store_key(rows[side], self.target, self.target.identity().digest, taps, data.feature_dtype)
            stores[side] = extract_features(self.folder / "features" / side, rows[side], self.target, key,
                                            progress=self.progress)  # fmt: skip
            answer = sum(sum(row.mask) for row in rows[side])
            counts[side] = {"conversations": len(chats), "rows": len(rows[side]), "dropped": asdict(dropped),
                            "tokens": sum(len(row.ids) for row in rows[side]), "answer_tokens": answer}  # fmt: skip
            tokens = f"{counts[side]['tokens']} tokens, {answer} of answers"
            self.say(f"{side}: {len(rows[side])} rows, {tokens}; dropped: {dropped}")
        write_json(self.folder / "data" / "counts.json", counts)
        return Prepared(sides["train"], sides["heldout"], rows["train"], stores["train"], stores["heldout"])

    # --- train ------------------------------------------------------------------------------------------------

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    def train(self) -> Path:
        """Train the drafter and leave its bundle; a finished run is not repeated, an interrupted one goes on."""
        if not self.recipe.drafter.trainable:
            family = self.recipe.drafter.type
            raise SpectrainError(f"drafter type {family!r} has nothing to train; measure it as one of the baselines")
        prepared = self.prepare()
        counts_V = torch.zeros(self.target.vocab_size, dtype=torch.long)
        for row in prepared.train_rows:
            answers = torch.tensor(row.ids)[torch.tensor(row.mask, dtype=torch.bool)]
            counts_V += torch.bincount(answers, minlength=len(counts_V))
        torch.manual_seed(self.recipe.training.seed)
        drafter = family_of(self.recipe.drafter).build(self.recipe.drafter, self.target, counts_V)
        recipe = self.recipe.model_dump(mode="json")
        sampler = asdict(self.recipe.regenerate.sampler) if self.recipe.regenerate else {}

        def save(folder: Path) -> None:
            save_drafter(
                folder, drafter, target=self.target.identity(), tokenizer=self.target.tokenizer, sampler=sampler,
                recipe=recipe, data_digests=prepared.digests(), eos_ids=self.target.eos_ids,
            )  # fmt: skip

        trainer = Trainer(drafter, self.target.head, prepared.train_store, prepared.heldout_store,
                          loss=self.recipe.loss, optim=self.recipe.optim, config=self.recipe.training,
                          folder=self.folder / "training", save_bundle=save, settings=recipe)  # fmt: skip
        trainer.run()
        if PartialState().is_main_process:
            latest = trainer.checkpoints.all()[-1] / "bundle"
            if not _holds(self.bundle, latest):
                with atomic_folder(self.bundle) as partial:
                    shutil.copytree(latest, partial, dirs_exist_ok=True)
        PartialState().wait_for_everyone()
        self.say(f"bundle: {self.bundle}")
        return self.bundle

    # --- evaluate ---------------------------------------------------------------------------------------------

    def evaluate(self, config: AcceptanceConfig | None = None, output: Path | None = None) -> Path:
        """Measure the bundle and the baselines on the held-out chats; ``acceptance.json`` and the reports."""
        _, heldout = self.conversations()
        if not self.bundle.is_dir():
            raise SpectrainError(f"there is no bundle at {self.bundle} yet; train first")
        path = evaluate_bundle(
            self.bundle, self.target, heldout, config or self.recipe.evaluation, output or self.folder,
            traffic=", ".join(Path(p).name for p in self.recipe.data.heldout) or "held-out share of the training files",
            baselines=self.recipe.baselines, progress=self.progress,
        )  # fmt: skip
        write_json(self.bundle / "acceptance.json", json.loads(path.read_text(encoding="utf-8")))
        return path


def _holds(folder: Path, source: Path) -> bool:
    """Whether every file of ``source`` is in ``folder`` as it is there."""
    names = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    return all((folder / n).is_file() and file_digest(folder / n) == file_digest(source / n) for n in names)

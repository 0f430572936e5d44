"""A run from chats to a report, in stages that each finish or resume: prepare, train, evaluate.

Everything a run makes lies in the recipe's ``output`` folder: ``data/`` (answers, rows), ``features/``, ``training/``,
``bundle/``, ``evaluation/``, and at the top ``acceptance.json`` with the reports made from it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from spectrain.bundle import BundleContents, load_drafter, save_drafter
from spectrain.config import Recipe
from spectrain.data.conversations import Conversation, EncodedRow, encode_all, load_conversations
from spectrain.data.features import FeatureStore, extract_features, store_key
from spectrain.data.split import check_leaks, conversations_digest, split_conversations
from spectrain.drafters import AnyDrafterConfig, Drafter, family_of
from spectrain.errors import SpectrainError
from spectrain.evaluation.acceptance import AcceptanceConfig, measure, teacher_forced_rows
from spectrain.evaluation.report import render_report
from spectrain.evaluation.summary import summarise
from spectrain.evaluation.workbench import device_name
from spectrain.files import atomic_folder, file_digest, write_json
from spectrain.regenerate import regenerate
from spectrain.target import Target, load_target
from spectrain.training import Trainer

LIBRARIES = ("spectrain", "torch", "transformers", "accelerate", "tokenizers")


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


def evaluate_bundle(bundle: Path, target: Target, conversations: Sequence[Conversation], config: AcceptanceConfig,
                    output: Path, *, traffic: str, baselines: Sequence[AnyDrafterConfig] = (),
                    progress: bool = True) -> Path:  # fmt: skip
    """Measure a bundle beside plain decoding and baselines; the path of ``acceptance.json`` (reports beside it)."""
    drafter, contents, notes = load_drafter(bundle, target)
    for note in notes:
        print(f"note: {note}", flush=True)
    family = contents.manifest.drafter["type"]
    drafters: dict[str, Drafter] = {b.type: family_of(b)(b) for b in baselines} | {family: drafter}
    identity = {
        "weights": contents.manifest.target.weights_digest,
        "bundle": contents.manifest.files["model.safetensors"],
        "baselines": [b.model_dump(mode="json") for b in baselines],
    }
    raw = output / "evaluation"
    samples = measure(target, drafters, conversations, config, raw, identity, progress=progress)
    context = _context(target, contents, config, samples, traffic, conversations, raw)
    context["teacher_forced"] = teacher_forced_rows(raw, sorted({s["conversation"] for s in samples}))
    document = summarise(samples, context=context)
    path = output / "acceptance.json"
    write_json(path, document)
    render_report(path, output)
    return path


def _holds(folder: Path, source: Path) -> bool:
    """Whether every file of ``source`` is in ``folder`` as it is there."""
    names = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    return all((folder / n).is_file() and file_digest(folder / n) == file_digest(source / n) for n in names)


def _context(target: Target, contents: BundleContents, config: AcceptanceConfig, samples: Sequence[dict[str, Any]],
             traffic: str, conversations: Sequence[Conversation], raw: Path) -> dict[str, Any]:  # fmt: skip
    manifest = contents.manifest
    measured_threads = json.loads((raw / "samples.json").read_text(encoding="utf-8"))["threads"]
    measured = {sample["conversation"] for sample in samples}
    return {
        # A local path says where the model lay on this machine, not what it is.
        "target": {"name": Path(target.name).name if Path(target.name).exists() else target.name,
                   "architecture": manifest.target.architecture, "weights": manifest.target.weights_digest},
        "drafter": {"name": manifest.drafter["type"], **{k: v for k, v in manifest.drafter.items() if k != "type"},
                    **({"tap_layers": list(manifest.taps)} if manifest.taps else {})},
        "traffic": {"name": traffic, "conversations": len(measured),
                    "digest": conversations_digest([c for c in conversations if c.id in measured])},
        "device": {"name": device_name(target.device), "threads": measured_threads,
                   "dtype": str(target.dtype).removeprefix("torch.")},
        "versions": {name: version(name) for name in LIBRARIES},
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }  # fmt: skip

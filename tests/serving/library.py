"""A visit to the public speculators library, in the server's environment: python -P library.py JOB RESULT.

Knows nothing of spectrain. It loads an EAGLE-3 folder that was made elsewhere; and it makes one of its own for the same
target, by its own conventions, trains it for some steps and saves it. Of both it says what they draft.

A job has ``target`` and ``folder`` (what to load), ``saved`` (where to save), ``rows`` (token ids), ``depths`` and
``steps``; the result has the files with ``tokens`` [depths, T - 1] and ``logits`` [depths, T - 1, D] of every row:
position t is fed with the target's feature of token t and the embedding of token t + 1, depth d drafts token t + 2 + d.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

ATTENTION = "eager"  # the library's own is for accelerators


class Features:
    """The target's streams for every row: those that enter its layers, and the last one before the final norm."""

    def __init__(self, target: str, rows: list[list[int]]) -> None:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        last: list[Tensor] = []
        model.model.norm.register_forward_pre_hook(lambda _, arguments: last.append(arguments[0]))
        self.rows = [torch.tensor([row]) for row in rows]
        with torch.no_grad():
            self.streams = [model(row, output_hidden_states=True).hidden_states for row in self.rows]
        self.last = last

    def of(self, row: int, layers: list[int]) -> dict[str, Tensor]:
        """What the library's forward takes: token t + 1 beside the feature of token t."""
        ids = self.rows[row][:, 1:]
        taps = torch.cat([self.streams[row][layer] for layer in layers], dim=-1)
        return {"hidden_states": taps[:, :-1], "input_ids": ids, "document_ids": torch.zeros_like(ids)}


def load(folder: str) -> Eagle3DraftModel:
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = ATTENTION
    return Eagle3DraftModel.from_pretrained(folder, config=config).eval()


def make(job: dict[str, Any], vocabulary: tuple[Tensor, Tensor]) -> Eagle3DraftModel:
    """A new drafter, as the library's own training makes it."""
    torch.manual_seed(0)
    d2t, t2d = vocabulary
    layer = AutoConfig.from_pretrained(job["target"])
    layer.num_hidden_layers = 1
    return Eagle3DraftModel.from_training_args(
        layer, t2d=t2d, d2t=d2t, draft_vocab_size=d2t.numel(), norm_before_residual=False, ttt_steps=job["depths"],
        verifier_name_or_path=job["target"], draft_attn_impl=ATTENTION,
    )  # fmt: skip


def train(model: Eagle3DraftModel, features: Features, depths: int, steps: int) -> None:
    """Some steps of the library's own loss, a row each."""
    loss = resolve_loss_config("kl_div", "eager")
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    for step in range(steps):
        row = step % len(features.rows)
        batch = features.of(row, model.target_layer_ids)
        mask = torch.ones_like(batch["input_ids"], dtype=torch.bool)
        _, value, _ = model(**batch, loss_mask=mask, verifier_last_hidden_states=features.last[row][:, 1:],
                            ttt_steps=depths, loss_config=loss)  # fmt: skip
        optimizer.zero_grad()
        value.backward()
        optimizer.step()


def drafts(model: Eagle3DraftModel, features: Features, depths: int) -> dict[str, Tensor]:
    """Tokens and logits of every row."""
    found, heard = {}, list[Tensor]()
    model.eval()
    handle = model.lm_head.register_forward_hook(lambda _, __, logits: heard.append(logits[0]))
    for row in range(len(features.rows)):
        heard.clear()
        with torch.no_grad():
            model(**features.of(row, model.target_layer_ids), ttt_steps=depths)
        logits = torch.stack(heard)
        columns = logits.argmax(-1)
        found[f"{row} logits"], found[f"{row} tokens"] = logits, columns + model.d2t[columns]
    handle.remove()
    return found


def visit(job: dict[str, Any], place: Path) -> dict[str, Any]:
    features = Features(job["target"], job["rows"])
    result = {"speculators": version("speculators")}
    theirs = load(job["folder"])
    vocabulary = (theirs.d2t.clone(), theirs.t2d.clone())
    save_file(drafts(theirs, features, job["depths"]), place / "loaded.safetensors")
    own = make(job, vocabulary)
    train(own, features, job["depths"], job["steps"])
    own.save_pretrained(job["saved"])
    save_file(drafts(own, features, job["depths"]), place / "saved.safetensors")
    return result


if __name__ == "__main__":
    place = Path(sys.argv[2])
    answer = visit(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), place.parent)
    place.write_text(json.dumps(answer), encoding="utf-8")

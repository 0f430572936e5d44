"""Rows written during training: the right share of them, the right text, and the same rows after any interruption."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from families import TRAINABLE, named, small_config
from processes import run_script
from pydantic import ValidationError

from spectrain.data.batches import live_batch
from spectrain.data.conversations import Conversation, EncodedRow, Message, render_prompt
from spectrain.decoding import generate_batch
from spectrain.decoding.requests import stream_seed
from spectrain.decoding.unverified import draft_text
from spectrain.drafters import family_of
from spectrain.drafters.objective import LossConfig
from spectrain.drafters.scoring import score_batch
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler
from spectrain.on_policy import OnPolicyConfig, Pool, Prompts, training_prompts
from spectrain.schedule import Curriculum
from spectrain.shapes import Chain
from spectrain.training import OptimConfig, Trainer, TrainingConfig

pytestmark = pytest.mark.usefixtures("one_accelerator")

ROOM = 18  # tokens of a micro-batch
TIMES = {"seconds", "tokens_per_second", "peak_memory"}
CONFIGS = {named(kind): small_config(kind, depths=2, heads=3) for kind in TRAINABLE}


@pytest.fixture(scope="module")
def lab(tiny_target, make_rows, make_store, tmp_path_factory):
    """A target, features of 8 training rows, and a trainer over them with on-policy rows."""

    class Lab:
        def __init__(self) -> None:
            self.folder = tmp_path_factory.mktemp("lab")
            self.target = tiny_target("llama", dtype=torch.float32, eos=2)
            self.rows = make_rows(self.target, 8, answer=(10, 12))
            self.heldout_rows = make_rows(self.target, 4, seed=1)
            self.stores = {
                taps: tuple(
                    make_store(self.folder / "-".join(map(str, (side, *taps))), self.target, rows, taps)
                    for side, rows in (("train", self.rows), ("heldout", self.heldout_rows))
                )
                for taps in {config.taps(self.target) for config in CONFIGS.values()}
            }
            self.prompts = {row.conversation: row.ids[: row.mask.index(1)] for row in self.rows}

        def trainer(self, folder: Path, family: str = "language_model", *, on_policy: dict[str, Any],
                    prompts: Prompts | None = None, optim: dict[str, Any] | None = None,
                    **config: Any) -> Trainer:  # fmt: skip
            torch.manual_seed(0)
            drafter = family_of(CONFIGS[family]).build(CONFIGS[family], self.target, torch.ones(24, dtype=torch.long))
            train, heldout = self.stores[CONFIGS[family].taps(self.target)]
            live = OnPolicyConfig(**{"max_new_tokens": 8, "k": 3, **on_policy})
            defaults = {"micro_batch_tokens": ROOM, "validate_every": 100, "checkpoint_every": 6, "epochs": 2}
            return Trainer(
                drafter, self.target.head, train, heldout, loss=LossConfig(), folder=folder, settings={},
                optim=OptimConfig(**{"lr": 1e-3, "clip": 1e9, **(optim or {})}),
                config=TrainingConfig(**{**defaults, "on_policy": live, **config}),
                save_bundle=lambda path: path.mkdir(),
                prompts=prompts or Prompts(self.target, self.prompts, 64),
            )  # fmt: skip

    return Lab()


def metrics(folder: Path) -> list[dict[str, Any]]:
    def timeless(values: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in values.items() if name not in TIMES}
        return {name: timeless(value) if isinstance(value, dict) else value for name, value in kept.items()}

    return [timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.drafter.state_dict().items()}


def written(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted((folder / "on_policy").iterdir())}


def texts_of(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {row["conversation"]: [i for i, m in zip(row["ids"], row["mask"], strict=True) if m] for row in rows}


# --- the share ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25, 0.3, 0.5, 0.75, 0.9])
@pytest.mark.parametrize(("processes", "accumulation"), [(1, 1), (2, 1), (1, 4), (3, 2)])
def test_the_share_of_all_micro_batches_is_kept_after_every_step(share, processes, accumulation):
    on_policy = OnPolicyConfig(share=share)
    config = TrainingConfig(micro_batch_tokens=24, epochs=4, accumulation=accumulation, on_policy=on_policy)
    curriculum = Curriculum([5 + row % 7 for row in range(120)], config, processes)
    steps = list(curriculum.steps(0))
    prepared = live = 0
    for step in steps:
        assert step.on_policy.start == live
        prepared, live = prepared + len(step.batches), step.on_policy.stop
        assert live <= Fraction(str(share)) * (prepared + live) < live + 1
    assert list(curriculum.steps(7)) == steps[7:]
    plain = Curriculum(curriculum.lengths, config.model_copy(update={"on_policy": None}), processes)
    assert [step.batches for step in steps] == [step.batches for step in plain.steps(0)]
    assert not any(step.on_policy for step in plain.steps(0))


def test_two_processes_plan_what_one_does_with_twice_the_accumulation():
    def plan(processes: int, accumulation: int) -> list[Any]:
        config = TrainingConfig(micro_batch_tokens=24, accumulation=accumulation, on_policy=OnPolicyConfig(share=0.3))
        return list(Curriculum([5 + row % 7 for row in range(40)], config, processes).steps(0))

    assert plan(2, 3) == plan(1, 6)


def test_the_rows_of_a_pool_all_come_before_any_comes_again(lab):
    pool = Pool(lab.rows, 7, 2 * ROOM, 0)
    batches = [pool.micro_batch(7 + number) for number in range(12)]
    seen = [row.conversation for batch in batches for row in batch]
    for turn in range(2):
        assert sorted(seen[8 * turn : 8 * (turn + 1)]) == sorted(row.conversation for row in lab.rows)
    assert seen[:8] != seen[8:16]
    assert Pool(lab.rows, 7, 2 * ROOM, 0).micro_batch(16) == batches[9]  # whatever was asked before


def test_all_prompts_are_answered_in_turn(lab, tmp_path):
    on_policy = lab.trainer(tmp_path, on_policy={"chats": 5}).on_policy
    seen = [chat for generation in range(8) for chat in on_policy._chats(generation)]
    for turn in range(5):
        assert sorted(seen[8 * turn : 8 * (turn + 1)]) == sorted(lab.prompts)
    assert seen[:8] != seen[8:16]


# --- the rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("prefixes", ["draft", "rounds"])
def test_rows_are_the_prompts_and_what_was_written_with_the_weights_of_then(lab, tmp_path, family, prefixes):
    settings = {"prefixes": prefixes, "refresh": 5, "chats": 6}
    trainer = lab.trainer(tmp_path, family, on_policy=settings, keep=9, checkpoint_every=4)
    before: list[dict[str, torch.Tensor]] = []
    step = trainer._step

    def watched(batches: Any, number: int) -> Any:
        assert trainer.drafter.training
        if number in (1, 6):
            before.append(weights(trainer))
        return step(batches, number)

    trainer._step = watched  # type: ignore[method-assign]
    trainer.run()
    files = written(tmp_path)
    assert list(files) == ["step-000001.json", "step-000006.json", "step-000011.json", "step-000016.json"]
    drafter = trainer.drafter.eval()
    for file, state in zip(("step-000001.json", "step-000006.json"), before, strict=True):
        drafter.load_state_dict(state)
        found = files[file]
        chats = trainer.on_policy._chats((found["step"] - 1) // 5)
        prompts = [lab.prompts[chat] for chat in chats]
        options = {
            "sampler": Sampler(1.0),
            "max_new_tokens": 8,
            "seeds": [stream_seed(0, found["step"], n) for n in range(6)],
        }
        if prefixes == "draft":
            want = draft_text(lab.target, drafter, prompts, k=3, **options)
        else:
            runs = generate_batch(lab.target, drafter, prompts, shape=Chain(3), **options)
            want = [run.tokens for run in runs]
        long_enough = {c: text for c, text in zip(chats, want, strict=True) if len(text) >= drafter.shifts()[0]}
        assert texts_of(found["rows"]) == long_enough
        for row in found["rows"]:
            prompt = lab.prompts[row["conversation"]]
            assert row["ids"][: len(prompt)] == prompt
            assert row["mask"] == [0] * len(prompt) + [1] * (len(row["ids"]) - len(prompt))
    recorded = [values.get("on_policy") for values in metrics(tmp_path)]
    assert [number for number, values in enumerate(recorded, 1) if values] == [1, 6, 11, 16]
    first = files["step-000001.json"]["rows"]
    assert recorded[0] == {
        "rows": len(first), "tokens": sum(sum(row["mask"]) for row in first), "too_short": 6 - len(first),
        "prompts_left_out": 0,
    }  # fmt: skip
    timed = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 < timed["on_policy"]["seconds"] < timed["seconds"]


def test_on_policy_positions_count_in_the_loss_with_the_target_s_law_on_them(lab, tmp_path):
    """A step over a prepared row given as numbers has the gradients of the same row computed live."""
    gradients = []
    for live in (False, True):
        AcceleratorState._reset_state(True)
        trainer = lab.trainer(tmp_path / str(live), "eagle3", on_policy={"share": 0.5})
        step = trainer.optimizer.step

        def keeps(trainer: Trainer = trainer, step: Any = step) -> None:
            gradients.append(torch.cat([p.grad.flatten() for p in trainer.parameters]))
            step()

        trainer.optimizer.step = keeps
        values = trainer._step([[0], [lab.rows[1]] if live else [1]], 1)
        assert values["supervised"] == sum(sum(row.mask) - 1 for row in lab.rows[:2])
        assert values["padding"] == 0
    assert (gradients[0] - gradients[1]).norm() < 1e-6 * gradients[0].norm()


def test_prompts_without_room_are_left_out_and_counted(lab, tmp_path):
    prompts = {"short": [3, 4, 5], "long": [3] * 11}
    trainer = lab.trainer(tmp_path, on_policy={}, prompts=Prompts(lab.target, prompts, 64))
    assert (list(trainer.on_policy.prompts), trainer.on_policy.left_out) == (["short"], 1)
    AcceleratorState._reset_state(True)
    with pytest.raises(SpectrainError, match=r"none of the 2 training prompts .* within data\.max_length, 10"):
        lab.trainer(tmp_path, on_policy={}, prompts=Prompts(lab.target, prompts, 10))


def test_a_generation_without_enough_tokens_is_an_error(lab, tmp_path):
    with pytest.raises(SpectrainError, match=r"nothing to train on in the 4 on-policy rows of step 1: none has 2"):
        lab.trainer(tmp_path, "eagle3", on_policy={"chats": 4, "max_new_tokens": 1}).run()


def test_a_chain_that_is_longer_than_the_drafter_goes_is_refused(lab, tmp_path):
    with pytest.raises(SpectrainError, match=r"k=4 has depth 4, training\.on_policy: medusa drafts at most 3"):
        lab.trainer(tmp_path, "medusa", on_policy={"k": 4})


def test_rounds_at_temperature_0_are_refused_with_the_reason():
    with pytest.raises(ValidationError, match=r"repeat the target's greedy answers"):
        OnPolicyConfig(prefixes="rounds", sampler=Sampler())
    assert OnPolicyConfig(prefixes="draft", sampler=Sampler()).sampler.greedy


def test_prompts_are_rendered_up_to_the_last_answer(chat_target):
    turns = (Message("user", "hello"), Message("assistant", "ll"), Message("user", "123"), Message("assistant", "12"))
    chats = [Conversation("a", turns), Conversation("b", turns[:1])]
    prompts = training_prompts(OnPolicyConfig(), chat_target, chats, 50)
    tokenizer = chat_target.tokenizer
    assert prompts.ids == {"a": render_prompt(turns[:3], tokenizer), "b": render_prompt(turns[:1], tokenizer)}
    assert training_prompts(None, chat_target, chats, 50) is None


# --- interruptions --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What no code handles."""


REFRESH = {"refresh": 4, "chats": 5, "share": 0.4}


@pytest.fixture(scope="module", params=["language_model", "eagle3"])
def unbroken(request, lab, tmp_path_factory):
    """16 steps, a checkpoint every 6, new rows before steps 1, 5, 9 and 13."""
    folder = tmp_path_factory.mktemp("unbroken")
    AcceleratorState._reset_state(True)
    trainer = lab.trainer(folder, request.param, on_policy=REFRESH)
    trainer.run()
    return request.param, weights(trainer), metrics(folder), written(folder)


@pytest.mark.parametrize("stops", [(1,), (5,), (7,), (9,), (13,), (4, 12, 16)])
@pytest.mark.parametrize("when", ["before the rows", "after the rows"])
def test_an_interrupted_run_ends_bit_equal_to_the_unbroken_one(lab, tmp_path, unbroken, stops, when):
    """Killed in a step where new rows are due, before or after they were written, or between two."""
    family, final, recorded, files = unbroken
    for stop in stops:
        trainer = lab.trainer(tmp_path, family, on_policy=REFRESH)
        name = "_write" if when == "before the rows" else "_step"
        whole = getattr(trainer, name)

        def dies(*arguments: Any, whole: Any = whole, stop: int = stop) -> Any:
            if stop in (getattr(arguments[-1], "number", None), arguments[-1]):
                raise Killed
            return whole(*arguments)

        setattr(trainer, name, dies)
        with pytest.raises(Killed):
            trainer.run()
        AcceleratorState._reset_state(True)
    trainer = lab.trainer(tmp_path, family, on_policy=REFRESH)
    torch.manual_seed(1234)  # whatever happened before
    trainer.run()
    assert {name: value.tolist() for name, value in weights(trainer).items()} == {
        name: value.tolist() for name, value in final.items()
    }
    assert metrics(tmp_path) == recorded
    assert written(tmp_path) == files


def test_rows_stay_as_long_as_a_checkpoint_could_go_on_with_them(unbroken):
    """When those of step 13 were written, checkpoints 6 and 12 were there: the first goes on at step 7, with rows of
    step 5, the second at step 13. Nothing needs those of steps 1 and 9 any more."""
    _, _, _, files = unbroken
    assert list(files) == ["step-000005.json", "step-000013.json"]


def test_missing_rows_are_an_error_and_other_settings_another_run(lab, tmp_path):
    trainer = lab.trainer(tmp_path, on_policy=REFRESH)
    trainer._step, step = lambda b, n: 1 / 0 if n == 8 else step(b, n), trainer._step  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    for change, message in (
        ({"share": 0.5}, r"on_policy\.share: 0\.4 against 0\.5"),
        ({"seed": 1}, r"on_policy\.seed"),
    ):
        AcceleratorState._reset_state(True)
        with pytest.raises(SpectrainError, match=message):
            lab.trainer(tmp_path, on_policy={**REFRESH, **change}).run()
    AcceleratorState._reset_state(True)
    fewer = Prompts(lab.target, dict(list(lab.prompts.items())[:-1]), 64)
    with pytest.raises(SpectrainError, match=r"chats that on-policy rows begin with \(data\.train\): .* against"):
        lab.trainer(tmp_path, on_policy=REFRESH, prompts=fewer).run()
    AcceleratorState._reset_state(True)
    (tmp_path / "on_policy" / "step-000005.json").unlink()
    with pytest.raises(SpectrainError, match=r"on-policy rows .*step-000005\.json are missing"):
        lab.trainer(tmp_path, on_policy=REFRESH).run()


# --- it trains ------------------------------------------------------------------------------------------------------


def on_its_own_text(lab: Any, trainer: Trainer) -> float:
    """Acceptance probability at T=1 along what the drafter writes by itself."""
    drafter, prompts = trainer.drafter.eval(), [ids for ids in lab.prompts.values() for _ in range(4)]
    seeds = range(100, 100 + len(prompts))
    texts = draft_text(lab.target, drafter, prompts, sampler=Sampler(1.0), k=3, max_new_tokens=12, seeds=seeds)
    rows = [
        EncodedRow("", "all", prompt + text, [0] * len(prompt) + [1] * len(text))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    scores = score_batch(drafter, live_batch(lab.target, rows), lab.target.head, 1)
    drafter.train()
    return scores.mean_alpha()[0]


@pytest.mark.parametrize("prefixes", ["draft", "rounds"])
def test_the_loss_falls_and_the_draft_comes_closer_on_its_own_text(lab, tmp_path, prefixes):
    settings = {"prefixes": prefixes, "refresh": 10, "chats": 8, "share": 0.5}
    trainer = lab.trainer(
        tmp_path, on_policy=settings, epochs=20, micro_batch_tokens=4 * ROOM, optim={"lr": 5e-3, "clip": 0.5},
        checkpoint_every=1000, validate_every=1000,
    )  # fmt: skip
    before = on_its_own_text(lab, trainer)
    trainer.run()
    losses = [values["loss"] for values in metrics(tmp_path)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert on_its_own_text(lab, trainer) > before + 0.1


# --- several processes ----------------------------------------------------------------------------------------------

WORKER = """
import sys
from pathlib import Path
tests, lab, out, accumulation, prompts, sides = sys.argv[1:]
sys.path.insert(0, tests)
import json
import torch
from tiny import build_target
from spectrain.data.features import INDEX, FeatureStore
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.drafters.objective import LossConfig
from spectrain.drafters.scoring import score_batch
from spectrain.on_policy import OnPolicyConfig, Prompts
from spectrain.training import OptimConfig, Trainer, TrainingConfig

torch.set_num_threads(1)
target = build_target("llama", dtype=torch.float32, eos=2)
torch.manual_seed(0)
drafter = LanguageModelDrafter.build(LanguageModelConfig(layers=(0, 4)), target, torch.ones(24, dtype=torch.long))
stores = [FeatureStore(Path(lab, side), json.loads(Path(lab, side, INDEX).read_text())["key"])
          for side in json.loads(sides)]
on_policy = OnPolicyConfig(share=0.4, refresh=2, chats=5, max_new_tokens=8, k=3)
trainer = Trainer(drafter, target.head, *stores, loss=LossConfig(), optim=OptimConfig(lr=1e-3), folder=Path(out),
    settings={}, prompts=Prompts(target, json.loads(prompts), 64),
    config=TrainingConfig(micro_batch_tokens=18, accumulation=int(accumulation), epochs=2, validate_every=5,
                          checkpoint_every=7, on_policy=on_policy),
    save_bundle=lambda path: path.mkdir())
trainer.run()
"""


@pytest.mark.slow
def test_two_processes_write_and_train_as_one_does(lab, tmp_path):
    """5 chats over two processes, and steps whose on-policy micro-batches do not divide by two."""
    taps = CONFIGS["language_model"].taps(lab.target)
    sides = json.dumps(["-".join(map(str, (side, *taps))) for side in ("train", "heldout")])
    for processes, accumulation in ((1, "4"), (2, "2")):
        out = tmp_path / str(processes)
        run_script(WORKER, out, [str(lab.folder), str(out), accumulation, json.dumps(lab.prompts), sides], processes)
    assert written(tmp_path / "1") == written(tmp_path / "2")
    one, two = metrics(tmp_path / "1"), metrics(tmp_path / "2")
    assert len(one) == len(two) == 4
    for a, b in zip(one, two, strict=True):
        assert (a["supervised"], a.get("on_policy")) == (b["supervised"], b.get("on_policy"))
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["gradient_norm"] == pytest.approx(a["gradient_norm"], rel=1e-3)

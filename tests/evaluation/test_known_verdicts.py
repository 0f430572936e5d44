"""Verdicts that are known beforehand, from the whole measurement: real decoding, and a clock that counts forwards.

Each drafter's acceptance is certain, for it knows the target's answers, or is the target; what drafting a token costs
is so many forwards; and a forward takes as long as `FORWARD` says, on whatever machine. So it is known whether a
drafter pays, at which length, and by how much.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from tiny import save_chat_model

from spectrain.bundle import Belonging, load_drafter, save_drafter
from spectrain.data.conversations import Conversation, parse_conversation, render_prompt
from spectrain.decoding import generate_plain
from spectrain.decoding.trace import Clock
from spectrain.drafters.base import Drafter, Proposal
from spectrain.drafters.language_model import LanguageModelConfig, LanguageModelDrafter
from spectrain.evaluation import bundles, entrants
from spectrain.evaluation.contenders import AcceptanceConfig
from spectrain.evaluation.document import read_document
from spectrain.exact.sampler import Sampler
from spectrain.target import Target, load_target

LAYERS, TOKENS = 2, 17
FORWARD, MORE, LOOK = 1.0, 0.05, 0.01  # seconds of a forward of one token, of each further one, of a look at the clock
GREEDY, WARM = Sampler(), Sampler(1.0)
NAME = "language_model"  # what the bundle's drafter is called, whoever stands in for it
PARTS = ("draft", "verify", "overhead")
Answers = Mapping[tuple[int, ...], list[int]]


class Costly(Drafter):
    """Another drafter, each token of which takes the time of so many forwards of the target more."""

    def __init__(self, drafter: Any, target: Target, forwards: float) -> None:
        self.drafter, self.model, self.forwards, self.owed = drafter, target.model, forwards, 0.0
        self.config, self.tap_layers = drafter.config, drafter.tap_layers

    def start(self, first):
        return self.drafter.start(first)

    def observe(self, state, committed):
        self.drafter.observe(state, committed)

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        proposal = self.drafter.propose(state, sampler, shape, limits, uniforms_BN)
        self.owed += self.forwards * proposal.tokens_BN.shape[1]
        for _ in range(int(self.owed)):
            self.model(proposal.tokens_BN[:, :1])
        self.owed -= int(self.owed)
        return proposal

    def select(self, state, rows):
        self.drafter.select(state, rows)


class Knowing(Drafter):
    """Drafts what the target will answer, token by token until ``right`` of them, and then anything else.

    ``answers``: what the target answers to each prompt; of those in ``strange`` no token is right.
    """

    def __init__(self, config: Any, answers: Answers, *, right: int = 1000, strange: Answers | None = None) -> None:
        self.config, self.answers, self.right, self.strange = config, answers, right, strange or {}

    def start(self, first):
        return [[token] for token in first]

    def observe(self, state, committed):
        for text, tokens in zip(state, committed.tokens, strict=True):
            text += tokens

    def propose(self, state, sampler, shape, limits, uniforms_BN):
        return Proposal(torch.tensor([self._draft(text, shape.length) for text in state]))

    def select(self, state, rows):
        state[:] = [state[row] for row in rows]

    def _draft(self, text: list[int], length: int) -> list[int]:
        prompt = next(known for known in self.answers if tuple(text[: len(known)]) == known)
        following = [*prompt, *self.answers[prompt], *[0] * length][len(text) : len(text) + length]
        right = 0 if prompt in self.strange else self.right
        return [token if i < right else 1 - min(token, 1) for i, token in enumerate(following)]


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A target of some size, and a bundle whose drafter is the target itself."""
    folder = tmp_path_factory.mktemp("big")
    target = load_target(str(save_chat_model(folder / "target", layers=LAYERS)))
    config = LanguageModelConfig(layers=tuple(range(LAYERS)))
    drafter = LanguageModelDrafter.build(config, target, torch.zeros(target.vocab_size, dtype=torch.long))
    save_drafter(folder / "bundle", drafter, Belonging.to(target))
    return target, folder / "bundle"


def chats(*kinds: str) -> list[Conversation]:
    """Eight of each kind."""
    rows = [{"id": f"{kind}-{i}", "kind": kind, "prompt": f"{kind}: {i} + {i}?"} for kind in kinds for i in range(8)]
    return [parse_conversation(row, "row") for row in rows]


@pytest.fixture
def answered(big):
    """What the target answers to chats, by their prompts."""
    target, _ = big
    target.tap(())

    def answered(conversations: Sequence[Conversation]) -> Answers:
        prompts = [render_prompt(chat, target.tokenizer) for chat in conversations]
        runs = [generate_plain(target, ids, sampler=GREEDY, max_new_tokens=TOKENS) for ids in prompts]
        assert {len(run.tokens) for run in runs} == {TOKENS}
        return {tuple(ids): run.tokens for ids, run in zip(prompts, runs, strict=True)}

    return answered


@pytest.fixture
def counted(monkeypatch):
    """Time passes with every forward of any model, and a little with every look at the clock."""
    now = 0.0

    def forward(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal now
        if isinstance(module, torch.nn.Embedding):  # of which every model has one
            now += FORWARD + MORE * (inputs[0].shape[-1] - 1)

    def look(clock: Clock) -> float:
        nonlocal now
        now += LOOK
        return now

    monkeypatch.setattr(Clock, "_now", look)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(forward)
    yield
    hook.remove()


@pytest.fixture
def evaluated(big, tmp_path, monkeypatch, counted):
    """A drafter in the place of the bundle's, measured as ``spectrain evaluate`` measures; the document, the report."""
    target, bundle = big

    def evaluated(stand_in: Callable[[Any], Drafter], conversations: Sequence[Conversation], k: tuple[int, ...],
                  samplers: tuple[Sampler, ...] = (GREEDY,)) -> tuple[dict[str, Any], str]:  # fmt: skip
        def load(*arguments: Any) -> Any:
            drafter, *rest = load_drafter(*arguments)
            return stand_in(drafter), *rest

        monkeypatch.setattr(entrants, "load_drafter", load)
        config = AcceptanceConfig(k=k, samplers=samplers, max_new_tokens=TOKENS, seeds=1)
        path = bundles.evaluate_bundle(
            bundle, target, bundles.Asked(conversations, config, tmp_path, traffic="known", progress=False)
        )
        return read_document(path), (tmp_path / "report.md").read_text(encoding="utf-8")

    return evaluated


def tokens_per_round(contenders: Sequence[dict[str, Any]], kind: str | None = None) -> dict[int, float]:
    numbers = {c["k"]: c["pooled"] if kind is None else c["by_kind"][kind] for c in contenders}
    return {k: found["tokens_per_round"]["value"] for k, found in numbers.items()}


def yields(contenders: Sequence[dict[str, Any]], tokens: Mapping[int, float]) -> dict[int, float]:
    """Tokens of a round for each plain step that it was measured to cost, by length."""
    costs = {c["k"]: c["pooled"]["cost"] for c in contenders}
    return {k: tokens[k] / sum(cost[f"{part}_cost_per_round"] for part in PARTS) for k, cost in costs.items()}


@pytest.mark.parametrize(
    ("right", "forwards", "tokens", "best"),
    [
        (1000, 0.0, {1: 2.0, 3: 4.0, 8: 8.0}, 8),  # of 16 tokens the second round of nine yields seven
        (3, 0.2, {1: 2.0, 3: 4.0, 8: 4.0}, 3),  # longer drafts cost more, and the fourth token is always wrong
    ],
    ids=["perfect", "three tokens deep"],
)
def test_a_drafter_that_knows_the_answers_is_on_with_the_right_k(
    big, answered, evaluated, right, forwards, tokens, best
):
    conversations = chats("a")
    answers = answered(conversations)

    def stand_in(drafter: Any) -> Drafter:
        return Costly(Knowing(drafter.config, answers, right=right), big[0], forwards)

    document, text = evaluated(stand_in, conversations, tuple(tokens))
    (block,) = document["samplers"]
    _, *drafting = block["contenders"]
    verdict = block["verdict"]["overall"]
    assert tokens_per_round(drafting) == tokens
    assert (verdict["decision"], verdict["contender"], verdict["k"]) == ("on", f"{NAME} k={best}", best)
    found = yields(drafting, tokens)
    assert found[best] == max(found.values())
    round_costs = FORWARD + (MORE + forwards * FORWARD) * best
    assert verdict["best"]["decode_speedup"]["value"] == pytest.approx(tokens[best] * FORWARD / round_costs, rel=0.06)
    assert verdict["adjusted"]["low"] > 1.2
    assert [found["equal"] for found in block["exactness"]] == [8, 8, 8]
    assert f"Turn it on: {NAME} k={best}." in text


def test_a_drafter_that_costs_more_than_it_saves_is_off_however_right(big, evaluated):
    """It is the target itself, so that nothing is ever rejected, and each token costs two of its forwards."""
    document, text = evaluated(lambda drafter: Costly(drafter, big[0], 1.0), chats("a"), (3,), (GREEDY, WARM))
    for block in document["samplers"]:
        numbers, verdict = block["contenders"][1]["pooled"], block["verdict"]["overall"]
        assert [row["rate"] for row in numbers["marginal_survival"]] == [1.0] * 3
        assert numbers["cost"]["draft_cost_per_token"] > 1.5
        assert (verdict["decision"], verdict["k"], verdict["reason"]) == ("off", 0, "slower than plain decoding")
        assert verdict["best"]["decode_speedup"]["high"] < 0.8  # 4 tokens for 3 · 2 + v steps
        # 4 tokens are worth 4 steps, of which v and what a round costs besides leave less than one a token.
        assert "a draft cost below 0." in verdict["would_change"]
        assert "α above" not in verdict["would_change"]  # there is none above 1
        assert f"**{block['name']}: Leave it off.**" in text


def test_a_drafter_of_one_domain_is_on_there_and_off_elsewhere(big, answered, evaluated):
    conversations = chats("a", "b")
    answers, strange = answered(conversations), answered(chats("b"))
    document, text = evaluated(
        lambda drafter: Costly(Knowing(drafter.config, answers, strange=strange), big[0], 0.2), conversations, (3,)
    )
    (block,) = document["samplers"]
    verdict = block["verdict"]
    assert [tokens_per_round(block["contenders"][1:], kind) for kind in ("a", "b")] == [{3: 4.0}, {3: 1.0}]
    there, elsewhere, overall = verdict["by_kind"]["a"], verdict["by_kind"]["b"], verdict["overall"]
    assert (there["decision"], there["k"]) == ("on", 3)
    assert there["best"]["decode_speedup"]["low"] > 1.2
    assert (elsewhere["decision"], elsewhere["k"], elsewhere["reason"]) == ("off", 0, "slower than plain decoding")
    assert elsewhere["best"]["decode_speedup"]["high"] < 0.7
    # Two tokens, one of each kind: 1/4 and 1 of a round that costs more than 1.6 steps.
    assert overall["decision"] == "off"
    assert overall["best"]["tokens_per_round"]["value"] == 1.6
    assert re.search(rf"By kind: on for a \({NAME} k=3, [12]\.\d\d×\); off for b\.", text)

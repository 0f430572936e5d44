"""Speculative decoding of one request: draft, verify, commit, until the answer ends or the budget does.

The output has the target's law exactly, whatever the drafter proposes (2211.17192, 2302.01318): ``spectrain.exact``
decides what is kept, and p, residual and bonus all come from the same sampler.

Shapes: K proposed tokens of this round, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from spectrain.cache import rollback
from spectrain.decoding.requests import check_request, uniform_stream
from spectrain.decoding.trace import Clip, Clock, Generation, Round
from spectrain.drafters.base import Drafter, Proposal
from spectrain.errors import SpectrainError
from spectrain.exact.sampler import Sampler, draw
from spectrain.exact.verify.chain import verify_chain
from spectrain.target import Features, Target


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    sampler: Sampler,
    draft_length: int,
    max_new_tokens: int,
    eos_ids: Collection[int] | None = None,
    seed: int = 0,
) -> Generation:
    """Decode at most ``max_new_tokens`` tokens after ``prompt_ids``, drafting ``draft_length`` a round.

    Stops with (and keeps) the first EOS; ``eos_ids`` defaults to the target's. The last round drafts no more than the
    budget can still hold. At T=0 the tokens equal ``generate_plain``'s (up to ties of floating point); at T>0 they have
    the same law, under another use of the random stream.
    """
    check_request(target, prompt_ids, max_new_tokens)
    if draft_length < 1:
        raise SpectrainError(f"draft_length is {draft_length}; expected 1 or more (use generate_plain for none)")
    target.tap(drafter.tap_layers)
    session = _Session(target, drafter, sampler, set(target.eos_ids if eos_ids is None else eos_ids), seed)
    clock, result = session.clock, session.result
    if max_new_tokens > 0:
        session.prefill(prompt_ids)
    while result.finished != "eos" and len(result.tokens) < max_new_tokens:
        session.round(draft_length, max_new_tokens - len(result.tokens))
    result.total_s = clock.total()
    return result


class _Session:
    """One request on its way: the target's cache holds every committed token but the last, which is pending."""

    def __init__(self, target: Target, drafter: Drafter, sampler: Sampler, eos: set[int], seed: int) -> None:
        self.target, self.drafter, self.sampler, self.eos = target, drafter, sampler, eos
        self.cache, self.state = target.new_cache(), drafter.start()
        self.uniforms, self.clock, self.result = uniform_stream(seed), Clock(target.device), Generation()
        self.committed = 0
        self.pending: Tensor

    def prefill(self, prompt_ids: Sequence[int]) -> None:
        ids_1T = torch.tensor([list(prompt_ids)], device=self.target.device)
        features = self.target.forward(ids_1T, cache=self.cache)
        p_V = self.sampler.probabilities(self.target.logits(features.hidden_BTH[0, -1]))
        self.pending = draw(p_V, self._uniforms(1)[0])
        self.committed = len(prompt_ids)
        token = int(self.pending)
        self.result.prefill_s = self.clock.lap()
        self.drafter.observe(self.state, [*prompt_ids, token], features)
        self._keep([token])

    def round(self, draft_length: int, budget: int) -> None:
        asked = min(draft_length, budget - 1)  # the repair or bonus token takes the last place
        self.clock.lap()
        proposal = self._propose(asked)
        self.result.draft_s += self.clock.lap()
        features, logits_KV = self._verify_forward(proposal.tokens_K)
        self.result.verify_s += self.clock.lap()
        accepted, token = self._verdict(proposal, logits_KV)
        kept = [*proposal.tokens_K[:accepted].tolist(), int(token)]
        self.pending = token
        self.committed += 1 + accepted
        rollback(self.cache, self.committed)
        self.clock.lap()
        self.drafter.observe(self.state, kept, features[: 1 + accepted])
        self.result.draft_s += self.clock.lap()
        count = self._keep(kept)
        # A round that ends the answer is set apart wherever in it EOS stood: setting apart only those that were cut
        # short would leave out just the ends that were drafted right.
        ended: Clip | None = "eos" if self.result.finished == "eos" else None
        clipped: Clip | None = ended or ("budget" if asked < draft_length else None)
        # Accepted draft tokens behind an EOS were never part of the answer.
        self.result.rounds.append(Round(proposal.tokens_K.numel(), min(accepted, count), count, clipped))

    def _uniforms(self, count: int) -> Tensor:
        return self.uniforms(count).to(self.target.device)

    def _propose(self, length: int) -> Proposal:
        if length == 0:
            return Proposal(torch.empty(0, dtype=torch.long, device=self.target.device), None)
        proposal = self.drafter.propose(self.state, self.sampler, length, self._uniforms(length))
        if proposal.tokens_K.numel() > length:
            raise SpectrainError(
                f"{type(self.drafter).__name__} proposed {proposal.tokens_K.numel()} tokens, expected at most "
                f"{length}: more could exceed the budget or the target's context"
            )
        return Proposal(proposal.tokens_K.to(self.target.device), proposal.q_KV)

    def _verify_forward(self, tokens_K: Tensor) -> tuple[Features, Tensor]:
        features = self.target.forward(torch.cat([self.pending.view(1), tokens_K])[None], cache=self.cache)
        return features, self.target.logits(features.hidden_BTH[0])

    def _verdict(self, proposal: Proposal, logits_KV: Tensor) -> tuple[int, Tensor]:
        p_1KV = self.sampler.probabilities(logits_KV)[None]
        q_1KV = None if proposal.q_KV is None else proposal.q_KV[None]
        count = proposal.tokens_K.numel()
        verdict = verify_chain(p_1KV, q_1KV, proposal.tokens_K[None], self._uniforms(count + 1)[None])
        return int(verdict.accepted[0]), verdict.token[0]

    def _keep(self, tokens: list[int]) -> int:
        """Append up to and including the first EOS; how many were kept."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos), None)
        if end is not None:
            self.result.finished = "eos"
        kept = tokens[:end]
        self.result.tokens.extend(kept)
        return len(kept)

"""Speculative decoding of a batch of requests: draft, verify, commit, until each answer ends.

The output has the target's law exactly, whatever the drafter proposes (2211.17192, 2302.01318): ``spectrain.exact``
decides what is kept, and p, residual and bonus all come from the same sampler. A request's output does not depend on
its companions: it has its own stream of uniforms, of which every round consumes the same number.

Shapes: B requests still running, T positions, N proposed nodes, M = N + 1 rows of a round (the pending token first),
U uniforms of a round, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectrain.cache import last_positions, right_padded
from spectrain.decoding.outcome import Outcome, check_finite, evaluate
from spectrain.decoding.requests import Options, check_request, uniform_stream
from spectrain.decoding.stopping import Finish
from spectrain.decoding.trace import Clock, Generation, Judged, Observer, Round
from spectrain.decoding.verification import Verification, check_verification, is_lossy
from spectrain.drafters.base import Committed, Drafter, Proposal
from spectrain.errors import SpectrainError
from spectrain.exact.penalties import Penalties
from spectrain.exact.sampler import Sampler, draw
from spectrain.shapes import Chain, Shape, check_shape
from spectrain.target import Features, Target


@dataclass(frozen=True)
class Emitted:
    """New tokens of one request, and whether they are its last."""

    request: int
    tokens: list[int]
    finished: Finish | None


def generate(target: Target, drafter: Drafter | None, prompt_ids: Sequence[int], *, seed: int = 0,
             **settings: Any) -> Generation:  # fmt: skip
    """Decode one request; ``settings`` are those of ``Decoding``."""
    return generate_batch(target, drafter, [prompt_ids], seeds=[seed], **settings)[0]


def generate_batch(target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], *,
                   seeds: Sequence[int], **settings: Any) -> list[Generation]:  # fmt: skip
    """Decode every prompt at once, in order; ``settings`` are those of ``Decoding``."""
    decoding = Decoding(target, drafter, prompts, seeds=seeds, **settings)
    for _ in decoding:
        pass
    return decoding.results


class Decoding:
    """A batch of requests on its way. Iterating runs it, and gives what each round committed; ``results`` fills.
    Iterating again goes on where it stopped, and several may take turns on one target.

    At T=0 the tokens equal ``generate_plain``'s (up to ties of floating point); at T>0 they have the same law, under
    another use of the random stream. ``drafter`` None decodes plainly. ``shape`` is asked of the drafter each round;
    near the end of a budget less, so that the repair or bonus token always has room. ``eos_ids`` defaults to the
    target's. ``timed=False`` does not wait for the device between the parts of a round; then only totals are true.
    ``observer`` is shown every round behind its last reading of the clock, so that no seconds hold its work.

    Raises SpectrainError for requests that cannot be served, before anything is computed.
    """

    def __init__(self, target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], *, sampler: Sampler,
                 max_new_tokens: int, seeds: Sequence[int], shape: Shape | None = None,
                 verification: Verification = "token", eos_ids: Collection[int] | None = None, min_new_tokens: int = 0,
                 stop: str | Sequence[str] = (), penalties: Penalties | None = None,
                 timed: bool = True, observer: Observer | None = None) -> None:  # fmt: skip
        if len(seeds) != len(prompts):
            raise SpectrainError(f"{len(prompts)} prompts and {len(seeds)} seeds; expected one seed for each prompt")
        for seed in seeds:
            if type(seed) is not int or not 0 <= seed < 2**63:
                raise SpectrainError(f"seed {seed!r}: expected a whole number from 0 to 2^63 - 1")
        for prompt in prompts:
            check_request(target, prompt, max_new_tokens)
        self.shape = _checked(drafter, shape, verification)
        self.target, self.drafter = target, drafter
        self._options = Options.of(target, sampler, max_new_tokens, eos_ids, min_new_tokens, stop, verification,
                                   penalties)  # fmt: skip
        self._history = self._options.history(prompts)
        self._prompts = [list(prompt) for prompt in prompts]
        lossy = drafter is not None and is_lossy(verification)
        self.results = [Generation(text="" if self._options.stop else None, lossy=lossy) for _ in prompts]
        self._running = list(range(len(prompts))) if max_new_tokens else []
        self._cache, self._started, self._broken = target.new_cache(len(prompts)), False, False
        self._endings = [self._options.stopping() for _ in prompts]
        self._streams = [uniform_stream(seed) for seed in seeds]
        self._clock, self._observer = Clock(target.device, exact=timed), observer

    @torch.inference_mode()
    def __iter__(self) -> Iterator[list[Emitted]]:
        while self._running:
            if self._broken:
                raise SpectrainError("a round of this decoding was interrupted, so it cannot go on; start it again")
            self.target.tap(self.drafter.tap_layers if self.drafter else ())  # another may have had its own meanwhile
            self._broken = True
            emitted = self._round() if self._started else self._prefill()
            self._broken = False
            yield emitted

    def _prefill(self) -> list[Emitted]:
        self._clock.lap()
        counts = [len(prompt) for prompt in self._prompts]
        features = self.target.forward(right_padded(self._prompts, self.target.device), cache=self._cache)
        self._cache.rollback(counts)
        hidden_B1H = last_positions(features.hidden_BTH, counts)
        number_B1, history = torch.zeros(len(counts), 1, dtype=torch.long), self._history
        behind = (history.prompt_BV[:, None], history.answer_BV[:, None]) if history else None
        p_B1V = self._options.law(self.target.logits(hidden_B1H), number_B1, behind)
        first = draw(p_B1V[:, 0], self._uniforms(1)[:, 0])
        check_finite(bool(hidden_B1H.isfinite().all() & p_B1V.isfinite().all()), self.target)
        self._started = True
        emitted = self._keep([[token] for token in first.tolist()])
        target_s = self._clock.lap()
        if self.drafter is not None:
            self._state = self.drafter.start([prompt[0] for prompt in self._prompts])
        rows = self._drop_finished(emitted)
        tokens = [self._prompts[i][1:] + self.results[i].tokens for i in self._running]
        self._observe(tokens, lambda: _rows(features, rows))
        draft_s = self._clock.lap()
        held = self._cache.bytes()
        for result in self.results:
            result.prefill_s, result.prefill_draft_s, result.total_s = target_s, draft_s, target_s + draft_s
            result.cache_bytes = held
        return emitted

    def _round(self) -> list[Emitted]:
        running, clock = list(self._running), self._clock
        clock.lap()
        limits = [self._endings[i].left - 1 for i in running]  # the last place is the target's own
        uniforms_BU = self._uniforms(2 * self._nodes + 1)
        proposal = self._propose(limits, uniforms_BU[:, : self._nodes])
        draft_s = clock.lap()
        pending = [self.results[i].tokens[-1] for i in running]
        produced = [self._endings[i].count for i in running]
        outcome = evaluate(self.target, self._cache, self._options, self.shape, pending, produced, limits, proposal,
                           uniforms_BU[:, self._nodes :], clock, self._history,
                           keep_laws=self._observer is not None)  # fmt: skip
        emitted = self._keep(outcome.tokens)
        rows = self._drop_finished(emitted)
        other_s = clock.lap()
        self._observe([outcome.tokens[row] for row in rows], lambda: outcome.kept_features(rows), outcome.answers(rows))
        draft_s += clock.lap()
        self._book(emitted, outcome, limits, draft_s, draft_s + outcome.target_s + outcome.other_s + other_s)
        if self._observer is not None and outcome.p_BMV is not None:  # the next round starts its clock anew
            self._observer(Judged(running, outcome.p_BMV, proposal, outcome.nodes, outcome.paths,
                                  [len(event.tokens) for event in emitted]))  # fmt: skip
        return emitted

    def _book(self, emitted: Sequence[Emitted], outcome: Outcome, limits: Sequence[int], draft_s: float,
              total_s: float) -> None:  # fmt: skip
        """Add a round to the trace of each request that was in it."""
        held = self.drafter.memory(self._state) if self.drafter is not None else 0
        cached = self._cache.bytes()
        for row, event in enumerate(emitted):
            result, count = self.results[event.request], len(event.tokens)
            # Accepted draft tokens behind an end were never part of the answer.
            accepted, clipped = min(len(outcome.paths[row]), count), _clip(event.finished, limits[row] < self._depth)
            result.rounds.append(Round(outcome.depths[row], accepted, count, clipped, outcome.nodes[row],
                                       draft_s, outcome.target_s, total_s))  # fmt: skip
            result.total_s += total_s
            result.state_bytes, result.cache_bytes = max(result.state_bytes, held), max(result.cache_bytes, cached)

    @property
    def stop(self) -> tuple[str, ...]:
        """The stop strings."""
        return self._options.stop

    # --- parts ------------------------------------------------------------------------------------------------

    @property
    def _depth(self) -> int:
        return self.shape.depth if self.drafter is not None else 0

    @property
    def _nodes(self) -> int:
        return self.shape.nodes if self.drafter is not None else 0

    def _uniforms(self, count: int) -> Tensor:
        """Every request's next uniforms [B, count], from its own stream."""
        return torch.stack([self._streams[i](count) for i in self._running]).to(self.target.device)

    def _propose(self, limits: Sequence[int], uniforms_BN: Tensor) -> Proposal:
        if self.drafter is None or not any(limits):
            empty_B0 = torch.empty(len(self._running), 0, dtype=torch.long, device=self.target.device)
            return Proposal(empty_B0)
        proposal = self.drafter.propose(self._state, self._options.sampler, self.shape, limits, uniforms_BN)
        if proposal.tokens_BN.shape[1] > self._nodes:
            raise SpectrainError(
                f"{self.drafter.name} proposed {proposal.tokens_BN.shape[1]} tokens, expected at most "
                f"{self._nodes} ({self.shape.describe()})"
            )
        return proposal

    def _keep(self, tokens: list[list[int]]) -> list[Emitted]:
        """Append what belongs to each running request's answer."""
        emitted = []
        for i, new in zip(self._running, tokens, strict=True):
            ending, result = self._endings[i], self.results[i]
            kept = ending.keep(new)
            result.tokens.extend(kept)
            if ending.finished:
                result.finished, result.text = ending.finished, ending.text if ending.stop else None
            emitted.append(Emitted(i, kept, ending.finished))
        if self._history:
            self._history.add([event.tokens for event in emitted])
        return emitted

    def _drop_finished(self, emitted: Sequence[Emitted]) -> list[int]:
        """Finished requests leave the batch; the rows that stay."""
        rows = [row for row, event in enumerate(emitted) if not event.finished]
        if rows and len(rows) < len(emitted):
            self._cache.select(rows)
            if self._history:
                self._history.select(rows)
            if self.drafter is not None:
                self.drafter.select(self._state, rows)
        self._running = [self._running[row] for row in rows]
        return rows

    def _observe(self, tokens: list[list[int]], features: Callable[[], Features],
                 answers: list[list[int]] | None = None) -> None:  # fmt: skip
        if self.drafter is not None and tokens:
            tokens_BT = right_padded(tokens, self.target.device)
            kept = features()[: tokens_BT.shape[1]]
            self.drafter.observe(self._state, Committed(tokens, tokens_BT, kept, answers))


def _checked(drafter: Drafter | None, shape: Shape | None, verification: Verification) -> Shape:
    if shape is not None and not isinstance(shape, Shape):
        raise SpectrainError(f"shape {shape!r}: expected a Chain, a StaticTree or a DynamicTree, for instance Chain(5)")
    check_verification(verification, shape or Chain(1))
    if drafter is None:
        return Chain(1)  # never asked for
    if shape is None:
        raise SpectrainError("a drafter needs a shape to fill; give shape=Chain(5), for instance")
    check_shape(shape, deepest=drafter.deepest, columns=drafter.columns, trees=drafter.trees, name=drafter.name)
    return shape


def _clip(finished: Finish | None, cut_short: bool) -> Finish | None:
    # A round that ends the answer is set apart wherever in it the end stood: setting apart only those that were cut
    # short would leave out just the ends that were drafted right.
    if finished in ("eos", "stop"):
        return finished
    return "budget" if cut_short else None


def _rows(features: Features, rows: Sequence[int]) -> Features:
    if len(rows) == len(features.hidden_BTH):
        return features
    return Features(features.hidden_BTH[list(rows)], features.taps_BTF[list(rows)])

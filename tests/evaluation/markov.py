"""A world whose every figure is known: Markov targets and drafters, one pair a domain, decoded with the real kernel.

A conversation draws a domain; its answers (one a seed) start in state START and end with EOS or at the budget. What a
report says of it has a true value, the ratio of two expectations over conversations, and dynamic programming over
(tokens left, last token) finds it.

Shapes: D domains, V tokens, B answers, C conversations, S seeds, K draft length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spectrain.exact.sampler import draw
from spectrain.exact.verify.chain import verify_chain

Floats = npt.NDArray[np.float64]
EOS = 0
DRAFT, VERIFY, PREFILL = 0.12, 1.3, 3.0  # plain decoding steps


@dataclass(frozen=True)
class World:
    """Laws of the next token, target's and drafter's [D, V, V], of the first token [D, V], and domains' shares [D]."""

    p_DVV: Floats
    q_DVV: Floats
    first_DV: Floats
    share_D: Floats
    k: int = 3
    budget: int = 25

    @property
    def alpha_DV(self) -> Floats:
        """The acceptance probability after each token."""
        return np.minimum(self.p_DVV, self.q_DVV).sum(-1)


def build(seed: int = 0, vocabulary: int = 5, mix: tuple[float, ...] = (0.15, 0.4, 0.75), ends: float = 0.04,
          **settings: int) -> World:  # fmt: skip
    """Random chains; ``mix`` is how much of each domain's drafter is another chain, ``ends`` how likely EOS is."""
    rng = np.random.default_rng(seed)
    domains = len(mix)

    def chains() -> Floats:
        rows = rng.dirichlet(np.full(vocabulary - 1, 0.7), size=(domains, vocabulary))
        end = rng.uniform(0.5, 1.5, size=(domains, vocabulary, 1)) * ends
        return np.concatenate([end, (1 - end) * rows], -1)

    p_DVV, other_DVV = chains(), chains()
    mix_D11 = np.array(mix)[:, None, None]
    share_D = np.array([0.5, 0.3, 0.2][:domains])
    return World(p_DVV, (1 - mix_D11) * p_DVV + mix_D11 * other_DVV, p_DVV[:, EOS], share_D / share_D.sum(), **settings)


# --- what is true -------------------------------------------------------------------------------------------------


def truths(world: World) -> dict[str, float]:
    """The true value of every figure, by the names of ``figures``."""
    sums: dict[str, float] = {}
    for domain, share in enumerate(world.share_D):
        for name, value in (_decoded(world, domain) | _plain(world, domain)).items():
            sums[name] = sums.get(name, 0.0) + share * value
    return {name: _ratio(sums, ratio) for name, ratio in figures(world.k).items()}


Ratio = tuple[str, str] | tuple[str, str, str, str]


def figures(k: int) -> dict[str, Ratio]:
    """Each figure as its sums above and below the line; of a speedup, plain decoding's too."""
    places = range(1, k + 1)
    return {
        "tokens per round": ("committed", "rounds"),
        "tokens per full round": ("full committed", "full"),
        "accepted prefix": ("full accepted", "full"),
        **{f"share of prefixes of {i}": (f"ended {i}", "full") for i in range(k + 1)},
        **{f"survival {i}": (f"reached {i}", "full") for i in places},
        **{f"conditional {i}": (f"reached {i}", f"tested {i}") for i in places},
        "alpha, target-sampled": ("plain alpha", "plain rounds"),
        **{f"alpha visited {i}": (f"alpha {i}", f"visited {i}") for i in places},
        "coverage": ("covered", "plain rounds"),
        "decode speedup": ("committed", "seconds", "plain rounds", "plain seconds"),
        "total speedup": ("tokens", "total", "plain tokens", "plain total"),
    }


def _ratio(sums: dict[str, Any], names: Ratio) -> Any:
    value = sums[names[0]] / sums[names[1]]
    return value if len(names) == 2 else value / (sums[names[2]] / sums[names[3]])


COVERED = 3  # a draft vocabulary of the first tokens


def _plain(world: World, domain: int) -> dict[str, float]:
    """Expected sums of plain decoding, a token a round after the first."""
    p, alpha = world.p_DVV[domain], world.alpha_DV[domain]
    state, rounds, accepted, covered = world.first_DV[domain].copy(), 0.0, 0.0, 0.0
    for _ in range(world.budget - 1):
        alive = state.copy()
        alive[EOS] = 0.0
        rounds += alive.sum()
        accepted += alive @ alpha
        state = alive @ p
        covered += state[:COVERED].sum()
    return {"plain alpha": accepted, "plain rounds": rounds, "covered": covered, "plain seconds": rounds,
            "plain tokens": 1 + rounds, "plain total": PREFILL + rounds}  # fmt: skip


def _decoded(world: World, domain: int) -> dict[str, float]:
    """Expected sums of speculative decoding: visits to (tokens left, last token), and what a round there yields."""
    k, size = world.k, world.p_DVV.shape[-1]
    names = {name for ratio in figures(k).values() for name in ratio} | {"proposed"}
    sums = {name: 0.0 for name in names if not name.startswith("plain") and name != "covered"}
    visits = np.zeros((world.budget, size))
    visits[world.budget - 1] = world.first_DV[domain]
    for left in range(world.budget - 1, 0, -1):
        for token in range(1, size):
            if visits[left, token]:
                _round(world, domain, left, token, visits, sums)
    sums["seconds"] = VERIFY * sums["rounds"] + DRAFT * sums["proposed"]
    sums |= {"tokens": 1 + sums["committed"], "total": PREFILL + sums["seconds"]}
    return sums


def _round(world: World, domain: int, left: int, token: int, visits: Floats, sums: dict[str, float]) -> None:
    p, q, alpha = world.p_DVV[domain], world.q_DVV[domain], world.alpha_DV[domain]
    proposed = min(world.k, left - 1)
    weight = visits[left, token]
    sums["rounds"] += weight
    sums["proposed"] += weight * proposed
    at = np.zeros(len(p))  # mass of paths that were accepted so far and have not ended, by their last token
    at[token] = weight
    for accepted in range(proposed + 1):
        last = accepted == proposed
        if not last:
            sums[f"visited {accepted + 1}"] += at.sum()
            sums[f"alpha {accepted + 1}"] += at @ alpha
        final = at @ (p if last else np.maximum(p - q, 0.0))  # the repair's or the bonus's law, with its mass
        sums["committed"] += (accepted + 1) * final.sum()
        visits[left - accepted - 1, 1:] += final[1:]
        if proposed == world.k:  # not cut short by the budget, nor by EOS
            _full(accepted, world.k, final[1:].sum(), sums)
        if not last:
            at = at @ np.minimum(p, q)
            sums["committed"] += (accepted + 1) * at[EOS]  # a draft that ends the answer
            at[EOS] = 0.0


def _full(accepted: int, k: int, mass: float, sums: dict[str, float]) -> None:
    sums["full"] += mass
    sums["full committed"] += (accepted + 1) * mass
    sums["full accepted"] += accepted * mass
    sums[f"ended {accepted}"] += mass
    for i in range(1, k + 1):
        sums[f"reached {i}"] += mass * (accepted >= i)
        sums[f"tested {i}"] += mass * (accepted >= i - 1)


# --- what is measured ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """Sums of B answers by name, and the rounds of the first ``kept`` of them as a decoder records them."""

    sums_B: dict[str, Floats]
    rounds: list[list[list[Any]]]
    domain_B: npt.NDArray[np.int64]


def decode(world: World, domain_B: npt.NDArray[np.int64], seed: int, kept: int = 0) -> Answers:
    """Speculative and plain decoding of one answer each."""
    generator = torch.Generator().manual_seed(seed)
    spoken = _speculate(world, torch.from_numpy(domain_B), generator, kept)
    plain = _speak(world, torch.from_numpy(domain_B), generator)
    return Answers({name: sums.numpy() for name, sums in (spoken[0] | plain).items()}, spoken[1], domain_B)


def _uniforms(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def _speak(world: World, domain_B: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    p, alpha = torch.from_numpy(world.p_DVV), torch.from_numpy(world.alpha_DV)
    count = len(domain_B)
    token_B = draw(torch.from_numpy(world.first_DV)[domain_B], _uniforms(generator, count))
    names = ("plain alpha", "plain rounds", "covered")
    sums = {name: torch.zeros(count, dtype=torch.float64) for name in names}
    for _ in range(world.budget - 1):
        alive_B = (token_B != EOS).double()
        next_B = draw(p[domain_B, token_B], _uniforms(generator, count))
        sums["plain alpha"] += alive_B * alpha[domain_B, token_B]
        sums["plain rounds"] += alive_B
        sums["covered"] += alive_B * (next_B < COVERED)
        token_B = torch.where(alive_B > 0, next_B, EOS)
    rounds_B = sums["plain rounds"]
    return sums | {"plain seconds": rounds_B, "plain tokens": 1 + rounds_B, "plain total": PREFILL + rounds_B}


def _speculate(world: World, domain_B: torch.Tensor, generator: torch.Generator,
               kept: int) -> tuple[dict[str, torch.Tensor], list[list[list[Any]]]]:  # fmt: skip
    p, q = torch.from_numpy(world.p_DVV), torch.from_numpy(world.q_DVV)
    alpha, k = torch.from_numpy(world.alpha_DV), world.k
    everyone, rounds = len(domain_B), [[] for _ in range(kept)]
    names = {name for ratio in figures(k).values() for name in ratio} | {"proposed"}
    sums = {n: torch.zeros(everyone, dtype=torch.float64) for n in names if not n.startswith("plain")}
    token_B = draw(torch.from_numpy(world.first_DV)[domain_B], _uniforms(generator, everyone))
    left_B = torch.full((everyone,), world.budget - 1)
    running = (token_B != EOS).nonzero()[:, 0]
    while len(running):
        domain, token, left = domain_B[running], token_B[running], left_B[running]
        count, length = len(running), (left - 1).clamp(max=k)
        before, drafted = [token], []
        for _ in range(k):
            drafted.append(draw(q[domain, before[-1]], _uniforms(generator, count)))
            before.append(drafted[-1])
        before_BK, drafted_BK = torch.stack(before, 1), torch.stack(drafted, 1)
        verdict = verify_chain(p[domain[:, None], before_BK], q[domain[:, None], before_BK[:, :k]], drafted_BK,
                               _uniforms(generator, count, k + 1), length)  # fmt: skip
        place = torch.arange(k + 1)
        accepted = verdict.accepted
        path = torch.cat([drafted_BK, torch.zeros(count, 1, dtype=torch.long)], 1)
        path = torch.where(place == accepted[:, None], verdict.token[:, None], path)
        ended = (path == EOS) & (place <= accepted[:, None])
        stop = torch.where(ended.any(1), ended.long().argmax(1), k + 1)
        committed = torch.minimum(accepted + 1, stop + 1)
        eos, short = ended.any(1), length < k
        _count(sums, running, committed, accepted, length, ~eos & ~short, k)
        for i in range(k):  # tested: all before it accepted, and none of them the end
            tested = (accepted >= i) & (length > i) & (stop >= i)
            sums[f"visited {i + 1}"][running] += tested.double()
            sums[f"alpha {i + 1}"][running] += tested * alpha[domain, before_BK[:, i]]
        for row, number in enumerate(running[running < kept].tolist()):
            clip = "eos" if eos[row] else "budget" if short[row] else None
            found = [int(t[row]) for t in (length, torch.minimum(accepted, committed), committed)]
            rounds[number].append([*found, clip, found[0]])
        token_B[running] = path.gather(1, (committed - 1)[:, None])[:, 0]
        left_B[running] -= committed
        running = running[~eos & (left > committed)]
    sums["seconds"] = VERIFY * sums["rounds"] + DRAFT * sums["proposed"]
    return sums | {"tokens": 1 + sums["committed"], "total": PREFILL + sums["seconds"]}, rounds


def _count(sums: dict[str, torch.Tensor], running: torch.Tensor, committed: torch.Tensor, accepted: torch.Tensor,
           length: torch.Tensor, full: torch.Tensor, k: int) -> None:  # fmt: skip
    def add(name: str, amount: torch.Tensor) -> None:
        sums[name][running] += amount.double()

    add("rounds", torch.ones_like(committed))
    add("committed", committed)
    add("proposed", length)
    add("full", full)
    add("full committed", full * committed)
    add("full accepted", full * accepted)
    for i in range(k + 1):
        add(f"ended {i}", full & (accepted == i))
    for i in range(1, k + 1):
        add(f"reached {i}", full & (accepted >= i))
        add(f"tested {i}", full & (accepted >= i - 1))

"""Losses: values by hand, the mask of every depth, and how much each depth counts."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from spectrain.losses import (
    LOSSES,
    Laws,
    LossName,
    depth_weights,
    forward_kl,
    mixture,
    pace_weights,
    supervised,
    total_variation,
)

N, D = 23, 11


def shown(mask: Tensor) -> str:
    return "".join("1" if value else "0" for value in mask.tolist())


# --- positions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shift", "want"), [(1, "00011100"), (2, "00011000"), (3, "00010000"), (4, "00000000"), (9, "00000000")]
)
def test_the_mask_moves_with_the_token_that_is_predicted(shift, want):
    """A small draft has shift 1, EAGLE and Medusa have shift 2 + depth."""
    answer = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 0]])
    assert shown(supervised(answer, shift)[0]) == want


def test_no_position_reaches_from_one_answer_into_the_next():
    answer = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    assert [shown(supervised(answer, shift)[0]) for shift in (1, 2, 3)] == ["11011110", "10011100", "00011000"]


def test_the_mask_by_its_definition_on_random_rows():
    generator = torch.Generator().manual_seed(0)
    answer = torch.rand(50, 12, generator=generator) < 0.7
    for shift in range(1, 6):
        want = [[t + shift < 12 and all(row[t + 1 : t + shift + 1].tolist()) for t in range(12)] for row in answer]
        assert supervised(answer, shift).tolist() == want


def test_depth_weights():
    assert depth_weights(3, 0.5) == [1.0, 0.5, 0.25]
    assert depth_weights(1, 0.8) == [1.0]


# --- the functions --------------------------------------------------------------------------------------------------


def test_values_by_hand():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    z, log_p = q.log() + 3.0, p.log()  # logits are laws up to a constant
    assert Laws(z, log_p).acceptance.tolist() == pytest.approx([0.75])
    assert total_variation(Laws(z, log_p)).tolist() == pytest.approx([0.25])
    assert forward_kl(Laws(z, log_p)).tolist() == pytest.approx([1.75 * math.log(2)])
    divergence = forward_kl(Laws(z, log_p)) - forward_kl(Laws(log_p, log_p))
    assert divergence.item() == pytest.approx(0.25 * math.log(2))  # KL(p||q)


def test_the_other_divergences_by_hand():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    z, log_p = q.log() - 1.0, p.log()
    assert LOSSES["reverse_kl"](Laws(z, log_p)).tolist() == pytest.approx([0.25 * math.log(2)])
    halves = 0.5 * (0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)) * 2
    assert LOSSES["jensen_shannon"](Laws(z, log_p)).tolist() == pytest.approx([halves])
    assert LOSSES["negative_log_acceptance"](Laws(z, log_p)).tolist() == pytest.approx([-math.log(0.75)])
    share = math.exp(-3 * 0.75)
    want = share * 1.75 * math.log(2) + (1 - share) * 0.25
    assert LOSSES["lk_hybrid"](Laws(z, log_p)).tolist() == pytest.approx([want])


def test_the_divergence_of_jensen_and_shannon_counts_what_no_column_covers():
    """All of p outside the columns: as far apart as laws can be."""
    log_p = torch.full((1, 2), -torch.inf)
    assert LOSSES["jensen_shannon"](Laws(torch.zeros(1, 2), log_p)).item() == pytest.approx(math.log(2))


def test_the_logarithm_of_acceptance_still_pulls_where_total_variation_does_not():
    log_p = torch.tensor([[0.0, -torch.inf]])
    z = torch.tensor([[-20.0, 0.0]], requires_grad=True)
    pulls = [torch.autograd.grad(LOSSES[n](Laws(z, log_p)).sum(), z)[0].abs().max().item()
             for n in ("total_variation", "negative_log_acceptance")]  # fmt: skip
    assert pulls[0] < 1e-7
    assert pulls[1] == pytest.approx(1.0, abs=1e-3)


def test_the_share_of_the_hybrid_is_not_differentiated():
    log_p = torch.tensor([[0.7, 0.2, 0.1]]).log()
    z = torch.tensor([[0.1, 0.4, -0.3]], requires_grad=True)
    share = math.exp(-3 * Laws(z, log_p).acceptance.item())
    grads = {n: torch.autograd.grad(LOSSES[n](Laws(z, log_p)).sum(), z)[0]
             for n in ("forward_kl", "total_variation", "lk_hybrid")}  # fmt: skip
    torch.testing.assert_close(grads["lk_hybrid"], share * grads["forward_kl"] + (1 - share) * grads["total_variation"])


def test_every_loss_can_be_chosen():
    assert set(get_args(LossName)) == set(LOSSES)


def test_mass_outside_the_columns_counts_as_rejected_and_pulls_at_nothing():
    """The law keeps its full-vocabulary normaliser: half of it lies outside these two columns."""
    log_p = torch.tensor([[0.3, 0.2]]).log()
    z = torch.zeros(1, 2, requires_grad=True)
    assert Laws(z, log_p).acceptance.item() == pytest.approx(0.5)
    (gradient,) = torch.autograd.grad(forward_kl(Laws(z, log_p)).sum(), z)
    assert gradient[0].tolist() == pytest.approx([0.5 * 0.5 - 0.3, 0.5 * 0.5 - 0.2])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_is_finite_and_never_prefers_another_law(name):
    """Also where the target's law has exact zeros (padded vocabulary rows) or is one-hot."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, D, generator=generator)
    logits[:, -2:] = -torch.inf
    logits[0, 1:] = -torch.inf
    log_p = logits.log_softmax(-1)
    z = torch.randn(40, D, generator=generator).requires_grad_()
    values = LOSSES[name](Laws(z, log_p))
    (gradient,) = torch.autograd.grad(values.sum(), z)
    assert values.shape == (40,), f"{name} gives one number a position"
    assert values.isfinite().all(), f"{name} is not finite where p is 0"
    assert gradient.isfinite().all(), f"the gradient of {name} is not finite where p is 0"
    best = LOSSES[name](Laws(log_p.clamp(min=-1e4), log_p))
    at = int((best - values).argmax())
    assert (values >= best - 1e-6).all(), (
        f"{name} has to be smallest at q = p: it is {float(best[at]):.4f} there, {float(values[at]):.4f} at another q"
    )


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("z", [[0.0, -200.0], [-200.0, 0.0], [0.0, -1e4], [100.0, -100.0]])
@pytest.mark.parametrize("p", [[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])
def test_every_loss_is_finite_with_its_gradient_where_q_underflows(name, z, p):
    """e^-200 is 0 in float32, where a root or a logarithm of q has no gradient; take log_q."""
    z_ND, log_p_ND = torch.tensor([z], requires_grad=True), torch.tensor([p]).log()
    value_N = LOSSES[name](Laws(z_ND, log_p_ND))
    (gradient,) = torch.autograd.grad(value_N.sum(), z_ND)
    assert value_N.isfinite().all(), f"{name} is {value_N.tolist()} where q underflows"
    assert gradient.isfinite().all(), f"the gradient of {name} is {gradient.tolist()} where q underflows: take log_q"


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_leads_to_the_law_that_it_is_given(name):
    """Adam on free logits, from laws that share little with the target's: the bound lies between what those reach that
    lead there (.005 at most) and the nearest of those that lead elsewhere (.2) or nowhere (.7)."""
    generator = torch.Generator().manual_seed(2)
    log_p = (2 * torch.randn(8, D, generator=generator)).log_softmax(-1)
    z = (2 * torch.randn(8, D, generator=generator)).requires_grad_()
    optimizer = torch.optim.Adam([z], lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 400)
    for _ in range(400):
        optimizer.zero_grad()
        LOSSES[name](Laws(z, log_p)).sum().backward()
        optimizer.step()
        schedule.step()
    far = float(1 - Laws(z.detach(), log_p).acceptance.min())
    assert far < 0.02, f"400 steps down {name} end at a total variation of {far:.3f} from the law: it leads elsewhere"


@pytest.mark.parametrize(
    "terms",
    [{name: 0.5 + number for number, name in enumerate(LOSSES)}, {"forward_kl": 0.3, "total_variation": 2.0},
     {"lk_hybrid": 0.7, "reverse_kl": 0.0}],
)  # fmt: skip
def test_a_mixture_is_the_sum_of_its_parts(terms):
    generator = torch.Generator().manual_seed(3)
    log_p = torch.randn(N, D, generator=generator).log_softmax(-1)[:, :-2]
    z = torch.randn(N, D - 2, generator=generator).requires_grad_()
    want = sum(weight * LOSSES[name](Laws(z, log_p)) for name, weight in terms.items())
    got = mixture(terms)(Laws(z, log_p))
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad((value * torch.arange(1.0, N + 1)).sum(), z)[0] for value in (got, want)]
    torch.testing.assert_close(*gradients)


def test_a_mixture_takes_each_law_once(monkeypatch):
    calls = []
    plain = torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda *a, **k: calls.append(1) or plain(*a, **k))
    mixture(dict.fromkeys(LOSSES, 1.0))(Laws(torch.zeros(2, 3), torch.full((2, 3), 1 / 3).log()))
    assert len(calls) == 1


# --- positions that pace themselves -----------------------------------------------------------------------------------


def test_pace_by_hand():
    """Three depths, then two: (0.5, 0.4, 0.2) reaches 0.5, 0.2, 0.04."""
    alpha = torch.tensor([[0.5, 0.4, 0.2], [0.5, 0.4, 0.9]])
    there = torch.tensor([[True, True, True], [True, True, False]])
    got = pace_weights(alpha, there, 0.0)
    assert got[0].tolist() == pytest.approx([0.74, 0.24, 0.04])
    assert got[1].tolist() == pytest.approx([0.7, 0.2, 0.0])
    smooth = pace_weights(alpha, there, 0.5)[0].tolist()  # 0.75, 0.7, 0.6
    assert smooth == pytest.approx([0.75 + 0.525 + 0.315, 0.525 + 0.315, 0.315])
    assert pace_weights(alpha, there, 1.0).tolist() == [[3.0, 2.0, 1.0], [2.0, 1.0, 0.0]]
    assert not pace_weights(alpha.requires_grad_(), there, 0.5).requires_grad

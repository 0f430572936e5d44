"""Logits to probabilities, and probabilities to a token. Nothing else in the package warps logits.

Speculative decoding is lossless only when p, q, the residual and the bonus token all come from the same
sampler (arXiv 2211.17192), so all of them call `Sampler.probabilities`.

Shapes: V vocabulary; `...` any leading dimensions.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spectrain.errors import SpectrainError

# Far below this, logits / temperature leave the range of float32; the law is the greedy one long before.
LOWEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sampler:
    """Temperature, then top-k, then top-p.

    temperature: 0 is the greedy law, a one-hot at the argmax (the lowest id on ties); else at least 1e-5.
    top_k: keep exactly this many tokens. top_p: keep the fewest tokens whose mass (after top-k) reaches this,
    never less than one. Both order tokens by logit, and equal logits by id: the lowest id is kept first.
    At temperature 0 neither changes anything.
    Raises SpectrainError for values outside these ranges.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        temperature, top_k, top_p = self.temperature, self.top_k, self.top_p
        if not _is_number(temperature) or not (temperature == 0 or temperature >= LOWEST_TEMPERATURE):
            raise SpectrainError(
                f"sampler temperature: found {temperature!r}, expected 0 (greedy) or a finite number "
                f"of at least {LOWEST_TEMPERATURE:g}; use 0 to decode greedily"
            )
        if top_k is not None and (type(top_k) is not int or top_k < 1):
            raise SpectrainError(
                f"sampler top_k: found {top_k!r}, expected a whole number of at least 1; "
                "leave it out to keep all tokens"
            )
        if top_p is not None and not (_is_number(top_p) and 0 < top_p <= 1):
            raise SpectrainError(
                f"sampler top_p: found {top_p!r}, expected 0 < top_p <= 1; leave it out to keep all tokens"
            )
        # 1 and 1.0 are one sampler: they must also be written (and digested) as one.
        object.__setattr__(self, "temperature", float(temperature))
        object.__setattr__(self, "top_p", None if top_p is None else float(top_p))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The next token's law [..., V] from logits [..., V]: float64 for float64 logits, else float32.

        Logits are finite or -inf (which gets exactly 0), with at least one finite value a row. They are not
        modified.
        """
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        if self.greedy:
            best = logits.argmax(-1, keepdim=True)  # the first index among equals
            value = logits.gather(-1, best).to(dtype)
            zero = value - value  # a row whose largest value is not finite must stay NaN, not become a law
            return zero.expand(logits.shape).clone().scatter_(-1, best, zero + 1)
        scaled = logits.to(dtype)
        if self.temperature != 1:
            scaled = scaled / self.temperature
        return self._truncated(scaled).softmax(-1)

    def _truncated(self, scaled: Tensor) -> Tensor:
        """-inf in place of everything that top-k and top-p drop.

        Both keep the first n tokens in the order (logit, id), so the n-th largest value decides; ids matter
        only among its equals. A top-k first makes top-p sort k values rather than the vocabulary.
        """
        vocabulary = scaled.shape[-1]
        top_k = min(self.top_k or vocabulary, vocabulary)
        top_p = 1.0 if self.top_p is None else self.top_p  # 1 drops nothing, however the tail rounds
        if top_k == vocabulary and top_p == 1:
            return scaled
        if top_k < vocabulary:
            ordered = scaled.topk(top_k, dim=-1).values
        else:
            ordered = scaled.sort(dim=-1, descending=True).values
        kept = torch.full_like(ordered[..., :1], top_k, dtype=torch.int64)
        if top_p < 1:
            mass = ordered.double().softmax(-1)
            before = mass.cumsum(-1) - mass
            # The first is always before top_p; only a row of NaN has none, and it must stay NaN.
            kept = (before < top_p).sum(-1, keepdim=True).clamp_(min=1)
        return torch.where(_first(scaled, ordered, kept), scaled, -torch.inf)

    def describe(self) -> str:
        """For people: "greedy (T=0)", "T=1", "T=0.7 top-k 50 top-p 0.9"."""
        if self.greedy:
            return "greedy (T=0)"
        top_k = "" if self.top_k is None else f" top-k {self.top_k}"
        top_p = "" if self.top_p is None else f" top-p {self.top_p:g}"
        return f"T={self.temperature:g}{top_k}{top_p}"


def forbid(logits: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """Logits [..., V] with -inf at these ids wherever ``where`` [...] is true: tokens that may not come yet.

    Part of the target's law, so it is applied to p before the sampler; a drafter need not know of it.
    """
    banned = where.unsqueeze(-1) & torch.ones_like(ids, dtype=torch.bool)
    return logits.index_copy(-1, ids, logits.index_select(-1, ids).masked_fill(banned, -torch.inf))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _first(scaled: Tensor, ordered: Tensor, kept: Tensor) -> Tensor:
    """A mask [..., V] of the first `kept` [..., 1] tokens by (value, id); `ordered`: the largest values."""
    threshold = ordered.gather(-1, kept - 1)
    above = (ordered > threshold).sum(-1, keepdim=True)
    equal = scaled == threshold
    return (scaled > threshold) | (equal & (equal.cumsum(-1, dtype=torch.int32) <= kept - above))


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids [...] by inverse CDF in float64, from weights [..., V] and uniforms [...] in [0, 1).

    The weights are finite, not negative, and need not be normalised: each row is scaled by its total, so
    float32 rows whose sum misses 1 lose no mass. An index of weight 0 is never returned (a row that is all
    zero gives 0). Give float64 uniforms: float32 ones cannot reach tokens rarer than 2^-24.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    # A parallel prefix sum may rise by a rounding error where the weight is 0: such places do not count.
    reached = cumulative.masked_fill_(probabilities <= 0, 0.0)
    total = reached.amax(-1)
    # A uniform that rounds to 1 must still fall inside the last token.
    target = torch.minimum(uniforms.double() * total, torch.nextafter(total, torch.zeros_like(total)))
    return (reached > target.unsqueeze(-1)).view(torch.uint8).argmax(-1)

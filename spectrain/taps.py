"""Which layers of the target a drafter reads.

Tap k is the residual stream *entering* decoder layer k (0 <= k < L), which is Hugging Face's ``hidden_states[k]`` and
vLLM's auxiliary layer id k.
"""

from __future__ import annotations

from collections.abc import Sequence

from spectrain.errors import SpectrainError

TAP_CONVENTION = "stream entering layer k (hidden_states[k])"


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high streams (2503.01840): layers 2, L//2 and L-3. Needs seven layers or more."""
    if num_layers < 7:
        # Offered, and not taken: servers know the default above alone, and these have to be told to them.
        instance = f", for instance [1, {num_layers // 2}, {num_layers - 1}]" if num_layers > 3 else ""
        raise SpectrainError(
            f"the default taps [2, L//2, L-3] need a target of at least 7 layers, this one has {num_layers}; "
            f"give three distinct ascending layers as drafter.tap_layers{instance}"
        )
    return (2, num_layers // 2, num_layers - 3)


def check_taps(taps: Sequence[int], num_layers: int, name: str = "taps") -> tuple[int, ...]:
    """Distinct ascending layers of the target, or an error that calls them by ``name``."""
    taps = tuple(taps)
    if list(taps) != sorted(set(taps)) or not taps or taps[0] < 0 or taps[-1] >= num_layers:
        raise SpectrainError(
            f"{name} {list(taps)} are not distinct ascending layers of a target with {num_layers} layers; "
            f"expected values from 0 to {num_layers - 1}: tap k is the {TAP_CONVENTION}"
        )
    return taps

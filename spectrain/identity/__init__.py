"""Identity: what makes a tokenizer or a target the same one, and what the first difference is.

*Decode identity* (which id is which token, what bytes it stands for, which ids are special) is what pairing
a drafter with a target needs: the two only exchange ids. *Traffic identity* adds everything that turns text
into ids (template, normalizer, pre-tokenizer, merges, flags), which training and reports need.
"""

from spectrain.identity.comparison import Comparison, common_prefix, compare, first_difference
from spectrain.identity.target import TargetIdentity, compare_targets, target_identity
from spectrain.identity.tokenizer import (
    DECODE_COMPONENTS,
    PROBES,
    TRAFFIC_COMPONENTS,
    TokenizerIdentity,
    check_rows,
    tokenizer_identity,
    tokenizer_size,
)

__all__ = [
    "DECODE_COMPONENTS",
    "PROBES",
    "TRAFFIC_COMPONENTS",
    "Comparison",
    "TargetIdentity",
    "TokenizerIdentity",
    "check_rows",
    "common_prefix",
    "compare",
    "compare_targets",
    "first_difference",
    "target_identity",
    "tokenizer_identity",
    "tokenizer_size",
]

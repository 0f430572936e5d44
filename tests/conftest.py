"""Tiny tokenizers and checkpoints that several test files share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spectrain.interop.speculators_eagle3 import Eagle3Settings

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
LETTERS = r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+"


def build_tokenizer(
    *,
    swap: tuple[str, str] | None = None,
    drop_merge: bool = False,
    pattern: str = LETTERS,
    template: str = TEMPLATE,
    decoder: Any = None,
    pad: str = "<|im_end|>",
    eos: str = "<|im_end|>",
    added: tuple[AddedToken, ...] = (),
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 256 bytes, 7 merges and 3 special tokens; each argument is one mutation of it."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("1", "2"), ("12", "3"), ("Ġ", "Ġ")]
    names += [left + right for left, right in merges]
    vocabulary = {token: index for index, token in enumerate(names)}
    if swap:
        vocabulary[swap[0]], vocabulary[swap[1]] = vocabulary[swap[1]], vocabulary[swap[0]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges[:-1] if drop_merge else merges))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoder or decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(list(added))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token=eos,
        unk_token="<|endoftext|>",
        pad_token=pad,
        chat_template=template,
    )


def build_eagle3(
    *, hidden: int = 8, vocabulary: int = 300, draft: int = 32, dtype: torch.dtype = torch.float32
) -> tuple[Eagle3Settings, dict[str, torch.Tensor]]:
    """Settings and random tensors of a drafter with 2 heads of 4, 1 key head, and every third token."""
    generator = torch.Generator().manual_seed(0)
    layer = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "layers.0.self_attn.q_proj.weight": (8, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (4, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (4, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, 8),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.mlp.gate_proj.weight": (16, hidden),
        "layers.0.mlp.up_proj.weight": (16, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, 16),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft, hidden),
    }
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    ids = torch.arange(draft) * 3
    tensors["d2t"] = ids - torch.arange(draft)
    tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool)
    tensors["t2d"][ids] = True
    settings = Eagle3Settings(layer, (2, 4, 5), draft, hidden, 3, "org/target", ("LlamaForCausalLM",))
    return settings, tensors


@pytest.fixture(scope="session")
def make_tokenizer():
    return build_tokenizer


@pytest.fixture(scope="session")
def make_eagle3():
    return build_eagle3

"""Tiny tokenizers, models, targets, rows and recipes, built in milliseconds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from spectrain.data.conversations import EncodedRow
from spectrain.data.features import FeatureStore, extract_features, store_key
from spectrain.decoding import generate_plain
from spectrain.drafters.base import Committed, Drafter
from spectrain.exact.sampler import Sampler
from spectrain.interop.speculators_eagle3 import Eagle3Settings
from spectrain.shapes import Chain
from spectrain.target import Target

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


WINDOW = 5  # positions that the sliding-window layers of the tiny models see
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {},
    "gpt_neox": {"use_parallel_residual": True},
    "mistral": {"num_key_value_heads": 2, "sliding_window": WINDOW},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW},
}


def build_words(size: int, eos: int | None = None) -> PreTrainedTokenizerFast:
    """One word an id: "w0 w1 ..."; ids 0 to ``size`` - 1."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=None if eos is None else f"w{eos}")


def build_model(
    architecture: str,
    *,
    layers: int = 8,
    rows: int = 24,
    hidden: int = 32,
    context: int = 128,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **extra: Any,
) -> PreTrainedModel:
    """A random tiny model whose laws are far from flat and whose norms and biases are not the identity."""
    settings: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **({} if architecture == "gpt2" else {"intermediate_size": 2 * hidden}),
        **SIZES.get(architecture, {}),
        **extra,
    }
    config = CONFIG_MAPPING[architecture](**settings)
    attention = "eager" if architecture == "gemma2" else "sdpa"  # SDPA cannot cap its scores
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: torch.Tensor) -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norm weights and biases, whatever their default
                parameter.add_(0.2 * normal(parameter))
            else:
                parameter.copy_(normal(parameter) / hidden**0.5)
        model.get_input_embeddings().weight.mul_(4.0)
        if not model.config.tie_word_embeddings:
            model.get_output_embeddings().weight.mul_(2.0)
    return model.eval()


def build_target(
    architecture: str = "llama",
    *,
    vocab: int = 24,
    padding: int = 0,
    eos: int | None = None,
    **model: Any,
) -> Target:
    """A Target over ``build_model``, with ``vocab`` words and ``padding`` more rows than words."""
    return Target(build_model(architecture, rows=vocab + padding, **model), build_words(vocab, eos), name=architecture)


def build_rows(target: Target, count: int = 6, *, answer: tuple[int, int] = (6, 12), seed: int = 0) -> list[EncodedRow]:
    """Random prompts of 2 to 6 tokens, answered greedily by the target itself with ``answer`` tokens (from, to)."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        prompt = [generator.randrange(target.tokenizer_size) for _ in range(generator.randint(2, 6))]
        length = generator.randint(*answer)
        run = generate_plain(target, prompt, sampler=Sampler(), max_new_tokens=length, eos_ids=())
        mask = [0] * len(prompt) + [1] * length
        rows.append(EncodedRow(f"row-{number}", "all", prompt + run.tokens, mask))
    return rows


def build_store(
    folder: Path, target: Target, rows: list[EncodedRow], taps: tuple[int, ...] = (), dtype: str = "float32"
) -> FeatureStore:
    """The features of ``rows``, extracted to ``folder``."""
    return extract_features(folder, rows, target, store_key(rows, target, "digest", taps, dtype), progress=False)


CHATML = TEMPLATE + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def save_chat_model(folder: Path, **model: Any) -> Path:
    """A random Llama of 8 layers with a byte-level tokenizer and a ChatML template, as a plain folder."""
    tokenizer = build_tokenizer(template=CHATML)
    llama = build_model("llama", **{"rows": 272, "context": 256, "dtype": torch.float32, **model})
    llama.generation_config.eos_token_id = tokenizer.eos_token_id
    llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_chats(path: Path, count: int, first: int = 0) -> Path:
    """Short prompts that all differ, of two kinds."""
    numbers = range(first, first + count)
    kinds = ("sum/even", "sum/odd")
    lines = [{"id": f"{path.stem}-{i}", "kind": kinds[i % 2], "prompt": f"{i} + {i}?"} for i in numbers]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_recipe(folder: Path, target: Path) -> Path:
    """A whole run of seconds in ``folder``: recipe.yaml, its chats, and ``run`` as the output."""
    recipe = {
        "target": {"name": str(target)},
        "data": {
            "train": [str(write_chats(folder / "train.jsonl", 8))],
            "heldout": [str(write_chats(folder / "heldout.jsonl", 4, first=50))],
            "max_length": 128,
        },
        "regenerate": {"sampler": {"temperature": 1}, "max_new_tokens": 12, "batch_size": 3},
        "drafter": {"type": "eagle3", "depths": 2, "draft_vocab_size": 64},
        "training": {
            "epochs": 2,
            "micro_batch_tokens": 128,
            "validate_every": 3,
            "validation_depths": 2,
            "checkpoint_every": 2,
            "verify_bundle": False,  # a fresh process takes longer than the training
        },
        "evaluation": {"k": [2], "max_new_tokens": 6},
        "baselines": [{"type": "ngram"}],
        "output": str(folder / "run"),
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def proposed(drafter: Drafter, target: Target, k: int = 3) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A sampled proposal after a short prompt: tokens and laws."""
    state = drafter.start([1])
    drafter.observe(state, Committed([[4, 9]], torch.tensor([[4, 9]]), target.forward(torch.tensor([[1, 4]]))))
    uniforms = torch.full((1, k), 0.6, dtype=torch.float64)
    proposal = drafter.propose(state, Sampler(1.0), Chain(k), [k], uniforms)
    return proposal.tokens_BN, proposal.q

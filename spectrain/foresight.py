"""What a recipe allows and may not be meant: told before time is spent on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import GenerationConfig

from spectrain.config import Recipe
from spectrain.data.conversations import Conversation
from spectrain.errors import SpectrainError
from spectrain.evaluation.decisions import Choice, fewest
from spectrain.evaluation.samples import kind_and_parents
from spectrain.exact.sampler import Sampler

FEW_STEPS = 200  # a new drafter is hardly better than chance before
SMALL_TOKENS, SMALL_EPOCHS, SMALL_RATE = 512, 8, 1e-3  # a start for traffic of a hundred or a thousand chats


def few_steps(recipe: Recipe, steps: int) -> list[str]:
    """Notes on a run of so many optimizer steps: too few to learn much, or to be looked at on the way."""
    config, found = recipe.training, []
    if steps < FEW_STEPS:
        found.append(f"{steps} optimizer steps teach a drafter little, it takes about {FEW_STEPS}: "
                     f"{_longer(recipe, steps)}")  # fmt: skip
    late = [key for key in ("validate_every", "checkpoint_every") if getattr(config, key) >= steps]
    if late:
        keys = " and ".join(f"training.{key} ({getattr(config, key)})" for key in late)
        found.append(f"{keys} of {steps} optimizer steps: only the last step has one; lower it to choose among several")
    return found


def _longer(recipe: Recipe, steps: int) -> str:
    config, rate = recipe.training, recipe.optim.lr
    if config.steps is not None and config.steps <= steps:
        return f"raise training.steps ({config.steps})"
    ways = []
    if config.micro_batch_tokens > SMALL_TOKENS:
        ways.append(f"training.micro_batch_tokens={SMALL_TOKENS} (now {config.micro_batch_tokens})")
    if config.epochs < SMALL_EPOCHS:
        ways.append(f"training.epochs={SMALL_EPOCHS} (now {config.epochs})")
    if rate < SMALL_RATE:
        ways.append(f"optim.lr={SMALL_RATE:g} (now {rate:g}) for weights that start at random")
    if ways:
        return f"try {', '.join(ways)}"
    return "lower training.micro_batch_tokens, raise training.epochs or optim.lr, or train on more chats"


def few_heldout(recipe: Recipe, train: Sequence[Conversation], heldout: Sequence[Conversation]) -> list[str]:
    """Notes on held-out chats that are too few for a verdict, over all or by kind, or lack what training has."""
    found, choices = [], _choices(recipe)
    trained, held = (Counter(chat.kind for chat in side) for side in (train, heldout))
    each = Choice(choices, _looks(trained + held))
    least, enough = fewest(choices), fewest(each.looks)
    scarce = sorted((held[kind], kind) for kind in trained | held if held[kind] < enough)
    among = f"at least {enough} are needed to choose among {each}"
    more = _more(recipe, trained + held, enough, [kind for _, kind in scarce])
    if len(heldout) < least:
        found.append(f"{len(heldout)} held-out conversations are too few for a verdict, at least {least} are needed to "
                     f"choose among {choices}; {more}")  # fmt: skip
    elif scarce and len(trained | held) > 1:
        counts = _listed([f"{kind} {count}" for count, kind in scarce])
        found.append(f"held-out conversations are too few for a verdict on each kind ({counts}), {among}; {more}")
    with_tools = [Counter(chat.kind for chat in side if chat.tools) for side in (train, heldout)]
    if with_tools[0] and not with_tools[1]:
        found.append(f"{with_tools[0].total()} conversations in training have tools and none held out, so nothing is "
                     f"measured on such; {_more_tools(recipe, trained + held, with_tools[0], enough)}")  # fmt: skip
    return found


def _looks(sizes: Counter[str]) -> int:
    """On how many kinds a verdict is given where each has enough chats: with those they lie in, and none twice."""
    totals: Counter[str] = Counter()
    for kind, count in sizes.items():
        totals.update(dict.fromkeys(kind_and_parents(kind), count))
    return max(1, sum(count != totals.get(kind.rpartition("/")[0]) for kind, count in totals.items()))


def _choices(recipe: Recipe) -> int:
    """Contenders that a verdict chooses among, about."""
    config, deepest = recipe.evaluation, recipe.drafter.limits[0]
    own = [k for k in config.k if deepest is None or k <= deepest]
    return (len(own) + len(recipe.baselines) * len(config.k)) * len(config.verification) + len(config.trees)


def _more(recipe: Recipe, sizes: Counter[str], least: int, lacking: Iterable[str]) -> str:
    """What gives the kinds that are ``lacking`` so many held-out chats, as far as half of the chats can: beyond, there
    were more to measure on than to learn from."""
    if recipe.data.heldout:
        return "give data.heldout more chats"
    fraction = recipe.data.heldout_fraction
    shares = {kind: math.ceil(100 * least / sizes[kind]) / 100 for kind in lacking}
    large = [share for share in shares.values() if share <= 0.5]
    small = [f"{kind} ({sizes[kind]})" for kind in sorted(shares, key=lambda k: (sizes[k], k)) if shares[kind] > 0.5]
    more = f"add chats of {_listed(small)}, or name some in data.heldout: half of them are fewer than {least}"
    if not large or max(large) <= fraction:
        return more if small else f"raise data.heldout_fraction ({fraction:g}), or name further chats in data.heldout"
    raised = f"raise data.heldout_fraction ({fraction:g}), to {max(large):g} for {least} of each kind"
    return f"{raised} that has so many, and {more}" if small else raised


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(parts[:5]) + (f", and {len(parts) - 5} more" if len(parts) > 5 else "")


def _more_tools(recipe: Recipe, sizes: Counter[str], with_tools: Counter[str], least: int) -> str:
    """What has chats with tools held out: they are a share of their kinds, and chance chooses within one."""
    if recipe.data.heldout:
        return "give data.heldout some"
    mixed = [kind for kind, count in with_tools.items() if count < sizes[kind]]
    if mixed:
        return f"give them a kind of their own (now {_listed(sorted(mixed))}), which is held out in proportion"
    return _more(recipe, sizes, least, with_tools)


def other_sampler(recipe: Recipe) -> list[str]:
    """A note where the target comes with a sampler that the recipe does not train for: servers take it unless told."""
    theirs = own_sampler(recipe.target.name, recipe.target.revision)
    asked = recipe.regenerate.sampler if recipe.regenerate else recipe.evaluation.samplers[0]
    key = "regenerate.sampler" if recipe.regenerate else "evaluation.samplers"
    if theirs is None or theirs == asked:
        return []
    return [f"the target's generation_config.json says {theirs.describe()}, which servers sample with unless told, and "
            f"{key} {asked.describe()}; set it to what you serve with"]  # fmt: skip


def own_sampler(name: str, revision: str | None) -> Sampler | None:
    """What a model's generation_config.json says of sampling; None where it says nothing or is not there."""
    if Path(name).is_dir() and not (Path(name) / "generation_config.json").is_file():
        return None
    try:
        config = GenerationConfig.from_pretrained(name, revision=revision or "main")
    except (OSError, ValueError):  # it is optional, and what is wrong with it is told when the target is loaded
        return None
    told = {key: getattr(config, key, None) for key in ("temperature", "top_k", "top_p")}
    if all(value is None for value in told.values()) and not getattr(config, "do_sample", None):
        return None
    temperature, top_k, top_p = (told[key] for key in ("temperature", "top_k", "top_p"))
    try:  # 0 or less, and 1, stand for "keep all"
        return Sampler(1.0 if temperature is None else temperature, top_k if top_k and top_k > 0 else None,
                       None if top_p == 1 else top_p)  # fmt: skip
    except SpectrainError:
        return None  # no sampler of ours

"""What a command line asks to be measured, checked."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from spectrain.errors import SpectrainError
from spectrain.evaluation.contenders import AcceptanceConfig, AnyTree
from spectrain.evaluation.load_config import LoadConfig
from spectrain.exact.sampler import Sampler
from spectrain.settings import FLAGS, LOAD_FLAGS
from spectrain.tree_options import parse_tree

Settings = TypeVar("Settings", bound=BaseModel)


def acceptance_settings(options: argparse.Namespace) -> AcceptanceConfig:
    """What is measured."""
    return checked(
        AcceptanceConfig,
        k=options.k,
        trees=trees(options.tree),
        verification=tuple(options.verification.split(",")),
        samplers=tuple(_sampler(t, options) for t in options.temperature),
        conversations=options.conversations,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        stop_at=options.stop_at,
        load=_load(options),
    )


def _load(options: argparse.Namespace) -> LoadConfig | None:
    """Batches to measure, where they are asked for."""
    flags = {"context": options.context, "groups": options.batch_groups, "request_rates": options.request_rate}
    given = {name: value for name, value in flags.items() if value is not None}
    if options.batch is None:
        if given:
            raise SpectrainError(
                f"{_flag(next(iter(given)))} is about batches of requests; give their sizes with --batch, too"
            )
        return None
    return checked(LoadConfig, batch=options.batch, **given)


def checked(kind: type[Settings], **values: Any) -> Settings:
    """Checked settings; what is wrong is told by its flag."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        raise SpectrainError(f"{_flag(str(first['loc'][0]))}: {message} (found {first['input']!r})") from error


def _flag(field: str) -> str:
    return {**FLAGS, **LOAD_FLAGS, "prompts": "--conversations"}.get(field, f"--{field.replace('_', '-')}")


def _sampler(temperature: float, options: argparse.Namespace) -> Sampler:
    return Sampler(temperature, options.top_k, options.top_p) if temperature else Sampler()


def trees(texts: Sequence[str] | None) -> tuple[AnyTree, ...]:
    """Every --tree."""
    return tuple(map(parse_tree, texts or ()))

"""How servers take a serving format."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Served:
    """vLLM's method of its speculative_config (without one it goes by the name of the folder), SGLang's algorithm, and
    the layout that SGLang needs a bundle in (None: the bundle as it is). None in place of a server's name: it has no
    such drafters. ``assistant``: transformers' generate takes it. ``most`` is the key of config.json that bounds the
    draft tokens, where one does."""

    vllm: str | None
    sglang: str | None
    sglang_layout: str | None = None
    assistant: bool = False
    most: str | None = None


def vllm_command(target: str, revision: str | None, drafter: str, method: str, k: int) -> str:
    """The line for a shell that serves ``target`` with ``drafter``, each a folder or a Hub id, drafting ``k`` tokens a
    round; ``method`` is vLLM's own name for such drafters, and ``revision`` the target's."""
    settings = {"method": method, "model": drafter, "num_speculative_tokens": k}
    at = ["--revision", revision] if revision else []
    return shlex.join(["vllm", "serve", target, *at, "--speculative-config", json.dumps(settings)])

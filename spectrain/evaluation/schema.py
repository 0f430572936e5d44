"""The acceptance document as a JSON Schema: published, versioned, made from the shape that documents are checked with.

``acceptance.schema.json`` in this package is what ``json_schema`` returns; a test holds the two together. The schema
says what ``check_shape`` checks and no more: which keys there are, and what each may hold by itself. What must hold
between them is for ``consistency`` alone. After a change of the shape:
``python -c 'from spectrain.evaluation.schema import write_schema; write_schema()'``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spectrain.evaluation import shape as shapes
from spectrain.evaluation.glossary import DEFINITIONS
from spectrain.evaluation.leaves import LEAVES
from spectrain.evaluation.shape import DOCUMENT, SCHEMA
from spectrain.files import write_json

SCHEMA_FILE = Path(__file__).with_name("acceptance.schema.json")
# The keys of the document that the page's glossary explains, by their names there.
_TERMS = {
    "tokens_per_round": "tokens per round (τ)",
    "accepted_prefix": "accepted prefix length",
    "marginal_survival": "marginal survival",
    "conditional_acceptance": "conditional acceptance",
    "visited_alpha": "α where decoding went",
    "alpha": "α",
    "tokens_per_second": "tokens/s",
    "accepted_draft_tokens_per_second": "accepted draft tokens/s",
    "latency_ms": "ms per token",
    "by_band": "bands",
    "calibration": "calibration, ECE",
    "distribution": "law test",
    "draft_vocabulary": "coverage",
    "verdict": "verdict",
    "leaderboard": "leaderboard",
    "memory": "memory",
    "energy_j_per_token": "energy",
    "advice": "sample size",
    "predicted_speedup": "predicted speedup",
    "break_even_tokens_per_round": "break-even τ",
    "largest_paying_batch": "largest paying batch",
    "lossy": "LOSSY",
}


def json_schema() -> dict[str, Any]:
    """The schema (draft 2020-12); its ``$id`` carries the version of the document's schema."""
    definitions: dict[str, Any] = {}
    schema = _object(DOCUMENT, definitions)
    schema["properties"]["schema"] = {"const": SCHEMA}
    schema["properties"]["samplers"]["minItems"] = 1
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:{SCHEMA.replace('.', ':').replace('/', ':')}",
        "title": "spectrain acceptance document",
        **schema,
        "$defs": definitions,
    }


def write_schema(path: Path = SCHEMA_FILE) -> None:
    write_json(path, json_schema())


# Shapes with a name in shape.py stand under it in $defs, however often they are used.
_NAMES = {id(v): k.strip("_").lower() for k, v in vars(shapes).items() if isinstance(v, dict) and k.isupper()}


def _of(shape: Any, key: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """A piece of the shape as a schema; ``key`` is the name that it stands under."""
    if shape is None:
        return dict(LEAVES[key])
    if isinstance(shape, list):
        return {"type": "array", "items": _of(shape[0], key, definitions)}
    name = _NAMES.get(id(shape))
    if name is None:
        return _object(shape, definitions, key)
    if name not in definitions:
        definitions[name] = _object(shape, definitions)
    return {"$ref": f"#/$defs/{name}"}


def _object(shape: dict[str, Any], definitions: dict[str, Any], key: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object"}
    for name, inner in shape.items():
        own = name.rstrip("?")
        if own == "*":
            found["additionalProperties"] = _maybe(name, _of(inner, key, definitions))
        else:
            if not name.endswith("??"):
                found.setdefault("required", []).append(own)
            found.setdefault("properties", {})[own] = _property(name, inner, definitions)
    return found


def _property(name: str, shape: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    key = name.rstrip("?")
    schema = _maybe(name, _of(shape, key, definitions))
    term = _TERMS.get(key)
    return schema if term is None else schema | {"description": dict(DEFINITIONS)[term]}


def _maybe(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "null"}, schema]} if name.endswith("?") else schema

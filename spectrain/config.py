"""Recipes: one YAML file composed of the components' own settings, checked before anything runs.

Every key can be overridden on the command line as ``key.path=value``. A key that nobody knows fails with its path and
the nearest one that exists.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from spectrain.data.template import RESERVED
from spectrain.drafters import FAMILIES, AnyDrafterConfig
from spectrain.drafters.objective import LossConfig
from spectrain.errors import SpectrainError
from spectrain.evaluation.contenders import TREE_KINDS, AcceptanceConfig
from spectrain.evaluation.measured_trees import filled
from spectrain.regenerate import RegenerateConfig
from spectrain.shapes import check_shape
from spectrain.training import OptimConfig, TrainingConfig

# What other trainers call our keys.
ELSEWHERE = {
    "learning_rate": "optim.lr",
    "num_train_epochs": "training.epochs",
    "gradient_accumulation_steps": "training.accumulation",
    "max_seq_length": "data.max_length",
}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TargetConfig(_Part):
    """The model to speed up: a folder, or a Hub id and revision."""

    name: str
    revision: str | None = None
    dtype: str = "float32"
    attention: str | None = None
    device: str = Field("auto", description="auto is each process's own; or cpu, cuda:1")
    device_map: Literal["auto"] | None = Field(None, description="auto spreads the layers over several devices")


class DataConfig(_Part):
    """Chat files. Without ``heldout`` files a share of the conversations is set aside by conversation."""

    train: tuple[str, ...] = Field(min_length=1)
    heldout: tuple[str, ...] = ()
    heldout_fraction: float = Field(0.05, gt=0, lt=1)
    max_length: int = Field(2048, ge=2, description="longer rows are left out and counted, never cut")
    features: Literal["stored", "live"] = Field(
        "stored", description="computed once and kept on disk; or by the target for every micro-batch, nothing kept"
    )
    feature_dtype: str = Field("bfloat16", pattern="^(bfloat16|float32)$")
    teacher_top_k: int | None = Field(
        None,
        ge=1,
        description="keep this many of the target's likeliest tokens of each position and train on them alone",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="variables of the chat template in every render, for instance enable_thinking: false"
    )
    bad_rows: Literal["error", "drop"] = Field(
        "error", description="what happens to rows that cannot be read or rendered; drop counts them by reason"
    )
    duplicates: Literal["keep", "drop"] = Field("keep", description="of training chats that say the same")
    near_duplicates: Literal["report", "error"] = Field(
        "report", description="of held-out chats that resemble one in training"
    )
    seed: int = 0

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_variables_are_free(cls, settings: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(settings.keys() & RESERVED)
        if taken:
            raise ValueError(f"{taken[0]!r} is set for every chat as it is needed; leave it out")
        return settings


class WarmStartConfig(_Part):
    """A bundle whose weights training starts from, of the drafter's own family and sizes; folder, or Hub id and
    revision. Its target may be another one with the same tokenizer, for instance before it was fine-tuned."""

    bundle: str
    revision: str | None = None
    remap: bool = Field(False, description="count a draft vocabulary anew instead of keeping the bundle's")


class Recipe(_Part):
    """A whole run: from chats to a report. ``regenerate: null`` trains on the answers in the files.

    ``prepared`` is the folder for answers and features: recipes with the same target and traffic may share one.
    """

    target: TargetConfig
    data: DataConfig
    regenerate: RegenerateConfig | None = Field(default_factory=RegenerateConfig)
    drafter: AnyDrafterConfig
    warm_start: WarmStartConfig | None = None
    loss: LossConfig = Field(default_factory=LossConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    evaluation: AcceptanceConfig = Field(default_factory=AcceptanceConfig)
    baselines: tuple[AnyDrafterConfig, ...] = Field((), description="training-free drafters measured beside it")
    output: str
    prepared: str | None = Field(None, description="where answers and features lie; default output")

    @property
    def prepared_data(self) -> Path:
        """The folder of the prepared chats: their answers, their counts, their audit."""
        return Path(self.prepared or self.output) / "data"

    @model_validator(mode="after")
    def _baselines_need_no_training(self) -> Recipe:
        names = [b.type for b in self.baselines]
        trained = [b.type for b in self.baselines if b.trainable]
        if trained:
            raise ValueError(f"baselines need no training, {', '.join(trained)} do")
        if len(set(names)) < len(names):  # contenders go by the name of their type
            raise ValueError(f"baselines are named by type, and these share one: {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _trees_can_be_filled(self) -> Recipe:
        deepest, columns = self.drafter.limits
        for tree in self.evaluation.trees:
            try:
                check_shape(filled(tree), deepest=deepest, columns=columns, trees=True, name=self.drafter.type)
            except SpectrainError as error:
                raise ValueError(f"evaluation.trees: {error}") from error
        return self

    @model_validator(mode="after")
    def _chains_can_be_filled(self) -> Recipe:
        """What would else only show when hours of preparation or training are over."""
        deepest, _ = self.drafter.limits
        asked = {"evaluation.k": min(self.evaluation.k)}  # longer ones are left out where they do not fit
        if self.training.on_policy is not None:
            asked["training.on_policy.k"] = self.training.on_policy.k
        for key, k in asked.items():
            if deepest is not None and k > deepest:
                raise ValueError(f"{key}: found {k}, but this {self.drafter.type} drafter drafts at most {deepest} "
                                 "tokens ahead; lower it")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _depths_can_be_weighed(self) -> Recipe:
        if self.drafter.trainable:
            try:
                self.loss.check_depths(self.drafter.trained_depths, self.drafter.type)
            except SpectrainError as error:
                raise ValueError(str(error)) from error
        return self


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply ``key.path=value`` overrides (values are YAML); SpectrainError on anything unknown."""
    path = Path(path)
    if not path.is_file():
        raise SpectrainError(f"recipe {path} does not exist; spectrain recipe writes one to start from")
    try:
        values = _read_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise SpectrainError(f"recipe {path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise SpectrainError(f"recipe {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        found = type(values).__name__
        raise SpectrainError(f"recipe {path} holds {found}, expected keys such as target, data, drafter")
    for override in overrides:
        _apply(values, override)
    return parse_recipe(values, str(path))


def parse_recipe(values: dict[str, Any], where: str) -> Recipe:
    """A recipe from plain values; ``where`` opens the messages."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise SpectrainError("\n".join(f"{where}: {_explain(e)}" for e in _causes(error))) from error


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise SpectrainError(f"override {override!r} is not key.path=value, for instance optim.lr=2e-4")
    *parents, last = key.split(".")
    place: Any = values
    for name in parents:
        place = place.setdefault(name, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise SpectrainError(f"override {override!r}: {name} holds no keys")
    place[last] = _value(text)


def _value(text: str) -> Any:
    try:
        return _read_yaml(text)
    except yaml.YAMLError as error:
        raise SpectrainError(f"override value {text!r} is not YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """Plain words as YAML 1.2 reads them: 2e-4 is a number, `no` a word. A key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {name!r} is given twice", key.start_mark)
            seen.add(name)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_TAGS = {name: f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "timestamp")}
_NUMBER = r"^[-+]?((\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|\.(inf|Inf|INF))$|^\.(nan|NaN|NAN)$"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _TAGS.values()]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_TAGS["bool"], re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(_TAGS["float"], re.compile(_NUMBER), list("-+.0123456789"))


def _read_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _causes(error: ValidationError) -> list[Any]:
    """The errors without those that only follow: of a list with a bad item pydantic also says it is too short."""
    found: list[Any] = list(error.errors())
    inner = {e["loc"][:length] for e in found for length in range(1, len(e["loc"]))}
    return [e for e in found if e["loc"] not in inner]


def _explain(error: Any) -> str:
    """One sentence of a pydantic error, with the key's path and, for an unknown key, what is known there."""
    members = {config.model_fields["type"].default for config in FAMILIES} | set(TREE_KINDS)
    # Pydantic names the member of the union, which is no key: drafter.eagle3.depths, evaluation.trees.0.static.
    last = len(error["loc"]) if error["type"] == "value_error" else len(error["loc"]) - 1
    loc = [part for i, part in enumerate(error["loc"]) if i == last or part not in members]
    path = ".".join(map(str, loc))
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {path!r}; {_hint(loc)}"
    if error["type"] == "value_error":  # our own message, which says what was found
        return f"{path}: {error['ctx']['error']}" if path else str(error["ctx"]["error"])
    found = "" if error["type"] == "missing" else f" (found {error['input']!r:.80})"
    return f"{path}: {error['msg']}{found}"


def _hint(loc: Sequence[str | int]) -> str:
    """The nearest key beside the unknown one, or anywhere in a recipe; else every key that may stand there."""
    parent, word = [str(part) for part in loc[:-1]], str(loc[-1])
    here = ".".join(part for part in parent if not part.isdigit())
    paths = list(_paths(Recipe.model_json_schema()))
    beside = {name: ".".join([*parent, name]) for place, _, name in (p.rpartition(".") for p in paths) if place == here}
    anywhere = {path.rpartition(".")[2]: path for path in reversed(paths)} | ELSEWHERE
    if word in beside:  # of another member of the union
        return "it belongs to another kind than the other keys here"
    for known in (beside, anywhere):
        near = difflib.get_close_matches(word, known, n=1)
        if near:
            return f"did you mean {known[near[0]]!r}?"
    return f"the keys there are {', '.join(beside) or 'none'}"


def _paths(root: dict[str, Any], part: dict[str, Any] | None = None, prefix: str = "") -> Iterator[str]:
    """Every key of a recipe by its path, through references, unions and lists of a JSON schema."""
    part = root if part is None else part
    if "$ref" in part:
        part = root["$defs"][part["$ref"].rpartition("/")[2]]
    for inner in (*part.get("anyOf", ()), *part.get("oneOf", ()), *([part["items"]] if "items" in part else ())):
        yield from _paths(root, inner, prefix)
    for name, inner in part.get("properties", {}).items():
        yield f"{prefix}{name}"
        yield from _paths(root, inner, f"{prefix}{name}.")

"""The run spec: what all islands of a run must agree on.

One TOML file per run. Every table is frozen and refuses unknown keys; the error names the key, the
nearest right one and the file. The digest is BLAKE3 over canonical JSON (sorted keys, defaults filled
in), so two files that mean the same have the same digest. Keys carry units. Nothing local to one node
stands here, and a spec names built-in recipes, never code.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from protocol.errors import ConfigError
from protocol.merkle import digest

MAX_SPEC_BYTES = 1 << 20
BYTE_VALUES = 256
NAME = r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$"
_LIKENESS = 0.5  # of a mistyped key to the right one

T = TypeVar("T", bound=BaseModel)

Positive = Annotated[int, Field(ge=1, le=1 << 50)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Context = Annotated[int, Field(ge=2, le=1 << 20)]
MAX_VOCAB = 1 << 20
VocabSize = Annotated[int, Field(ge=2, le=MAX_VOCAB)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class GptModel(Table):
    """A decoder-only transformer: RMSNorm, rotary positions, causal attention."""

    recipe: Literal["gpt"] = "gpt"
    width: Annotated[int, Field(ge=8, le=65_536)] = 128
    depth: Annotated[int, Field(ge=1, le=1_024)] = 4
    heads: Annotated[int, Field(ge=1, le=1_024)] = 4
    context: Context = 128
    vocab_size: VocabSize = 256

    @model_validator(mode="after")
    def _heads_divide_width(self) -> GptModel:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"model.width = {self.width} must be an even multiple of model.heads = {self.heads}"
            )
        return self


class MoeModel(GptModel):
    """The same transformer with a mixture of experts in place of each MLP.

    `balance` is the weight of the load-balancing loss; `expert_width` the inner width of one expert.
    """

    recipe: Literal["moe"] = "moe"  # type: ignore[assignment]
    experts: Annotated[int, Field(ge=2, le=1_024)] = 8
    experts_per_token: Annotated[int, Field(ge=1, le=64)] = 2
    expert_width: Annotated[int, Field(ge=8, le=1 << 18)] = 256
    balance: Annotated[float, Field(ge=0, le=1)] = 0.01

    @model_validator(mode="after")
    def _enough_experts(self) -> MoeModel:
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"model.experts_per_token = {self.experts_per_token} is more than "
                f"model.experts = {self.experts}"
            )
        return self


class HfModel(Table):
    """Any causal language model of Hugging Face transformers, by its configuration.

    `config` is the text of its config.json: `atoll run init --hf SOURCE` fills it in, once for all islands.
    """

    recipe: Literal["hf"]
    config: Annotated[str, Field(max_length=1 << 18)] = ""
    context: Context = 128

    @model_validator(mode="after")
    def _config_is_an_object(self) -> HfModel:
        if not self.config:
            raise ValueError("model.config: missing; `atoll run init --hf SOURCE` fills it in")
        size = self._fields().get("vocab_size")
        if type(size) is not int or not 2 <= size <= MAX_VOCAB:
            raise ValueError(
                f"model.config: its vocab_size must be an integer of 2 to {MAX_VOCAB} "
                f"(it is {_shown(size)}): is it a causal language model's?"
            )
        return self

    def _fields(self) -> dict[str, Any]:
        try:
            fields = json.loads(self.config)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"model.config: not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError("model.config: must be a JSON object")
        return fields

    @property
    def vocab_size(self) -> int:
        return int(self._fields()["vocab_size"])


class OwnModel(Table):
    """A model of the islands' own training script; the run knows its layout and nothing else."""

    recipe: Literal["own"]


RECIPES: dict[str, type[Table]] = {
    "gpt": GptModel,
    "moe": MoeModel,
    "hf": HfModel,
    "own": OwnModel,
}


def _recipe(table: Any) -> str | None:
    """Which class `model` is of; None, which pydantic refuses, for what is no table."""
    if isinstance(table, Table):
        return str(getattr(table, "recipe", None))
    if not isinstance(table, Mapping):
        return None
    recipe = table.get("recipe", "gpt")
    return recipe if isinstance(recipe, str) else _shown(recipe)


BuiltInModel = Annotated[  # what Atoll's own trainer can make
    Annotated[GptModel, Tag("gpt")]
    | Annotated[MoeModel, Tag("moe")]
    | Annotated[HfModel, Tag("hf")],
    Discriminator(_recipe),
]
Model = Annotated[
    Annotated[GptModel, Tag("gpt")]
    | Annotated[MoeModel, Tag("moe")]
    | Annotated[HfModel, Tag("hf")]
    | Annotated[OwnModel, Tag("own")],
    Discriminator(_recipe),
]


class Data(Table):
    text: Annotated[tuple[str, ...], Field(max_length=1_000)] = ()
    tokenizer: Literal["bytes", "bpe", "model"] = "bytes"
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    eval_sequences: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    eval_every_rounds: Positive = 4


class BatchPhase(Table):
    """Until the run has seen `until_tokens`, an island's step takes `batch_size` samples."""

    until_tokens: Positive
    batch_size: Positive


class Inner(Table):
    """The optimizer of the inner steps, local to each island; its learning rate follows the run's tokens."""

    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: Rate = 1e-3
    momentum: Fraction = 0.9
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.1
    clip: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    warmup_tokens: Annotated[int, Field(ge=0, le=1 << 50)] = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    batch_size: Positive = 8
    batch_ramp: Annotated[tuple[BatchPhase, ...], Field(max_length=1_000)] = ()

    @model_validator(mode="after")
    def _ramp_rises(self) -> Inner:
        tokens = [phase.until_tokens for phase in self.batch_ramp]
        if sorted(set(tokens)) != tokens:
            raise ValueError("inner.batch_ramp: until_tokens must rise strictly")
        return self


class SchedulePhase(Table):
    """From `from_round` on, these settings hold; what is left out falls back to the table `outer`."""

    from_round: Annotated[int, Field(ge=0, le=1 << 50)]
    inner_steps: Positive
    lr: Rate | None = None
    momentum: Fraction | None = None


class Outer(Table):
    """How often islands meet (`inner_steps`) and what they do with the mean pseudo-gradient."""

    optimizer: Literal["nesterov", "sgd", "average", "adam", "yogi"] = "nesterov"
    lr: Rate = 0.7
    momentum: Fraction = 0.9
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    epsilon: Rate = 1e-3
    codec: Literal["fp32", "bf16", "int8"] = "int8"
    inner_steps: Positive = 20
    schedule: Annotated[tuple[SchedulePhase, ...], Field(max_length=1_000)] = ()
    fragments: Annotated[int, Field(ge=1, le=1_024)] = 1

    @model_validator(mode="after")
    def _schedule_rises(self) -> Outer:
        rounds = [phase.from_round for phase in self.schedule]
        if rounds and (rounds[0] != 0 or sorted(set(rounds)) != rounds):
            raise ValueError("outer.schedule must start at from_round = 0 and rise strictly")
        every = [self.inner_steps] + [phase.inner_steps for phase in self.schedule]
        for steps in every:
            if steps % self.fragments:
                raise ValueError(
                    f"outer.inner_steps = {steps} must be a multiple of "
                    f"outer.fragments = {self.fragments}"
                )
        return self


class Sync(Table):
    """When a round is planned and closed."""

    expected_islands: Annotated[int, Field(ge=1, le=1_024)] = 4
    quorum: Annotated[int, Field(ge=1, le=1_024)] | None = None
    durability: Annotated[int, Field(ge=1, le=1_024)] | None = None
    grace_s: Annotated[float, Field(ge=0, le=86_400)] = 10.0
    budget_s: Rate = 600.0
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    cell_values: Annotated[int, Field(ge=4_096, le=1 << 18, multiple_of=4_096)] | None = None
    max_owners: Annotated[int, Field(ge=1, le=1_024)] = 16
    max_carry_rounds: Annotated[int, Field(ge=0, le=1_000)] = 2
    late: Literal["carry", "drop"] = "carry"
    heartbeat_s: Annotated[float, Field(gt=0, le=60)] = 2.0
    lease_s: Annotated[float, Field(gt=0, le=3_600)] = 15.0

    def durability_of(self, islands: int) -> int:
        """Matching reports that close a slot when the view has `islands` members."""
        return min(islands, max(self.durability or 0, islands // 2 + 1))

    @model_validator(mode="after")
    def _counts_fit(self) -> Sync:
        if self.quorum is not None and self.quorum > self.expected_islands:
            raise ValueError(
                f"sync.quorum = {self.quorum} is more than "
                f"sync.expected_islands = {self.expected_islands}"
            )
        majority = self.expected_islands // 2 + 1
        if self.durability is not None and not (
            majority <= self.durability <= self.expected_islands
        ):
            raise ValueError(
                f"sync.durability = {self.durability} must be a majority of the islands: "
                f"{majority} to {self.expected_islands}"
            )
        return self


class Trust(Table):
    profile: Literal["private", "invite", "open"] = "private"


class RunSpec(Table):
    schema_version: Literal[1] = 1
    name: Annotated[str, Field(pattern=NAME)]
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    target_tokens: Positive
    model: Model = GptModel()
    data: Data = Data()
    inner: Inner = Inner()
    outer: Outer = Outer()
    sync: Sync = Sync()
    trust: Trust = Trust()

    @model_validator(mode="after")
    def _tables_agree(self) -> RunSpec:
        if self.inner.warmup_tokens >= self.target_tokens:
            raise ValueError(
                f"inner.warmup_tokens = {self.inner.warmup_tokens} must be below "
                f"target_tokens = {self.target_tokens}"
            )
        if isinstance(self.model, OwnModel):
            if self.data.tokenizer != "bytes":
                raise ValueError(
                    f'data.tokenizer = "{self.data.tokenizer}" does not go with model.recipe = "own", '
                    "whose script reads its own data: leave it out"
                )
            return self
        if not self.data.text:
            raise ValueError("data.text: missing; name the files to train on")
        if self.data.tokenizer == "model" and not isinstance(self.model, HfModel):
            raise ValueError('data.tokenizer = "model" belongs to model.recipe = "hf"')
        if self.data.tokenizer == "bytes" and self.model.vocab_size < BYTE_VALUES:
            key = "model.config: its " if isinstance(self.model, HfModel) else "model."
            raise ValueError(
                f"{key}vocab_size = {self.model.vocab_size} must be at least {BYTE_VALUES} "
                f'with data.tokenizer = "bytes"'
            )
        return self

    @property
    def built_in_model(self) -> BuiltInModel:
        """Raises ConfigError if the model is the islands' own."""
        if isinstance(self.model, OwnModel):
            raise ConfigError(
                'model.recipe = "own": only your own script can make this model: give the training '
                "command, `atoll join ADDRESS -- COMMAND`"
            )
        return self.model

    def canonical_json(self) -> bytes:
        return json.dumps(
            self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True
        ).encode()

    def digest(self) -> bytes:
        return digest(self.canonical_json())


def load_spec(path: Path) -> RunSpec:
    """Reads a run spec. Raises ConfigError with one line per wrong key."""
    return parse_spec(read_toml(path), str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file of at most 1 MiB. Raises ConfigError naming file and line."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SPEC_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_SPEC_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_SPEC_BYTES} bytes: is this the right file?")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def parse_spec(table: Mapping[str, Any], source: str) -> RunSpec:
    return parse_table(RunSpec, table, source)


def spec_from_json(data: bytes, source: str) -> RunSpec:
    """The inverse of `canonical_json`, for bytes that came over a network."""
    if len(data) > MAX_SPEC_BYTES:
        raise ConfigError(f"{source}: a spec of {len(data)} bytes is too large")
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from None
    return parse_spec(table, source)


def parse_table(model: type[T], table: Any, source: str) -> T:
    """Validates `table`; every fault becomes one line that names the key and the remedy."""
    try:
        return model.model_validate(table)
    except ValidationError as error:
        lines = [f"{source}: {' '.join(line.split())}" for line in _fault_lines(model, error)]
        raise ConfigError("\n".join(lines)) from None


def _fault_lines(model: type[BaseModel], error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False):
        path = fault["loc"]
        key = ".".join(str(part) for part in _keys(path))
        match fault["type"]:
            case "union_tag_invalid":
                choices = fault["ctx"]["expected_tags"].replace("'", "")
                yield f"{key}.recipe: must be one of {choices} (it is {_shown(fault['ctx']['tag'])})"
            case "union_tag_not_found":
                yield f"{key}: input should be a table (it is {_shown(fault['input'])})"
            case "extra_forbidden":
                yield f"{key}: unknown key{_hint(model, path[:-1], str(path[-1]))}"
            case "missing":
                yield f"{key}: missing; add it"
            case "value_error":
                yield str(fault["ctx"]["error"])
            case _:
                yield f"{key}: {fault['msg'][0].lower()}{fault['msg'][1:]} (it is {_shown(fault['input'])})"


def _hint(model: type[BaseModel], path: tuple[int | str, ...], key: str) -> str:
    """What may have been meant by an unknown key of the table at `path`."""
    if path[:1] == ("model",):
        for recipe, other in RECIPES.items():
            if key in other.model_fields:
                return f'; it belongs to model.recipe = "{recipe}"'
    near = difflib.get_close_matches(key, _names(model, path), 1, _LIKENESS)
    return f"; did you mean {near[0]!r}?" if near else ""


def _keys(path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """`path` as it stands in the file: without the recipe that pydantic puts behind `model`."""
    if len(path) > 1 and path[0] == "model" and path[1] in RECIPES:
        return path[:1] + path[2:]
    return path


def _shown(value: Any) -> str:
    try:
        return repr(value)[:200]
    except ValueError:  # an integer of thousands of digits
        return "too long to show"


def _names(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Field names of the table at `path`, looked up through nested models and lists of them."""
    for part in path:
        if isinstance(part, int):
            continue
        if issubclass(model, tuple(RECIPES.values())) and part in RECIPES:
            model = RECIPES[part]  # pydantic names the recipe, the file does not
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        model = next(iter(_models_in(annotation)), model)
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)


def spec_differences(mine: RunSpec, theirs: RunSpec) -> list[str]:
    """Lines `key: mine here, theirs in the run`, for a node whose spec is not the run's."""
    a, b = _flat(mine.model_dump(mode="json")), _flat(theirs.model_dump(mode="json"))
    return [
        f"{key} is {_shown(a.get(key))} here and {_shown(b.get(key))} in the run"
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    ]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat

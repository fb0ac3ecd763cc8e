"""Takes a TOML run file and `a.b=c` settings, gives a frozen typed RunConfig; every default stands here, once."""

import difflib
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from outrider.errors import UserError

Whole = Annotated[int, Field(strict=True)]  # no 2.0, "2" or true
Positive = Annotated[Whole, Field(ge=1)]
Layers = Annotated[Whole, Field(ge=1, le=128)]
Heads = Annotated[Whole, Field(ge=1, le=1024)]
Size = Annotated[Whole, Field(ge=1, le=2**20)]
MOST_ROWS = 4096  # a micro-batch, and micro-batches a step
Rows = Annotated[Whole, Field(ge=1, le=MOST_ROWS)]
Real = Annotated[float, Field(strict=True)]
Share = Annotated[Real, Field(ge=0.0, le=1.0)]
Place = Annotated[Path, AfterValidator(Path.expanduser)]
DType = Literal["float32", "bfloat16"]
Sharding = Literal["ddp", "fsdp2"]
LOGIN = re.compile(r"(?<=//)[^/@]*@|^[^/@]*:[^/@]*@")
NO_LOGIN = "must hold no user and password, it is said and written down: put them into ~/.netrc (machine, login, password)"


def without_login(address: str) -> str:
    """An address as it may be shown."""
    return LOGIN.sub("", address)


def _no_login(address: str) -> str:
    if without_login(address) != address:
        raise ValueError(NO_LOGIN)
    return address


def _address(address: str) -> str:
    if not re.match(r"https?://[^/]", address):
        raise ValueError("must be an address such as http://host:8000")
    return address


DEVICE = re.compile(r"cpu|cuda(:\d{1,4})?")


def _device(name: str) -> str:
    if not DEVICE.fullmatch(name):
        raise ValueError("must be 'cpu', 'cuda', or one card such as 'cuda:1'")
    return name


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TargetConfig(Section):
    """The frozen target: `path` is a local folder or a hub id; it is loaded in `dtype`.

    `trust_remote_code`: Python code in that folder may run on this machine. Without it a target that needs its own is refused.
    """

    path: Annotated[str, AfterValidator(os.path.expanduser)]
    dtype: DType = "bfloat16"
    trust_remote_code: bool = False


class DataConfig(Section):
    """`rows`: a folder made by `outrider prepare`. `heldout`: prompts (JSONL) for the real accepted length, or none."""

    rows: Place
    heldout: Place | None = None


class FeaturesConfig(Section):
    """How the target's features are made and kept.

    `documents`: "apart" runs each document on its own, "packed" whole rows in one forward, with kernels that are told where
    documents begin (compiled on a GPU). `precision`: "as_loaded", or "fp8": the linear layers up to the last captured one in 8
    bits, for everything that the target does in this run. `keep`: "no" captures each row anew, "memory" and "disk" hold all rows'
    features after the first epoch; `store`: the folder on disk, `features` in the run's folder when left out; `keep_dtype`: there
    in the target's dtype or in 8 bits. `kernel_cache`: a folder on a local disk for a GPU's compiled kernels, one of the user's
    under the temporary folder when left out. `require_fast_kernels`: no run where a layer's reference code would stand in.
    `server`: features come from a running vLLM server at this address instead, one document a request, `server_requests` at a
    time, through files in `server_folder` (that folder as seen from here, when it is not at the path that the server names).
    `server_check`: at the start "all" loads the target on the CPU once, up to the last captured layer, and rebuilds its logits
    from every layer's features; "first" up to the first captured layer alone, where memory does not allow more.
    """

    documents: Literal["apart", "packed"] = "apart"
    precision: Literal["as_loaded", "fp8"] = "as_loaded"
    keep: Literal["no", "memory", "disk"] = "no"
    store: Place | None = None
    keep_dtype: Literal["target", "fp8"] = "target"
    kernel_cache: Place | None = None
    require_fast_kernels: bool = False
    server: Annotated[str, AfterValidator(_no_login), AfterValidator(_address)] | None = None
    server_folder: Place | None = None
    server_requests: Positive = 8
    server_check: Literal["all", "first"] = "all"

    @field_validator("store", "keep_dtype", "server_folder", "server_requests", "server_check")
    @classmethod
    def _no_idle_option(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse an option that would do nothing; its default passes, since the resolved run file writes those down too."""
        assert info.field_name is not None
        if value == cls.model_fields[info.field_name].default:
            return value
        if info.field_name.startswith("server_"):
            if info.data.get("server", "") is None:  # one that was refused is no reason for a second sentence
                raise ValueError("does nothing without features.server: name the server, or leave this out")
        elif info.data.get("keep", "disk") != "disk":
            raise ValueError(f"does nothing with features.keep = \"{info.data['keep']}\": set it to \"disk\", or leave this out")
        return value


class DrafterConfig(Section):
    """The drafter's architecture. What is left out is derived from the target, and printed."""

    num_layers: Layers = 5
    block_size: Annotated[Whole, Field(le=4096)] = 16
    mask_token_id: Whole
    target_layer_ids: tuple[Whole, ...] | None = None
    num_target_features: Layers = 5
    intermediate_size: Size | None = None
    num_heads: Heads | None = None
    num_kv_heads: Heads | None = None
    head_dim: Annotated[Whole, Field(ge=1, le=1024)] | None = None
    rope_theta: Annotated[Real, Field(gt=0)] | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    sliding_window: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | None = None


class LayoutConfig(Section):
    """Anchors per row, and how many each document gets before the rest is shared in proportion."""

    anchors: Annotated[Whole, Field(ge=1, le=2**20)] = 512
    document_floor: Annotated[Whole, Field(ge=0, le=2**20)] = 8


class ObjectiveConfig(Section):
    """`gamma`: decay length of the slot weights in slots; derived from the block size when left out. At 0.1 the
    second drafted slot weighs e^-10 of the first; below, only the first would learn.

    `logits_mib`: memory for the logits of one chunk of rows, MiB; the loss never holds more of them.
    """

    gamma: Annotated[Real, Field(ge=0.1)] | None = None
    logits_mib: Positive = 768


class OptimizerConfig(Section):
    """AdamW (arXiv 1711.05101) on fp32 masters, cosine schedule.

    A step moves a weight by about `learning_rate`, whatever its gradient: above 0.1, five times the spread of fresh weights, no
    weight outlives a step. `epsilon` stands beside gradients that clipping keeps far below 1e-3 each: above that, it hides them.
    `weight_decay` shrinks by `learning_rate` times itself a step: up to 10 never past zero.

    `state`: dtype of both moments; "8bit" takes 2.03 bytes a parameter instead of 8, through torchao. `clip_norm`: the gradient's
    largest norm; clipped far below 1e-3, a large drafter's gradients vanish beside AdamW's epsilon and nothing is learned.
    """

    state: Literal["float32", "8bit"] = "float32"

    learning_rate: Annotated[Real, Field(gt=0, le=0.1)] = 6e-4
    beta1: Annotated[Real, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[Real, Field(ge=0, lt=1)] = 0.95
    epsilon: Annotated[Real, Field(gt=0, le=1e-3)] = 1e-8
    weight_decay: Annotated[Real, Field(ge=0, le=10)] = 0.01
    clip_norm: Annotated[Real, Field(ge=1e-3)] = 1.0
    warmup_share: Share = 0.04
    final_share: Share = 0.1


class TrainConfig(Section):
    """One optimizer step takes `rows_per_batch * accumulation` rows, over all processes: their number changes the time of a step,
    never what it learns. `steps` overrides `epochs` when given.

    `init_from`: a fresh run begins from this drafter (a published folder of either format, a checkpoint or a run) instead of from
    scratch, with a new optimizer; it must fit the run in every size, and once the run has a checkpoint it is not opened again.
    `attention`: "dense" is the reference on any device, "fused" the compiled road on a CUDA device; derived from `device` when
    left out. `activation_budget`: on the fused road, the share of activations kept for the backward, the rest made again.
    `accept_every`: steps between measurements of the real accepted length on `data.heldout`, greedy, `accept_prompts` prompts of
    `accept_tokens` tokens. `max_hours`: wall-clock budget of one start; the run saves and stops in time, and the same command
    goes on. `trace_steps`: in the first so many steps of a start it is recorded what ran when on which device, `trace.json`.
    """

    folder: Place
    init_from: Place | None = None
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = 0
    device: Annotated[str, AfterValidator(_device)] = "cpu"
    attention: Literal["dense", "fused"] | None = None
    activation_budget: Annotated[Real, Field(gt=0, le=1)] = 1.0
    precision: DType = "bfloat16"
    epochs: Positive = 6
    steps: Positive | None = None
    rows_per_batch: Rows = 1
    accumulation: Rows = 1
    log_every: Positive = 1
    tracker: Literal["tensorboard"] | None = None
    max_hours: Annotated[Real, Field(gt=0)] | None = None
    trace_steps: Annotated[Whole, Field(ge=0)] = 0
    accept_every: Positive | None = None
    accept_prompts: Positive = 16
    accept_tokens: Positive = 128


class CheckpointConfig(Section):
    """A checkpoint every `every` steps, and when `every_minutes` have passed since the last one, and at the end.

    Kept are the last `keep_last`, with `keep_best` the one of the best measured accepted length (a new best is saved at once),
    and the first of every `keep_every_hours` of training.
    """

    every: Positive = 500
    every_minutes: Annotated[Real, Field(gt=0)] | None = None
    keep_last: Positive = 2
    keep_best: bool = True
    keep_every_hours: Annotated[Real, Field(gt=0)] | None = None


class GuardsConfig(Section):
    """When a run is stopped, or something odd in it recorded.

    `max_bad_steps`: steps in a row whose gradient is not finite; each is skipped and its rows saved, so many stop the run.
    `max_bad_rows`: rows that cannot be read any more; each is left out, one more stops the run. `loss_spike`: a logged loss
    above this many times the median of the last 50 is recorded. `too_good`: a mean slot accuracy from which the leak test runs.
    `stuck_minutes`: a step, measurement or save that takes longer ends the process, all stacks on record. `min_free_gib`: the
    run saves and stops when the next checkpoint would leave less on the disk.
    """

    max_bad_steps: Positive = 5
    max_bad_rows: Annotated[Whole, Field(ge=0)] = 10
    loss_spike: Annotated[Real, Field(gt=1)] = 2.0
    too_good: Annotated[Real, Field(gt=0)] = 0.9
    stuck_minutes: Annotated[Real, Field(gt=0)] = 30.0
    min_free_gib: Annotated[Real, Field(ge=0)] = 1.0


class PlacementConfig(Section):
    """Where the target runs, and how several processes share the work. One process holds one replica of the drafter.

    `capture_cards`: devices that each process takes for the target besides its `train.device`: 0 has both on one (colocated), 1
    is a pair, more take rows in turn, each with a whole target. `cards_per_target`: over how many of them the layers of one
    target are spread, for a target larger than one card. `turns`: "overlapped" lets targets run at any time,
    "one_at_a_time" never two at once on a machine. `sharding`: "ddp" keeps whole masters and optimizer state in every process,
    "fsdp2" shares them out. `timeout_s`: how long features or another process may be awaited before the run stops.
    """

    capture_cards: Annotated[Whole, Field(ge=0)] = 0
    cards_per_target: Positive = 1
    turns: Literal["overlapped", "one_at_a_time"] = "overlapped"
    sharding: Sharding = "ddp"
    timeout_s: Positive = 60

    @field_validator("cards_per_target")
    @classmethod
    def _all_targets_whole(cls, value: int, info: ValidationInfo) -> int:
        cards = info.data.get("capture_cards")
        if cards is not None and value > 1 and (cards == 0 or cards % value):
            raise ValueError(f"does not go with placement.capture_cards = {cards}: that must be a multiple of it, {value} for "
                             "each target")
        return value


class RunConfig(Section):
    """A whole run, as one TOML file describes it."""

    target: TargetConfig
    data: DataConfig
    features: FeaturesConfig = FeaturesConfig()
    drafter: DrafterConfig
    layout: LayoutConfig = LayoutConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    placement: PlacementConfig = PlacementConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    guards: GuardsConfig = GuardsConfig()


def load_run(path: Path, settings: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply `section.key=value` settings. Raises UserError with the field, the value and the rule.

    Relative paths in the file are taken from the current folder, as on the command line.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: the run file is missing: check the path") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: is a folder, a run file is one TOML file: name the file") from error
    except OSError as error:
        raise UserError(f"{path}: the run file cannot be read ({error.strerror}): check the path and its permissions") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error
    for setting in settings:
        _apply(document, setting)
    return parse_run(document, where=str(path))


def parse_run(document: dict[str, Any], *, where: str) -> RunConfig:
    """Check a run given as nested dictionaries; `where` begins each error."""
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise UserError(f"{where}: " + "; ".join(_explain(detail) for detail in error.errors())) from error


def _apply(document: dict[str, Any], setting: str) -> None:
    """Put `a.b=c` into the nested dictionary; c is read as a TOML value, or as a plain string when it is none."""
    name, equals, text = setting.partition("=")
    parts = name.strip().split(".")
    if not equals or len(parts) != 2 or not all(parts):
        raise UserError(f"--set {setting}: must read section.key=value, for example --set optimizer.learning_rate=3e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    section = document.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise UserError(f"--set {setting}: '{parts[0]}' is not a section of the run file")
    section[parts[1]] = value


RULES = {
    "model_type": "must be a section of keys",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be a text in quotes",
    "path_type": "must be a path in quotes",
    "tuple_type": "must be a list",
}

WHERE_FROM = {"drafter.mask_token_id": ", outrider prepare names ids to choose from"}


def _explain(detail: ErrorDetails) -> str:
    place = [str(part) for part in detail["loc"]]
    name = ".".join(place)
    if detail["type"] == "extra_forbidden":
        known = _known_keys(place[:-1])
        homes = [(key, f"{section}.{key}") for section in RunConfig.model_fields for key in _known_keys([section])]
        in_section, in_others = (difflib.get_close_matches(place[-1], keys, n=1) for keys in (known, {key for key, _ in homes}))
        near = [".".join([*place[:-1], key]) for key in in_section] or [home for key, home in homes if key in in_others]
        hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key '{name}': {hint}"
    if detail["type"] == "missing":
        return f"'{name}' is missing: add it{WHERE_FROM.get(name, '')}"
    rule = RULES.get(detail["type"]) or detail["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    return f"{name} = {without_login(_toml_value(detail['input']))}: {rule}"


def _known_keys(place: list[str]) -> list[str]:
    if not place:
        return list(RunConfig.model_fields)
    field = RunConfig.model_fields.get(place[0])
    section = field.annotation if field else None
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []


def to_toml(config: RunConfig) -> str:
    """The run as TOML text that `load_run` reads back to an equal RunConfig; keys without a value are left out."""
    lines: list[str] = []
    for section, values in config.model_dump(mode="json", exclude_none=True).items():
        lines += [f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in values.items()), ""]
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'
        case list():
            return "[" + ", ".join(_toml_value(item) for item in value) + "]"
        case _:
            return repr(value)

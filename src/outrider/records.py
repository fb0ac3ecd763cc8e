"""What travels between the rooms, in this order: TokenRows > Features > DraftBlocks > LossTerms > StepReport; AcceptReport, Span.

Shape letters: B rows, S row length, A anchors per row, K block size, L captured layers, D width, F = L * D, V vocabulary,
H query heads, G key/value heads, C head dim, Q = A * K queries, N = S + Q keys, n drafter layers.
Knows nothing of files, devices or processes.
"""

from __future__ import annotations  # tensors are named here, and whoever has one has loaded torch: a plan has none

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

from outrider.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PADDING_DOCUMENT = -1
FULL, SLIDING = "full_attention", "sliding_attention"


def _to(record: Any, device: torch.device) -> Any:
    queued = str(device).startswith("cuda")  # to the host it must be waited for: nobody there follows the stream
    return replace(record, **{f.name: getattr(record, f.name).to(device, non_blocking=queued) for f in fields(record)})


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens, each holding one or more documents side by side.

    `input_ids_BS` int64. `document_ids_BS` int64: 0, 1, .. within the row, PADDING_DOCUMENT (-1) on padding, which stands
    only at the end. `positions_BS` int64: position within the document (0 on padding). `loss_mask_BS` bool: supervised.
    `row_ids_B` int64: the row's number in the data, the key of its anchors.
    """

    input_ids_BS: Tensor
    document_ids_BS: Tensor
    positions_BS: Tensor
    loss_mask_BS: Tensor
    row_ids_B: Tensor

    def to(self, device: torch.device) -> Self:
        return _to(self, device)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in order."""
        import torch

        return cls(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)})


@dataclass(frozen=True)
class Features:
    """The target's outputs at the captured layers, concatenated on the channel: `values_BSF`, floating point, 0 on padding."""

    values_BSF: Tensor

    def to(self, device: torch.device) -> Self:
        return _to(self, device)


@dataclass(frozen=True)
class DraftBlocks:
    """The blocks drafted in each row: K slots from each anchor, always A per row.

    `anchors_BA` int64: index in the row, sorted (0 where dropped). `keep_BA` bool: False for a dropped (padding) block.
    `noise_ids_BAK` int64: the anchor's token in slot 0, the mask token elsewhere. `positions_BAK` int64: within the document.
    `labels_BAK` int64: the token at a + k (0 where the weight is 0). `weights_BAK` float32: decay times supervision; slot 0
    has weight 0.
    """

    anchors_BA: Tensor
    keep_BA: Tensor
    noise_ids_BAK: Tensor
    positions_BAK: Tensor
    labels_BAK: Tensor
    weights_BAK: Tensor

    def to(self, device: torch.device) -> Self:
        return _to(self, device)


@dataclass(frozen=True)
class LossTerms:
    """Sums over blocks, to be added over micro-batches and processes and divided once.

    `loss_sum` float32 scalar with a graph: sum of weight * cross-entropy (nats). `weight_sum` float32 scalar.
    `correct_K`, `count_K` float32: right and all supervised predictions by slot (slot 0 is always 0; counts, not weights).
    `run_sum`, `block_count` float32 scalars: accepted runs (right predictions before the first wrong one, within the
    supervised part) summed over the kept blocks that have a supervised slot, and the number of those blocks. Their quotient + 1
    is the accepted-length PROXY: teacher-forced on data, not a measurement of decoding.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    correct_K: Tensor
    count_K: Tensor
    run_sum: Tensor
    block_count: Tensor

    def detach(self) -> LossTerms:
        return LossTerms(**{f.name: getattr(self, f.name).detach() for f in fields(self)})

    def __add__(self, other: LossTerms) -> LossTerms:
        return LossTerms(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as it is logged: losses in nats, times in seconds, tau_proxy as in LossTerms."""

    step: int
    loss: float
    slot_accuracy: list[float]
    tau_proxy: float
    gradient_norm: float
    learning_rate: float
    supervised_slots: int
    anchors: int
    eligible: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class AcceptReport:
    """What verification measured, in counts that add over prompts.

    `runs`: accepted draft tokens of each target forward (0..K-1), in order, one list a prompt. `forwards` counts target
    forwards after the prompt's own; `tokens` what they produced, so tau = tokens / forwards, bonus token included.
    `drafted_K`, `accepted_K`: by slot, how often slot k was verified with all slots before it accepted, and how often accepted.
    """

    runs: list[list[int]]
    tokens: int
    forwards: int
    drafted_K: list[int]
    accepted_K: list[int]
    seconds: float

    @property
    def tau(self) -> float:
        """Accepted length: tokens per target forward, bonus included; 1.0 where nothing was drafted."""
        return self.tokens / self.forwards if self.forwards else 1.0

    @property
    def acceptance_by_slot(self) -> list[float]:
        """Slots 1..K-1: share accepted among those whose earlier slots were all accepted."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_K[1:], self.drafted_K[1:], strict=True)]

    @property
    def survival_by_slot(self) -> list[float]:
        """Slots 1..K-1: share of all forwards in which the slot and all before it were accepted; they add up to tau - 1, but for
        what a text's end cut off."""
        return [a / self.forwards if self.forwards else 0.0 for a in self.accepted_K[1:]]


@dataclass(frozen=True)
class Span:
    """Labelled work on a lane (a device's queue) from `begin` to `end`, ms: a piece of a time line, traced or simulated."""

    lane: str
    label: str
    begin: float
    end: float


@dataclass(frozen=True)
class FrozenHead:
    """The target's output head: `weight_VD`, and the soft cap c of its logits (c * tanh(x / c)) or None."""

    weight_VD: Tensor
    softcap: float | None

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """`[..., D]` to `[..., V]` logits in the head's dtype."""
        logits = hidden_XD.to(self.weight_VD.dtype) @ self.weight_VD.T
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes the drafter's architecture and its contract with one target. Raises UserError on a bad value."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    tie_word_embeddings: bool
    layer_types: tuple[str, ...] = field(default=())
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        check_layer_ids(self.target_layer_ids, self.num_target_layers)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(f"drafter.mask_token_id = {self.mask_token_id}: must lie in 0..{self.vocab_size - 1}, inside the "
                            "target's embedding")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"drafter.num_heads = {self.num_heads}: must be a multiple of drafter.num_kv_heads = "
                            f"{self.num_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"drafter.head_dim = {self.head_dim}: must be even, rotary embedding turns pairs of channels")
        if len(self.layer_types) != self.num_layers or set(self.layer_types) - {FULL, SLIDING}:
            raise UserError(f"drafter.layer_types = {list(self.layer_types)}: must name {self.num_layers} layers, each "
                            f"'{FULL}' or '{SLIDING}'")
        if (SLIDING in self.layer_types) != (self.sliding_window is not None):
            raise UserError(f"drafter.sliding_window = {self.sliding_window}: must be set exactly when drafter.layer_types has "
                            f"'{SLIDING}' layers")
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise UserError(f"drafter.sliding_window = {self.sliding_window}: must be at least drafter.block_size = "
                            f"{self.block_size}: servers apply the window inside the block too, where training does not")


def check_block_size(block_size: int) -> None:
    """Raises UserError unless there is at least one slot to draft."""
    if block_size < 2:
        raise UserError(f"drafter.block_size = {block_size}: must be at least 2, one slot is the anchor's own token")


def check_layer_ids(layer_ids: Sequence[int], num_target_layers: int) -> None:
    """Raises UserError unless the captured layers are distinct, increasing and below the target's last layer."""
    last = num_target_layers - 1
    for layer in layer_ids:
        if not 0 <= layer < last:
            raise UserError(f"drafter.target_layer_ids has {layer}: must lie in 0..{last - 1} for a target of "
                            f"{num_target_layers} layers, whose last layer ({last}) is never used")
    if list(layer_ids) != sorted(set(layer_ids)) or not layer_ids:
        raise UserError(f"drafter.target_layer_ids = {list(layer_ids)}: must be a list of distinct layers in increasing order")

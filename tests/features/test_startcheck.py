"""The capture's start-up check: sound captures pass, each kind of wrong one is refused."""

from collections.abc import Callable

import pytest
import torch
from families import family_target
from toys import random_rows

from outrider.errors import UserError
from outrider.features import startcheck
from outrider.features.capture import capture
from outrider.features.packed import PackedCapture
from outrider.features.startcheck import check_capture, check_delta_kernel
from outrider.records import Features, TokenRows

IDS = (1, 3)
ROWS = random_rows([[60, 150]], length=220, seed=3)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma2", "gpt_oss"])
def test_a_sound_capture_passes(family: str) -> None:
    target = family_target(family)
    check_capture(target, lambda rows: capture(target, rows, IDS), ROWS, IDS)
    if family != "gemma2":
        check_capture(target, PackedCapture(target, IDS, compiled=False), ROWS, IDS)


def test_a_row_of_padding_passes() -> None:
    target = family_target("llama")
    check_capture(target, lambda rows: capture(target, rows, IDS), random_rows([[]], length=8, seed=0), IDS)


def shifted(values: torch.Tensor) -> torch.Tensor:
    return values.roll(1, dims=1)


def second_layer_twice(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values[..., 32:], values[..., 32:]], dim=-1)


@pytest.mark.parametrize("spoil", [shifted, second_layer_twice])
def test_a_wrong_capture_is_refused(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    target = family_target("llama")
    with pytest.raises(UserError, match=r"capture of layer 1: .* agree with the target's own on \d+\.\d % of 150 positions"):
        check_capture(target, lambda rows: Features(spoil(capture(target, rows, IDS).values_BSF)), ROWS, IDS)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_leak_between_documents_is_refused(family: str) -> None:
    """The row taken for one document, as a kernel would that is not told where documents begin."""
    target = family_target(family)

    def leaking(rows: TokenRows) -> Features:
        ids = torch.where(rows.document_ids_BS < 0, -1, 0)
        return capture(target, TokenRows(rows.input_ids_BS, ids, rows.positions_BS, rows.loss_mask_BS, rows.row_ids_B), IDS)

    with pytest.raises(UserError, match=r"capture of layer 1"):
        check_capture(target, leaking, ROWS, IDS)


def test_features_that_are_not_finite_are_refused_by_layer() -> None:
    target = family_target("llama")

    def broken(rows: TokenRows) -> Features:
        values = capture(target, rows, IDS).values_BSF
        values[0, 17, 40] = float("inf")
        return Features(values)

    with pytest.raises(UserError, match=r"features of layer 3 are not finite .* row \[0\]"):
        check_capture(target, broken, ROWS, IDS)


def test_a_wrong_delta_kernel_is_refused() -> None:
    right, cpu = startcheck.gated_delta_rule, torch.device("cpu")
    check_delta_kernel(cpu, right, "ours")

    def forgets_to_decay(*given: torch.Tensor) -> torch.Tensor:
        return right(*given[:3], given[3] * 0, *given[4:])

    with pytest.raises(UserError, match=r"gated delta rule's kernel \(ours\) .* differs from the plain loop by \d+"):
        check_delta_kernel(cpu, forgets_to_decay, "ours")

"""Captured features: batched and packed equals one by one, the right layers, before the final norm, nothing above them run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from toys import KINDS, random_rows

from outrider.features import capture as capture_module
from outrider.features.capture import (
    Document,
    FeatureSource,
    bucket_by_length,
    capture,
    captured_layers,
    documents_of,
    one_row,
    run_to_last_layer,
)
from outrider.features.target import Target
from outrider.records import TokenRows

ToyTarget = Callable[..., Target]
LAYERS = (0, 1, 2, 3, 4)  # of 6: every layer that may be captured
# Float32 sums in another order, over 6 layers of weights ten times the usual scale: 1e-5 relative is what one sees; a leak from
# another document or a shift moves the outputs by their own size.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def hidden_states(target: Target, ids: Tensor) -> tuple[Tensor, ...]:
    """As transformers gives them: [i + 1] is the output of layer i, except the last, which is after the final norm."""
    with torch.no_grad():
        return target.model(ids, output_hidden_states=True, use_cache=False).hidden_states


def alone(target: Target, rows: TokenRows, document: Document) -> Tensor:
    """`[length, L * D]` of a document run on its own."""
    ids = rows.input_ids_BS[document.b, document.start : document.start + document.length][None]
    states = hidden_states(target, ids)
    return torch.cat([states[i + 1][0] for i in LAYERS], dim=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_equal_documents_one_by_one(toy_target: ToyTarget, kind: str) -> None:
    target = toy_target(kind)
    rows = random_rows([[11, 12, 1, 9], [40], [], [7, 30]], length=40, seed=0)
    values = capture(target, rows, LAYERS).values_BSF
    documents = documents_of(rows.document_ids_BS)
    assert len(documents) == 7
    for document in documents:
        found = values[document.b, document.start : document.start + document.length]
        torch.testing.assert_close(found, alone(target, rows, document), **CLOSE)
    assert not values[rows.document_ids_BS < 0].any(), "0 on padding"


@pytest.mark.parametrize("kind", KINDS)
def test_one_document_equals_hidden_states_bit_for_bit(toy_target: ToyTarget, kind: str) -> None:
    """Where the shapes are equal there is nothing to round differently."""
    target = toy_target(kind)
    rows = random_rows([[24]], length=24, seed=1)
    values = capture(target, rows, LAYERS).values_BSF
    assert torch.equal(values[0], alone(target, rows, Document(0, 0, 24)))


def logits_from(target: Target, captured: Tensor, after: int) -> Tensor:
    """The target's logits, rebuilt from the output of layer `after` through the layers that are left, the norm and the head."""

    def replace_input(module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (captured, *args[1:])

    handle = target.layers[after + 1].register_forward_pre_hook(replace_input)
    try:
        with torch.no_grad():
            out = target.model.get_decoder()(torch.zeros(captured.shape[:2], dtype=torch.int64), use_cache=False)
    finally:
        handle.remove()
    return target.head.logits(out.last_hidden_state)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_can_be_rebuilt_from_the_captured_state(toy_target: ToyTarget, kind: str) -> None:
    """Top-1 agreement is 1, and a shifted, neighbouring or normed state is found out."""
    target = toy_target(kind)
    rows = random_rows([[64]] * 2, length=64, seed=2)
    with torch.no_grad():
        truth = target.model(rows.input_ids_BS, use_cache=False).logits
    for layer in LAYERS:
        captured = capture(target, rows, (layer,)).values_BSF
        rebuilt = logits_from(target, captured, layer)
        assert (rebuilt.argmax(-1) == truth.argmax(-1)).all()
        torch.testing.assert_close(rebuilt, truth, rtol=1e-3, atol=1e-3)
        wrong = {
            "shifted by one": captured.roll(1, dims=1),
            "after a norm": target.model.get_decoder().norm(captured),
            "from the layer before": hidden_states(target, rows.input_ids_BS)[layer],
        }
        for name, state in wrong.items():
            agreement = (logits_from(target, state, layer).argmax(-1) == truth.argmax(-1)).float().mean()
            assert agreement < 0.9, f"{name}, layer {layer}: the check has no power here"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_above_the_last_captured_layer_runs(toy_target: ToyTarget, kind: str) -> None:
    target = toy_target(kind)
    ran: list[str] = []
    watched = {**{f"layer {i}": layer for i, layer in enumerate(target.layers)}, "head": target.model.get_output_embeddings(),
               "norm": target.model.get_decoder().norm}
    handles = [module.register_forward_pre_hook(lambda m, a, name=name: ran.append(name)) for name, module in watched.items()]
    try:
        capture(target, random_rows([[9]], length=12, seed=0), (1, 3))
    finally:
        for handle in handles:
            handle.remove()
    assert ran == ["layer 0", "layer 1", "layer 2", "layer 3"]


def test_a_stopped_forward_leaves_no_trace(toy_target: ToyTarget) -> None:
    """No hook stays, and the next plain forward is what it was."""
    target = toy_target("qwen3")
    rows = random_rows([[16]], length=16, seed=0)
    before = hidden_states(target, rows.input_ids_BS)
    hooks = hooks_of(target)  # transformers' own
    capture(target, rows, (0, 2))
    assert hooks_of(target) == hooks
    for a, b in zip(before, hidden_states(target, rows.input_ids_BS), strict=True):
        assert torch.equal(a, b)


def test_an_error_in_the_forward_is_not_swallowed(toy_target: ToyTarget) -> None:
    target = toy_target("llama")
    hooks = hooks_of(target)
    with pytest.raises(IndexError), captured_layers(target, (1,), stop_after_last=True):
        run_to_last_layer(target, torch.tensor([[10**6]]))
    assert hooks_of(target) == hooks


def hooks_of(target: Target) -> list[int]:
    return [len(layer._forward_hooks) for layer in target.layers]


def test_features_carry_no_graph_and_keep_the_dtype(toy_target: ToyTarget) -> None:
    target = toy_target("llama", dtype="bfloat16")
    values = capture(target, random_rows([[8]], length=8, seed=0), (1, 2)).values_BSF
    assert values.dtype == torch.bfloat16
    assert values.shape == (1, 8, 64)
    assert not values.requires_grad
    assert not any(p.requires_grad for p in target.model.parameters())


def test_documents_of_rows() -> None:
    rows = random_rows([[3, 1], [], [4]], length=5, seed=0)
    assert documents_of(rows.document_ids_BS) == [Document(0, 0, 3), Document(0, 3, 1), Document(2, 0, 4)]


def test_buckets_hold_every_document_once_within_the_token_limit() -> None:
    lengths = [5, 40, 39, 1, 1, 2, 12, 33, 40, 8]
    documents = [Document(0, i, n) for i, n in enumerate(lengths)]
    groups = bucket_by_length(documents, max_tokens=128)
    assert sorted(d.start for group in groups for d in group) == list(range(10))
    for group in groups:
        padded = len(group) * max(d.length for d in group)
        assert padded <= 128 or len(group) == 1
        assert padded - sum(d.length for d in group) <= 0.25 * padded
    assert len(groups) < 8
    assert bucket_by_length([], max_tokens=128) == []


def test_kept_features_are_the_captured_ones(toy_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    target, rows = toy_target("llama"), random_rows([[5, 7], [12], [3, 3, 6]], length=16, seed=1)
    calls = []
    monkeypatch.setattr(capture_module, "capture", lambda t, r, ids: calls.append(r.row_ids_B.tolist()) or capture(t, r, ids))
    device = torch.device("cpu")
    keeping, fresh = FeatureSource(target, (1, 3), keep="memory"), FeatureSource(target, (1, 3), keep="no")
    first = keeping.features(rows, device).values_BSF
    assert torch.equal(keeping.features(rows, device).values_BSF, first)
    assert sorted(row for call in calls for row in call) == [0, 1, 2]
    one_by_one = torch.cat([fresh.features(one_row(rows, b), device).values_BSF for b in range(3)])
    assert torch.equal(first, one_by_one)

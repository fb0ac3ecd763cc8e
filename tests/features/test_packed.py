"""Packed capture: equal to every document run alone by transformers itself, at every layer, in every family; no leak."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import FAMILIES, LAYERS, family_target
from toys import random_rows

from outrider.errors import UserError
from outrider.features.capture import capture, documents_of
from outrider.features.packed import PackedCapture
from outrider.features.target import Target, load_target
from outrider.records import TokenRows

ALL = tuple(range(LAYERS - 1))  # of the last layer, transformers gives only the normed output
RECURRENT = ("qwen3_5", "qwen3_5_moe", "qwen3_5_multimodal")


def assert_equal_to_rounding(found: torch.Tensor, expected: torch.Tensor, family: str) -> None:
    """||found - expected|| / ||expected|| of each layer: 3e-7 where float32 sums come in another order (seen over attention).

    30 times more over a gated delta net, which transformers sums by chunks and the packed reference token by token (seen: 4e-6,
    and 3e-5 where experts are chosen after it). A leak moves the outputs by their own size.
    """
    most = 1e-4 if family in RECURRENT else 1e-6
    for j, i in enumerate(ALL):
        f, e = (t.unflatten(-1, (len(ALL), -1))[..., j, :] for t in (found, expected))
        assert float((f - e).norm() / e.norm()) < most, f"{family}, layer {i}"
PACKABLE = [family for family in FAMILIES if family != "gemma2"]


def of_documents_alone(target: Target, rows: TokenRows) -> torch.Tensor:
    """By transformers' own `output_hidden_states`, one document after another; 0 on padding."""
    B, S = rows.input_ids_BS.shape
    expected = torch.zeros(B, S, len(ALL) * target.facts.hidden_size)
    for document in documents_of(rows.document_ids_BS):
        at = slice(document.start, document.start + document.length)
        with torch.no_grad():
            states = target.model(input_ids=rows.input_ids_BS[document.b, at][None], output_hidden_states=True, use_cache=False)
        expected[document.b, at] = torch.cat([states.hidden_states[i + 1][0] for i in ALL], dim=-1)
    return expected


def unequal_rows() -> TokenRows:
    """Three rows of unlike lengths, padded; documents shorter than the convolution, longer than the window."""
    return random_rows([[11, 2, 1, 9], [30], [17, 4]], length=30, seed=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_apart_equal_hidden_states(family: str) -> None:
    target, rows = family_target(family), unequal_rows()
    assert_equal_to_rounding(capture(target, rows, ALL).values_BSF, of_documents_alone(target, rows), family)


@pytest.mark.parametrize("family", PACKABLE)
def test_packed_equals_documents_alone(family: str) -> None:
    target, rows = family_target(family), unequal_rows()
    expected = of_documents_alone(target, rows)
    packed = PackedCapture(target, ALL, compiled=False)
    assert_equal_to_rounding(packed(rows).values_BSF, expected, family)
    torch.testing.assert_close(of_documents_alone(target, rows), expected, rtol=0, atol=0, msg="the target is as it was")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss"])
def test_a_lost_boundary_is_seen(family: str) -> None:
    """The same tokens as one document: the second document's features move by their own size."""
    target, rows = family_target(family), random_rows([[12, 12]], length=24, seed=0)
    packed = PackedCapture(target, ALL, compiled=False)
    apart = packed(rows).values_BSF
    joined = packed(TokenRows(rows.input_ids_BS, torch.zeros_like(rows.document_ids_BS), torch.arange(24)[None],
                              rows.loss_mask_BS, rows.row_ids_B)).values_BSF
    assert_equal_to_rounding(joined[:, :12], apart[:, :12], family)
    assert (joined[:, 12:] - apart[:, 12:]).norm() > 0.1 * apart[:, 12:].norm()


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(UserError, match=r"caps the scores.*use features\.documents = \"apart\""):
        PackedCapture(family_target("gemma2"), ALL, compiled=False)
    target = family_target("llama")
    for kind, sentence in (("chunked_attention", "its kind is chunked_attention"), ("sliding_attention", "sees a window")):
        target.facts = replace(target.facts, layer_kinds=("full_attention", kind) * (LAYERS // 2))
        with pytest.raises(UserError, match=sentence):
            PackedCapture(target, ALL, compiled=False)
        PackedCapture(target, (0,), compiled=False)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_of_unequal_lengths_equals_capture(side: str) -> None:
    """transformers' batch with an attention mask, padded on either side, against ours without one."""
    target, lengths = family_target("llama"), (5, 17, 30)
    rows = random_rows([[n] for n in lengths], length=30, seed=0)
    ids, mask = torch.zeros(3, 30, dtype=torch.int64), torch.zeros(3, 30, dtype=torch.int64)
    places = [slice(30 - n, 30) if side == "left" else slice(0, n) for n in lengths]
    for b, (n, place) in enumerate(zip(lengths, places, strict=True)):
        ids[b, place], mask[b, place] = rows.input_ids_BS[b, :n], 1
    with torch.no_grad():
        states = target.model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                              output_hidden_states=True, use_cache=False).hidden_states
    for values in (capture(target, rows, ALL).values_BSF, PackedCapture(target, ALL, compiled=False)(rows).values_BSF):
        for b, (n, place) in enumerate(zip(lengths, places, strict=True)):
            assert_equal_to_rounding(values[b, :n], torch.cat([states[i + 1][b, place] for i in ALL], dim=-1), "llama")


def test_one_compilation_a_kind_of_layer_whatever_the_documents() -> None:
    target, frames = family_target("qwen3_5"), []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        frames.append(len(list(graph.graph.nodes)))
        return graph.forward

    torch._dynamo.reset()
    packed = PackedCapture(target, ALL, compiled=True, backend=count)
    plain = PackedCapture(target, ALL, compiled=False)
    for lengths in ([10, 20], [1, 2, 3, 4], [7, 7, 7]):
        rows = random_rows([lengths], length=30, seed=len(lengths))
        assert_equal_to_rounding(packed(rows).values_BSF, plain(rows).values_BSF, "qwen3_5")
    assert len(frames) == 2, "gated delta net and attention, six layers"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_every_family_gives_the_same(family: str, tmp_path: Path) -> None:
    """Read by transformers' own choice of class and attention: a wrapper's text model, scores that are capped, sinks."""
    target, rows = family_target(family), unequal_rows()
    target.model.save_pretrained(tmp_path)
    loaded = load_target(str(tmp_path), dtype="float32", device="cpu", last_layer=max(ALL), head=False)
    assert len(loaded.layers) == LAYERS - 1
    assert_equal_to_rounding(capture(loaded, rows, ALL).values_BSF, capture(target, rows, ALL).values_BSF, family)

"""A target spread over devices: its shares give the bits of the whole, however they are cut, and its start is checked as ever."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from families import FAMILIES, family_target
from toys import random_rows, toy_model

from outrider.config import FeaturesConfig, PlacementConfig
from outrider.errors import UserError
from outrider.features import target as target_module
from outrider.features.capture import FeatureSource
from outrider.features.eight_bit import in_8_bits
from outrider.features.source import Order, Provenance, capture_in, open_source
from outrider.features.spread import Share, SpreadCapture, shares_of
from outrider.features.startcheck import check_capture
from outrider.features.target import Stretch, Target, join_up, load_target
from outrider.train.lanes import Trace
from outrider.train.placement import Devices, open_relay

CPU = torch.device("cpu")
IDS = (0, 2, 3)
ROWS = random_rows([[11, 2, 1, 9], [30], [17, 4]], length=30, seed=0)
EXPERTS = ("qwen3_moe", "qwen3_5_moe", "gpt_oss")
CUTS = ((2,), (3,), (1, 2, 3), (4,))  # after a captured layer and not, shares that capture nothing, and one that is not needed


def stretches_of(cuts: tuple[int, ...], layers: int = 6, devices: tuple[torch.device, ...] = (CPU,)) -> tuple[Stretch, ...]:
    bounds = (0, *cuts, layers)
    return tuple(Stretch(devices[n % len(devices)], range(a, b)) for n, (a, b) in enumerate(pairwise(bounds)))


def spread(target: Target, documents: str, cuts: tuple[int, ...], devices: tuple[torch.device, ...] = (CPU,)) -> SpreadCapture:
    shares = shares_of(target, stretches_of(cuts, devices=devices), IDS)
    return SpreadCapture(target, shares, [capture_in(documents, share, share.layer_ids) for share in shares])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("documents", ["apart", "packed"])
def test_shares_give_the_bits_of_the_whole(family: str, documents: str) -> None:
    """To rounding where there are experts: one product for all of an expert's tokens, and what is on padding differs."""
    if (family, documents) == ("gemma2", "packed"):
        pytest.skip("caps its scores: no packed capture")
    whole = capture_in(documents, family_target(family), IDS)(ROWS).values_BSF
    for cuts in CUTS:
        target = family_target(family)
        found = spread(target, documents, cuts)
        error = float((found(ROWS).values_BSF - whole).norm() / whole.norm())
        assert error <= (1e-6 if family in EXPERTS else 0.0), cuts
        check_capture(target, found, random_rows([[20, 10]], length=30, seed=1), IDS)


def test_shares_in_8_bits() -> None:
    whole, _ = in_8_bits(family_target("qwen3_5"), ROWS, IDS, stretches_of(()))
    truth = capture_in("packed", whole, IDS)(ROWS).values_BSF
    target, _ = in_8_bits(family_target("qwen3_5"), ROWS, IDS, stretches_of((1, 3)))
    assert torch.equal(spread(target, "packed", (1, 3))(ROWS).values_BSF, truth)


def test_a_share_that_begins_one_layer_late_is_refused() -> None:
    """The start's check is not blind to how shares are cut."""
    target = family_target("qwen3")
    stretches = (Stretch(CPU, range(2)), Stretch(CPU, range(3, 6)))
    shares = shares_of(target, stretches, (0, 3))
    wrong = SpreadCapture(target, shares, [capture_in("apart", share, share.layer_ids) for share in shares])
    with pytest.raises(UserError, match="capture of layer 3"):
        check_capture(target, wrong, random_rows([[30]], length=30, seed=1), (0, 3))


def test_what_a_share_gives() -> None:
    target = family_target("llama")
    given = [(share.layer_ids, share.captured) for share in shares_of(target, stretches_of((2, 3, 5)), (0, 2, 4))]
    assert given == [((0, 1), 1), ((0,), 1), ((1,), 1)], "hidden states beside features, features alone, no layer after the last"
    assert [len(share.layers) for share in shares_of(target, stretches_of((2, 3)), (0, 2, 4))] == [2, 1, 3]
    assert Share(target, Stretch(CPU, range(2, 4)), (0, 5)).layer_ids == (1,)


@pytest.mark.parametrize("settings", [{}, {"documents": "packed"}, {"precision": "fp8"}, {"keep": "disk"}])
def test_a_spread_source_is_opened_and_checked_as_any(
    toy_folder: Callable[..., Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    found = []
    for number, device in enumerate(("cpu", stretches_of((1, 3), layers=4))):
        order = Order(str(toy_folder("qwen3_5")), "float32", device, (1, 3), last_layer=3)
        source = open_source(order, FeaturesConfig(**settings), random_rows([[20, 30]], length=60, seed=1),
                             Provenance("target", "rows", 3, tmp_path / f"features {number}"))
        assert len(source.target.layers) == 4
        source.target.drop_head()
        found.append(source.features(ROWS, CPU).values_BSF)
        assert torch.equal(source.features(ROWS, CPU).values_BSF, found[-1])
    assert torch.equal(*found)


def test_where_each_part_of_a_model_goes() -> None:
    """Layers to their devices, everything else to the first, and nothing twice: as transformers takes it."""
    one, two = torch.device("cuda:0"), torch.device("cuda:1")
    for family in ("llama", "qwen3_5_multimodal"):
        target = family_target(family)
        stretches = stretches_of((2,), devices=(one, two))
        places = {target.layers[i]: stretch.device for stretch in stretches for i in stretch.layers}
        found = dict(target_module._places("", target.model, places, one))
        layers = {name: device for name, device in found.items() if ".layers." in name and "visual" not in name}
        assert list(layers.values()) == [one] * 2 + [two] * 4
        assert set(found.values()) == {one, two}
        assert {device for name, device in found.items() if name not in layers} == {one}
        for name, _ in target.model.named_parameters():
            assert sum(name.startswith(f"{part}.") for part in found) == 1, name


def test_accelerates_hooks_are_taken_off_without_a_trace() -> None:
    model = toy_model("llama", seed=0)
    before = {module: dict(vars(module)) for module in model.modules()}
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device=CPU))
    assert "forward" in vars(model.model.layers[0].mlp)
    target_module._without_hooks(model)
    for module, attributes in before.items():
        assert vars(module).keys() == attributes.keys(), type(module).__name__


TWO_DEVICES = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, beside the CPU as the second device")


@pytest.mark.gpu
@TWO_DEVICES
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("order", [0, 1])
def test_two_really_different_devices(toy_folder: Callable[..., Path], kind: str, order: int) -> None:
    """Layers on the GPU and on the CPU, loaded there, against all on the CPU; float32 without its short cuts on either.

    Sums of 32 products in another order differ by 1e-7 of their size, some layers and norms later by ten times that.
    """
    cuda = torch.device("cuda", 0)
    devices = ((cuda, CPU), (CPU, cuda))[order]
    torch.backends.cuda.matmul.allow_tf32 = False
    target = load_target(str(toy_folder(kind)), dtype="float32", device=stretches_of((3,), devices=devices), last_layer=None,
                         head=True)
    assert [next(layer.parameters()).device for layer in target.layers] == [devices[0]] * 3 + [devices[1]] * 3
    assert target.device == devices[0]
    run = spread(target, "apart", (3,), devices)
    check_capture(target, run, random_rows([[30]], length=30, seed=1), IDS)
    on_cpu = load_target(str(toy_folder(kind)), dtype="float32", device="cpu", last_layer=None, head=True)
    truth = capture_in("apart", on_cpu, IDS)(ROWS).values_BSF
    found = FeatureSource(target, IDS, keep="no", run=run).features(ROWS, CPU).values_BSF
    assert float((found - truth).norm() / truth.norm()) < 1e-5
    answers = [one.answer([[5, 6, 7], [9]], max_new_tokens=8, stop_ids=[258], temperature=0.0, top_p=1.0, top_k=0, seed=0)
               for one in (target, on_cpu)]
    assert answers[0] == answers[1]


@pytest.mark.gpu
@TWO_DEVICES
@pytest.mark.parametrize("places", [(0, 0), (0, 1), (1, 0)])
def test_rows_cross_between_devices_while_others_are_captured(toy_folder: Callable[..., Path], places: tuple[int, int]) -> None:
    """Through the relay: both shares on streams of one card, or one of them on the CPU; each row its own features."""
    cuda = torch.device("cuda", 0)
    devices = tuple((cuda, CPU)[place] for place in places)
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu, target = (load_target(str(toy_folder("qwen3")), dtype="float32", device=device, last_layer=3, head=False)
                      for device in ("cpu", stretches_of((2,), layers=4, devices=devices)))
    shares = shares_of(target, stretches_of((2,), layers=4, devices=devices), IDS)
    run = SpreadCapture(target, shares, [capture_in("apart", share, share.layer_ids) for share in shares])
    settings = PlacementConfig(capture_cards=2, cards_per_target=2)
    relay = open_relay([FeatureSource(target, IDS, keep="no", run=run)], Devices(cuda, devices, 2), settings, meeting="test",
                       trace=Trace([cuda]))
    rows = [random_rows([[20, 9]], length=32, seed=i) for i in range(12)]
    for i, present in enumerate(rows):
        learned = relay.features(present).values_BSF * 1.0  # on the learner's own stream
        relay.expect(rows[i + 1 :][: relay.ahead])
        truth = capture_in("apart", on_cpu, IDS)(present).values_BSF
        assert float((learned.cpu() - truth).norm() / truth.norm()) < 1e-5, i


@pytest.mark.gpu
@TWO_DEVICES
def test_compiled_shares_in_bfloat16_give_the_bits_of_the_whole(toy_folder: Callable[..., Path]) -> None:
    """Packed and compiled, as a GPU runs it: the same kernels over the same shapes, so the same bits."""
    cuda, rows = torch.device("cuda", 0), random_rows([[60, 4]], length=64, seed=0)
    whole, target = (load_target(str(toy_folder("qwen3", dtype="bfloat16")), dtype="bfloat16", device="cuda:0", last_layer=None,
                                 head=True) for _ in range(2))
    truth = capture_in("packed", whole, IDS)(rows).values_BSF
    assert torch.equal(spread(target, "packed", (2,), (cuda,))(rows).values_BSF, truth)


def test_a_target_on_one_device_is_joined_by_nothing() -> None:
    target = family_target("llama")
    join_up(target, stretches_of((3,)))
    assert not any(layer._forward_pre_hooks for layer in target.layers)

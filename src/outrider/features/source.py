"""Takes the run file's target and features, and rows, gives the source of features, checked and named; trains nothing."""

import contextlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from outrider.config import FeaturesConfig
from outrider.errors import UserError
from outrider.features.capture import CaptureRows, FeatureSource, Kept, capture
from outrider.features.eight_bit import in_8_bits
from outrider.features.facts import read_facts
from outrider.features.guards import open_kernel_cache
from outrider.features.kernels import gated_delta_rule, has_own_delta_rule, library_delta_rule
from outrider.features.packed import PackedCapture
from outrider.features.served import ServedCapture, Service
from outrider.features.spread import RunShare, SpreadCapture, shares_of
from outrider.features.startcheck import check_capture, check_delta_kernel
from outrider.features.store import FeatureStore, StoreInfo
from outrider.features.target import Layers, Stretch, load_target, plain_delta_rule
from outrider.progress import say
from outrider.records import Features, TokenRows

REFERENCE, OWN = "the reference, slow", "two passes (Triton)"


@dataclass(frozen=True)
class Order:
    """Which features: of `layer_ids` of the target at `path`, loaded in `dtype` on `device`; none after `last_layer`.

    `device`: one, or the stretches of a target that is spread over several.
    """

    path: str
    dtype: str
    device: str | tuple[Stretch, ...]
    layer_ids: tuple[int, ...]
    last_layer: int | None


@dataclass(frozen=True)
class Provenance:
    """What a store's features are of: digests of target and rows, the rows' number, and the folder when none is named."""

    target: str
    rows: str
    num_rows: int
    folder: Path


def open_served(
    order: Order, settings: FeaturesConfig, first_row: TokenRows, provenance: Provenance, *, timeout_s: float, checks: bool
) -> FeatureSource:
    """Features from the running server of `features.server`; of the target only its ends are loaded, on the order's device.

    With `checks` the server's features of `first_row` must rebuild the target's logits as a local capture's must, by the target
    loaded on the CPU for it (see `features.server_check`). Raises UserError.
    """
    assert settings.server is not None
    keep = _keep(order, settings, first_row.input_ids_BS.shape[1], provenance)
    if (settings.documents, settings.precision) != ("apart", "as_loaded"):
        raise UserError("features.server: the server decides how it runs: leave features.documents and features.precision out")
    ends = load_target(order.path, dtype=order.dtype, device=order.device, last_layer=-1, head=True)
    url = settings.server.rstrip("/").removesuffix("/v1")
    service = Service(url, settings.server_folder, settings.server_requests, timeout_s, order.layer_ids, ends.facts.hidden_size,
                      ends.dtype, pinned=ends.device.type == "cuda")
    run = ServedCapture(service)
    say(f"capture: by {service.url} ({run.model}), {service.requests} documents at a time")
    if checks:
        ids = order.layer_ids if settings.server_check == "all" else order.layer_ids[:1]
        say(f"checking its layers {', '.join(map(str, ids))} against the target on the CPU")
        checked = load_target(order.path, dtype=order.dtype, device="cpu", last_layer=ids[-1], head=True)
        width = len(ids) * ends.facts.hidden_size
        try:
            check_capture(checked, lambda rows: Features(run(rows).values_BSF[..., :width]), first_row, ids)
        except UserError as error:
            said = str(error).partition("): ")[0]  # without the way out, which is that of a local capture
            raise UserError(f"features.server = '{settings.server}': {said}): does it serve this target? It must be started with "
                            f"{service.start_options}") from error
    return FeatureSource(ends, order.layer_ids, keep=keep, run=run, elsewhere=True)  # type: ignore[arg-type]


def open_source(order: Order, settings: FeaturesConfig, first_row: TokenRows, provenance: Provenance) -> FeatureSource:
    """Load the target and check its capture on `first_row` (B = 1); say which kernels run. Raises UserError, of a store that
    does not fit before the target is loaded."""
    keep = _keep(order, settings, first_row.input_ids_BS.shape[1], provenance)
    spread = () if isinstance(order.device, str) else order.device
    devices = list(dict.fromkeys(part.device for part in spread)) or [torch.device(order.device)]  # type: ignore[arg-type]
    if devices[0].type == "cuda":
        say(f"kernel cache: {open_kernel_cache(settings.kernel_cache)}")
    eight = settings.precision == "fp8"
    target = load_target(order.path, dtype=order.dtype, device="cpu" if eight else order.device, last_layer=order.last_layer,
                         head=True)
    rules = {device: delta_rule_of(target, settings.documents, device) for device in devices}
    for device, rule in rules.items():
        say_kernels(target.attention, target.facts.layer_kinds, settings, device, rule)
    if target.facts.quantised is not None:
        say(f"target: its weights are quantised ({target.facts.quantised}); features come from them as transformers runs them")
    with plain_delta_rule(target) if OWN in rules.values() else contextlib.nullcontext():
        if eight:
            everywhere = Stretch(devices[0], range(len(target.layers)))
            target, _ = in_8_bits(target, first_row, order.layer_ids, spread or (everywhere,))
        run: CaptureRows
        if spread:
            shares = shares_of(target, spread, order.layer_ids)
            run = SpreadCapture(target, shares, [capture_in(settings.documents, share, share.layer_ids) for share in shares])
        else:
            run = capture_in(settings.documents, target, order.layer_ids)
        for device, rule in rules.items():
            if "linear_attention" in target.facts.layer_kinds and rule != REFERENCE:
                check_delta_kernel(device, gated_delta_rule if settings.documents == "packed" else library_delta_rule, rule)
        check_capture(target, run, first_row, order.layer_ids)
    return FeatureSource(target, order.layer_ids, keep=keep, run=run)  # type: ignore[arg-type]


def capture_in(documents: str, target: Layers, layer_ids: Sequence[int]) -> RunShare:
    """The way of capture that `features.documents` names; the packed one is compiled on a GPU, unless layers are others' own."""
    if documents == "packed":
        return PackedCapture(target, layer_ids, compiled=target.device.type == "cuda" and target.facts.quantised is None)
    return partial(capture, target, layer_ids=layer_ids)


def delta_rule_of(target: Layers, documents: str, device: torch.device) -> str:
    """What the target's gated delta nets will run on, as it is said to the user."""
    layers: list[Any] = [layer.linear_attn for layer in target.layers if hasattr(layer, "linear_attn")]
    if documents == "packed" and layers and all(has_own_delta_rule(device, x.head_k_dim, x.head_v_dim) for x in layers):
        return OWN
    if device.type == "cuda" and _installed("fla"):
        return f"flash-linear-attention {_version('flash-linear-attention')}"
    return REFERENCE


def say_kernels(
    attention: str, layer_kinds: Sequence[str], settings: FeaturesConfig, device: torch.device, delta_rule: str
) -> None:
    """Print which kernels the layers' kinds will run on; `attention` as transformers names its own, `delta_rule_of`'s answer.

    Raises UserError when fast ones are required and one is not.
    """
    packed, cuda = settings.documents == "packed", device.type == "cuda"
    used = {"attention": {"sdpa": "torch's scaled_dot_product_attention", "eager": REFERENCE}.get(attention, attention)}
    if packed:
        used["attention"] = "cuDNN or flash, told the documents' bounds" if cuda else REFERENCE
    if "linear_attention" in layer_kinds:
        if packed and cuda and delta_rule == REFERENCE:
            raise UserError("features.documents = \"packed\": the target's gated delta nets need flash-linear-attention: install "
                            "outrider[gpu], or use \"apart\"")
        used["gated delta rule"] = delta_rule
        convolution = "one pass (Triton)" if packed else "causal-conv1d" if _installed("causal_conv1d") else REFERENCE
        used["convolution"] = convolution if cuda else REFERENCE
    slow = [kind for kind, kernel in used.items() if kernel == REFERENCE]
    if settings.require_fast_kernels and slow:
        raise UserError(f"features.require_fast_kernels = true: {' and '.join(slow)} would run on reference code on {device}: "
                        "install outrider[gpu] and use a CUDA device, or leave the option out")
    say("capture: " + "; ".join(f"{kind}: {kernel}" for kind, kernel in used.items()))


def _keep(order: Order, settings: FeaturesConfig, row_length: int, provenance: Provenance) -> str | Kept:
    """How a FeatureSource is to keep what was captured: its own word for it, or an opened store."""
    if settings.keep != "disk":
        return settings.keep
    dtype = "fp8" if settings.keep_dtype == "fp8" else order.dtype
    way = settings.documents if settings.server is None else "served"
    store = FeatureStore(settings.store or provenance.folder, StoreInfo(
        target=provenance.target, rows=provenance.rows, precision=f"{settings.precision}, {order.dtype}, {way}", dtype=dtype,
        layer_ids=order.layer_ids, hidden_size=read_facts(order.path).hidden_size, row_length=row_length,
        num_rows=provenance.num_rows,
    ))
    say(f"feature store: {store.folder}, {provenance.num_rows} rows of {store.info.row_bytes / 2**20:.1f} MiB, "
        f"{store.need / 2**30:.1f} GiB still to be written")
    return store


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout on the path
        return ""

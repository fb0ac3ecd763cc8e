"""Takes a target on the CPU and rows, gives it on its device with 8-bit layers, and says what that costs; trains nothing."""

from collections.abc import Sequence

import torch
from torch import nn

from outrider.errors import UserError
from outrider.features.capture import Document, capture, documents_of
from outrider.features.fp8 import FINE, Fp8Linear, can_quantise, quantised
from outrider.features.target import Stretch, Target, join_up
from outrider.progress import say
from outrider.records import TokenRows

MOST_TOKENS = 2048  # of the document that the error is measured on
LEAST_CAPABILITY = (8, 9)  # whose matrix units take e4m3


@torch.no_grad()
def in_8_bits(
    target: Target, rows: TokenRows, layer_ids: Sequence[int], stretches: Sequence[Stretch]
) -> tuple[Target, list[float]]:
    """The target on the devices of `stretches`, which cover its layers in order, the linear layers up to the last of `layer_ids`
    in 8 bits; and the relative error of each captured layer, ||f8 - f|| / ||f||, over one document of `rows`.

    One pass does all: each layer comes to the device as the document reaches it, and is 8 bits wide when the document has left
    it, so that a device never holds more than one layer in full. `target` is used up. Raises UserError when the target or the
    device cannot.
    """
    for stretch in stretches:
        _check(target, stretch.device)
    document = one_document(rows)
    target = _ends_to(target, stretches[0].device)
    join_up(target, stretches)
    places = {target.layers[i]: stretch.device for stretch in stretches for i in stretch.layers}
    last = max(layer_ids)
    handles = []
    for layer in target.layers[: last + 1]:
        handles.append(layer.register_forward_pre_hook(lambda layer, args: (layer.to(places[layer]), None)[1]))
        handles.append(layer.register_forward_hook(lambda layer, args, output: quantise_layer(layer)))
    try:
        exact = capture(target, document, layer_ids).values_BSF
    finally:
        for handle in handles:
            handle.remove()
    for layer in target.layers[last + 1 :]:
        layer.to(places[layer])
    eight = [module for layer in target.layers for module in layer.modules() if isinstance(module, Fp8Linear)]
    if not eight:
        raise UserError(f"features.precision = \"fp8\": {type(target.model).__name__} has no plain linear layer with sizes that "
                        "are multiples of 16: use \"as_loaded\"")
    rough = capture(target, document, layer_ids).values_BSF
    pairs = zip(*(v.float().unflatten(-1, (len(layer_ids), -1)).unbind(2) for v in (rough, exact)), strict=True)
    errors = [float((a - b).norm() / b.norm()) for a, b in pairs]
    elements = sum(module.weight.numel() for module in eight)
    by_layer = ", ".join(f"layer {i} {100 * error:.1f} %" for i, error in zip(layer_ids, errors, strict=True))
    saved, plain = elements * (target.dtype.itemsize - 1) / 2**30, str(target.dtype).removeprefix("torch.")
    say(f"fp8: {len(eight)} linear layers in 8 bits, {saved:.1f} GiB saved; features differ from {plain}'s by {by_layer} on a "
        f"document of {document.input_ids_BS.shape[1]} tokens")
    return target, errors


def one_document(rows: TokenRows) -> TokenRows:
    """The longest document of `rows`, at most MOST_TOKENS of it, as a row of its own."""
    documents = documents_of(rows.document_ids_BS)
    longest = max(documents, key=lambda d: d.length) if documents else Document(0, 0, rows.input_ids_BS.shape[1])
    b, at = longest.b, slice(longest.start, longest.start + min(longest.length, MOST_TOKENS))
    return TokenRows(
        rows.input_ids_BS[b : b + 1, at], rows.document_ids_BS[b : b + 1, at], rows.positions_BS[b : b + 1, at],
        rows.loss_mask_BS[b : b + 1, at], rows.row_ids_B[b : b + 1],
    )


def quantise_layer(layer: nn.Module) -> None:
    """Put its 8-bit twin in place of each linear layer that has one and is not FINE."""
    for name, module in list(layer.named_modules()):
        if can_quantise(module) and not name.endswith(FINE):
            layer.set_submodule(name, quantised(module))


def _check(target: Target, device: torch.device) -> None:
    if target.facts.quantised is not None:
        raise UserError(f"features.precision = \"fp8\": the target is quantised already ({target.facts.quantised}), and is "
                        "captured from as it will be served: use \"as_loaded\"")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise UserError(f"features.precision = \"fp8\": {torch.cuda.get_device_name(device)} has no 8-bit products (they begin "
                        "with compute capability 8.9): use \"as_loaded\"")


def _ends_to(target: Target, device: torch.device) -> Target:
    """The target with everything but its layers on `device`."""
    within = {module for layer in target.layers for module in layer.modules()}
    for module in target.model.modules():
        if module in within:
            continue
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return Target(target.model, target.facts)

"""Takes a target and its way of capture, refuses one that captures wrongly, on the user's own rows; trains nothing."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from outrider.errors import UserError
from outrider.features.capture import CaptureRows, documents_of
from outrider.features.kernels import bounds_of, gated_delta_rule
from outrider.features.target import Target
from outrider.records import TokenRows

LEAST_AGREEMENT = 0.999  # of the most likely next tokens
MOST_TOKENS = 512  # of the document looked at
TIE = 4.0  # units of the dtype's rounding, of the largest logit: nearer tokens are a tie, which kernels break differently
WORST_KERNEL = 0.02  # relative: bf16 products over 128 tokens come to 0.005


@torch.no_grad()
def check_capture(target: Target, run: CaptureRows, rows: TokenRows, layer_ids: Sequence[int]) -> None:
    """Capture one row in the run's own way, and rebuild the target's logits from what each captured layer gave.

    From layer i's features through the layers after it, norm and head must come the next tokens that the model itself finds most
    likely, on at least LEAST_AGREEMENT of a document's positions. `rows`: one row. The document is the row's last that is long
    enough, where a leak or shift from earlier ones would show. Raises UserError.
    """
    values_SLD = run(rows).values_BSF[0].unflatten(-1, (len(layer_ids), -1))
    bad = [i for j, i in enumerate(layer_ids) if not torch.isfinite(values_SLD[:, j]).all()]
    if bad:
        raise UserError(f"the target's features of layer {bad[0]} are not finite (NaN or infinite) on row "
                        f"{rows.row_ids_B.tolist()}: its weights or its dtype are at fault: try target.dtype = \"float32\" on a "
                        "short run")
    documents = documents_of(rows.document_ids_BS)
    if not documents:  # a row of padding
        return
    document = next((d for d in reversed(documents) if d.length >= MOST_TOKENS // 4), max(documents, key=lambda d: d.length))
    at = slice(document.start, document.start + min(document.length, MOST_TOKENS))
    ids_1X = rows.input_ids_BS[:, at].to(target.device)
    truth_XV = target.model(input_ids=ids_1X, use_cache=False).logits[0].float()
    slack = TIE * torch.finfo(target.dtype).eps * truth_XV.abs().max()
    for j, i in enumerate(layer_ids):
        chosen_X = logits_from(target, values_SLD[None, at, j], i)[0].argmax(-1, keepdim=True)
        agrees_X = truth_XV.gather(-1, chosen_X)[:, 0] >= truth_XV.amax(-1) - slack
        share = float(agrees_X.float().mean())
        if share < LEAST_AGREEMENT:
            raise UserError(f"capture of layer {i}: the target's logits rebuilt from its features agree with the target's own on "
                            f"{100 * share:.1f} % of {len(agrees_X)} positions (at least {100 * LEAST_AGREEMENT} % is asked): a "
                            "kernel or this architecture's layers do not do what is expected: use features.documents = "
                            "\"apart\", or report it")


def logits_from(target: Target, captured_1XD: Tensor, after: int) -> Tensor:
    """The target's logits `[1, X, V]` with the output of layer `after` replaced, through what comes after it."""
    nexts: list[nn.Module] = [*target.layers, target.decoder.norm]  # type: ignore[list-item]

    def replace_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (captured_1XD.to(args[0].device), *args[1:])

    handle = nexts[after + 1].register_forward_pre_hook(replace_input)
    try:
        ids_1X = torch.zeros(captured_1XD.shape[:2], dtype=torch.int64, device=target.device)
        return target.head.logits(target.decoder(input_ids=ids_1X, use_cache=False).last_hidden_state)
    finally:
        handle.remove()


@torch.no_grad()
def check_delta_kernel(device: torch.device, rule: Callable[..., Tensor], name: str) -> None:
    """The kernel `rule` of the gated delta rule, called `name`, against the plain loop, over three short documents.

    Raises UserError.
    """
    lengths_N, heads, size = torch.tensor([70, 3, 55]), 4, 128
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(128, heads, size, generator=generator) for _ in range(3))
    q, k = (nn.functional.normalize(x, dim=-1) for x in (q, k))
    decay, beta = -torch.rand(128, heads, generator=generator), torch.rand(128, heads, generator=generator)
    found, truth = (
        function(*(x.to(place, torch.bfloat16) for x in (q, k, v)), decay.to(place), beta.to(place), bounds.starts_N1,
                 bounds.chunks_P2).float().cpu()
        for function, place, bounds in ((f, p, bounds_of(lengths_N, p)) for f, p in
                                        ((rule, device), (gated_delta_rule, torch.device("cpu"))))
    )
    error = float((found - truth).norm() / truth.norm())
    if not error < WORST_KERNEL:
        raise UserError(f"the gated delta rule's kernel ({name}) is wrong on {device}: it differs from the plain loop by "
                        f"{100 * error:.1f} %: install another version of flash-linear-attention or Triton")

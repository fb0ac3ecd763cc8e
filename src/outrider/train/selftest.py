"""Takes a drafter's shape and a CUDA device, gives a proof that the fused attention is right there, or a refusal to train.

There are open reports of wrong key and value gradients under masks like ours, and of kernels that are wrong on some cards
alone. So before the first step: the real heads, block size, windows and dtype on one small packed row, against float64.
"""

import time

import torch
from torch import Tensor

from outrider.errors import UserError
from outrider.layout.anchors import draw_anchors
from outrider.layout.blocks import build_blocks
from outrider.layout.mask import dense_mask
from outrider.model.fused_attention import FusedKernels
from outrider.progress import say
from outrider.records import SLIDING, DraftBlocks, DrafterShape, TokenRows

DOCUMENTS = (350, 37, 130)  # lengths in the row of 533 tokens: the rest is padding, and no length is a multiple of a tile
ROW = 533
DROPPED = 2
# A bf16 kernel rounds the softmax's weights and its inputs' products to 2^-9 = 2e-3 relative, and that rounding averages out:
# 2e-3 to 6e-3 in norm was seen. A wrong tile moves whole rows by their own size: at least 0.1 here.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 5e-3}


def check_fused_attention(shape: DrafterShape, kernels: FusedKernels, *, dtype: torch.dtype, device: torch.device) -> None:
    """Compare output, dQ, dK and dV with float64 for each kind of layer. Raises UserError with the numbers on a mismatch."""
    began = time.perf_counter()
    rows, blocks = _small_row(shape, device)
    # our own kernels are not the compiler's to make: only flex_attention needs the whole of it
    backend = "eager" if kernels.name == "span" else "inductor"
    compiled = torch.compile(kernels.attention, backend=backend, fullgraph=True, dynamic=False)
    worst = 0.0
    for kind, window in windows_of(shape).items():
        q, k, v, gradient = _inputs(shape, blocks, dtype, device)
        out = compiled(q, k, v, kernels.mask(blocks, row_length=ROW, window=window))
        gradients = torch.autograd.grad(out, (q, k, v), gradient)
        found = dict(zip(("output", "dQ", "dK", "dV"), (out.detach(), *gradients), strict=True))
        mask = dense_mask(rows, blocks, window=window)[:, 0]
        for name, expected in zip(found, exact_attention(q, k, v, mask, gradient), strict=True):
            error = float((found[name].double() - expected).norm() / expected.norm())
            worst = max(worst, error)
            if not error <= TOLERANCE[dtype]:  # also when it is not a number
                raise UserError(
                    f"train.attention = 'fused': {name} of the {kernels.name} kernel is wrong on "
                    f"{torch.cuda.get_device_name(device)} (torch {torch.__version__}, {kind}, {shape.num_heads}/"
                    f"{shape.num_kv_heads} heads of {shape.head_dim}, {dtype}): relative error {error:.2e}, at most "
                    f"{TOLERANCE[dtype]:.0e} is right: train with "
                    "train.attention = 'dense', or another version of torch"
                )
    say(f"fused attention ({kernels.name} kernels) checked against float64 in {time.perf_counter() - began:.1f} s: output, dQ, "
        f"dK, dV within {worst:.1e}")


def _small_row(shape: DrafterShape, device: torch.device) -> tuple[TokenRows, DraftBlocks]:
    lengths = torch.tensor(DOCUMENTS)
    padding = ROW - int(lengths.sum())
    documents_1S = torch.cat((torch.repeat_interleave(torch.arange(len(lengths)), lengths), torch.full((padding,), -1)))[None]
    positions_1S = torch.cat([*(torch.arange(length) for length in DOCUMENTS), torch.zeros(padding, dtype=torch.int64)])[None]
    zeros_1 = torch.zeros(1, dtype=torch.int64)
    rows = TokenRows(torch.zeros_like(documents_1S), documents_1S, positions_1S, documents_1S >= 0, zeros_1)
    per_row = 400 // shape.block_size + 1 + DROPPED
    anchors_1A, keep_1A, _ = draw_anchors(rows, per_row=per_row, document_floor=1, seed=0, epochs_B=[0])
    keep_1A[:, -DROPPED:] = False
    anchors_1A[:, -DROPPED:] = 0
    blocks = build_blocks(rows, anchors_1A, keep_1A, block_size=shape.block_size, mask_token_id=0, gamma=1.0)
    return rows.to(device), blocks.to(device)


def _inputs(shape: DrafterShape, blocks: DraftBlocks, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    queries = blocks.noise_ids_BAK[0].numel()
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, shape.head_dim, generator=generator, device=device, dtype=dtype)

    q, k, v = random(shape.num_heads, queries), *(random(shape.num_kv_heads, ROW + queries) for _ in range(2))
    return *(x.requires_grad_() for x in (q, k, v)), random(shape.num_heads, queries)


def exact_attention(
    q_BHQC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, mask_BQN: Tensor, gradient_BHQC: Tensor
) -> tuple[Tensor, ...]:
    """Output, dQ, dK, dV in float64, from the definition."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q_BHQC, k_BGNC, v_BGNC))
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, dim=1).mT / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask_BQN[:, None], float("-inf")).softmax(dim=-1)
    out = weights @ v.repeat_interleave(groups, dim=1)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), gradient_BHQC.double())


def windows_of(shape: DrafterShape) -> dict[str, int | None]:
    """The window of each kind of layer that the drafter has; None for full attention."""
    return {kind: shape.sliding_window if kind == SLIDING else None for kind in dict.fromkeys(shape.layer_types)}

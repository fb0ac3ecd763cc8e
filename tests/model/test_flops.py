"""The FLOP counter against torch's own on the plain drafter, and against the numbers of the born-from case."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from outrider.model.drafter import Drafter
from outrider.model.flops import count_flops
from outrider.records import FULL, DrafterShape


def born_from() -> DrafterShape:
    return DrafterShape(
        hidden_size=5120, intermediate_size=17408, num_layers=5, num_heads=32, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6,
        rope_theta=1e6, vocab_size=248320, max_position_embeddings=32768, block_size=16, mask_token_id=0,
        target_layer_ids=(1, 16, 31, 46, 61), num_target_layers=64, tie_word_embeddings=False, layer_types=(FULL,) * 5,
    )


def test_born_from_case() -> None:
    flops = count_flops(born_from(), queries=8192, context=8192, pairs=8192 * 4096 + 8192 * 16)
    tokens = (flops.noise_tokens, flops.context_keys_values, flops.feature_projection)
    assert [round(part / 1e12, 1) for part in tokens] == [78.6, 2.6, 4.3]
    assert [round(part / 1e12, 1) for part in (flops.attention, flops.head, flops.total)] == [9.7, 39.1, 134.2]


def test_equals_torchs_counter_on_the_drafter() -> None:
    """Without attention and head, which torch counts as dense: its kernels do the masked pairs too."""
    shape = DrafterShape(64, 96, 2, 4, 2, 16, 1e-6, 1e4, 100, 512, 4, 99, (1, 2), 5, True, (FULL,) * 2)
    with torch.device("meta"):
        drafter = Drafter(shape, lambda q, k, v, mask: q + k[:, :1, :1] + v[:, :1, :1])
        inputs = (torch.empty(1, 40, 64), torch.empty(1, 30, 128), torch.empty(1, 40), torch.empty(1, 30))
        with FlopCounterMode(display=False) as counter:
            drafter(*inputs, {FULL: None}).sum().backward()
    flops = count_flops(shape, queries=40, context=30, pairs=0)
    assert counter.get_total_flops() == flops.total - flops.head

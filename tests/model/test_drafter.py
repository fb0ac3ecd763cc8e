"""The drafter against transformers' Qwen3 layers, against each block run alone, and against itself at inference."""

import pytest
import torch
from toys import MASK, VOCAB, noise, random_rows, rows_of, toy_shape
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from outrider.layout.anchors import draw_anchors
from outrider.layout.blocks import build_blocks
from outrider.layout.mask import dense_mask
from outrider.model.attention import dense_attention
from outrider.model.drafter import ContextCache, Drafter, RMSNorm, initialise
from outrider.model.flops import count_parameters
from outrider.records import DraftBlocks, DrafterShape, TokenRows

FULL, SLIDING = "full_attention", "sliding_attention"
SHAPES = {
    "full": toy_shape(),
    "sliding and full": toy_shape(num_layers=3, layer_types=(SLIDING, FULL, SLIDING), sliding_window=5),
    "one head a group, wide block": toy_shape(num_kv_heads=4, block_size=7),
}


def make(shape: DrafterShape, *, seed: int = 0) -> Drafter:
    """A drafter whose every part matters: norms away from 1, projections that write at full scale."""
    drafter = Drafter(shape, dense_attention)
    initialise(drafter, seed=seed, head_scale=1.0)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(drafter.named_parameters()):
            if "norm" in name:
                parameter.add_(0.3 * noise(*parameter.shape, seed=100 + i))
    return drafter


def embedding() -> torch.Tensor:
    return noise(VOCAB, 32, seed=77)


def forward(drafter: Drafter, rows: TokenRows, features: torch.Tensor, blocks: DraftBlocks) -> torch.Tensor:
    """The training layout: all blocks of all rows at once, `[B, A, K, D]`."""
    B, A, K = blocks.noise_ids_BAK.shape
    masks = {kind: dense_mask(rows, blocks, window=drafter.shape.sliding_window if kind == SLIDING else None)
             for kind in set(drafter.shape.layer_types)}
    noise_BQD = embedding()[blocks.noise_ids_BAK.view(B, A * K)]
    return drafter(noise_BQD, features, blocks.positions_BAK.view(B, A * K), rows.positions_BS, masks).view(B, A, K, -1)


def inference(drafter: Drafter, rows: TokenRows, features: torch.Tensor, b: int, anchor: int, *, pieces: int = 1) -> torch.Tensor:
    """One block as drafting would run it: context < anchor (in `pieces` calls), the block alone; `[K, D]`."""
    document = rows.document_ids_BS[b]
    start = int((document == document[anchor]).nonzero()[0])
    ids = torch.tensor([int(rows.input_ids_BS[b, anchor]), *[MASK] * (drafter.shape.block_size - 1)])
    cache = ContextCache()
    parts = features[b, start:anchor].tensor_split(pieces) if pieces > 1 else [features[b, start:anchor]]
    for part in parts:
        out = drafter.draft(embedding()[ids][None], part[None], cache)
    assert cache.length == anchor - start
    return out[0]


def laid_out(shape: DrafterShape, lengths: list[list[int]], *, length: int, per_row: int, seed: int = 0) -> tuple[
    TokenRows, torch.Tensor, DraftBlocks
]:
    rows = random_rows(lengths, length=length, seed=seed)
    anchors, keep, _ = draw_anchors(rows, per_row=per_row, document_floor=2, seed=seed, epochs_B=[0] * len(lengths))
    blocks = build_blocks(rows, anchors, keep, block_size=shape.block_size, mask_token_id=MASK, gamma=4.0)
    return rows, noise(len(lengths), length, 96, seed=seed + 1), blocks


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_training_block_is_the_inference_call(shape: DrafterShape) -> None:
    """Every kept block of packed rows, with context given at once or in pieces: fp32 rounding of three layers."""
    drafter = make(shape)
    rows, features, blocks = laid_out(shape, [[13, 9, 18], [30]], length=48, per_row=14)
    trained = forward(drafter, rows, features, blocks)
    checked = 0
    for b, i in blocks.keep_BA.nonzero().tolist():
        anchor = int(blocks.anchors_BA[b, i])
        for pieces in (1, 3):
            drafted = inference(drafter, rows, features, b, anchor, pieces=pieces)
            torch.testing.assert_close(trained[b, i], drafted, rtol=1e-4, atol=2e-5)
        checked += 1
    assert checked == 28


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_gradients_are_those_of_each_block_alone(shape: DrafterShape) -> None:
    """Sum over blocks, each run separately with its visible context only, against the whole layout: every gradient.

    Float32 (the norms' statistics always are): each gradient differs by less than 2e-6 of its norm, and a leak moves it by 1e-2.
    """
    drafter = make(shape)
    rows, features, blocks = laid_out(shape, [[13, 9], [20]], length=24, per_row=6)
    features.requires_grad_()
    pull = noise(2, 6, shape.block_size, 32, seed=3) * blocks.keep_BA[:, :, None, None]
    (forward(drafter, rows, features, blocks) * pull).sum().backward()
    together = [x.grad.clone() for x in (features, *drafter.parameters())]
    drafter.zero_grad()
    features.grad = None
    for b, i in blocks.keep_BA.nonzero().tolist():
        (inference(drafter, rows, features, b, int(blocks.anchors_BA[b, i])) * pull[b, i]).sum().backward()
    for gradient, alone in zip(together, (features, *drafter.parameters()), strict=True):
        assert (gradient - alone.grad).norm() < 2e-6 * alone.grad.norm()


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 1000, 8191])
def test_lengths_that_are_no_multiple_of_anything(length: int) -> None:
    """A document of this length, the last block at its end, against the inference call."""
    shape = SHAPES["sliding and full"]
    drafter = make(shape)
    rows = random_rows([[length]], length=length, seed=0)
    places = sorted({0, length // 2, length - 1})
    keep = torch.ones(1, len(places), dtype=torch.bool)
    blocks = build_blocks(rows, torch.tensor([places]), keep, block_size=4, mask_token_id=MASK, gamma=4.0)
    features = noise(1, length, 96, seed=2)
    out = forward(drafter, rows, features, blocks)
    for i, anchor in enumerate(places):
        torch.testing.assert_close(out[0, i], inference(drafter, rows, features, 0, anchor), rtol=1e-4, atol=2e-5)


def test_one_layer_equals_transformers_qwen3() -> None:
    """With the context's keys taken away, a layer is a bidirectional Qwen3 layer: same weights by name, same outputs."""
    shape = toy_shape(num_layers=1, rope_theta=5000.0)
    drafter = make(shape)
    config = Qwen3Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                         rms_norm_eps=1e-6, attn_implementation="eager",
                         rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    theirs = Qwen3DecoderLayer(config, 0).eval()
    theirs.load_state_dict(drafter.layers[0].state_dict())
    final = Qwen3RMSNorm(32, eps=1e-6)
    final.load_state_dict(drafter.norm.state_dict())
    x, positions = noise(2, 4, 32, seed=1), torch.arange(3, 7)[None]
    with torch.no_grad():
        expected = final(theirs(x, position_embeddings=Qwen3RotaryEmbedding(config)(x, positions), attention_mask=None))
        rows = rows_of([[[1] * 8]] * 2, length=8)
        blind = torch.cat((torch.zeros(2, 1, 4, 8, dtype=torch.bool), torch.ones(2, 1, 4, 4, dtype=torch.bool)), dim=-1)
        ours = drafter(x, noise(2, 8, 96, seed=2), positions.expand(2, 4), rows.positions_BS, {FULL: blind})
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_transformers(dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(32, 1e-6).to(dtype), Qwen3RMSNorm(32, eps=1e-6).to(dtype)
    with torch.no_grad():
        ours.weight.add_(noise(32, seed=0))
    theirs.load_state_dict(ours.state_dict())
    x = (3 * noise(5, 32, seed=1)).to(dtype)
    assert torch.equal(ours(x), theirs(x))


def test_positions_count_within_the_document() -> None:
    """The same document second in a row gives the same block: its position in the row must not matter."""
    shape = toy_shape()
    drafter = make(shape)
    tokens = [5, 6, 7, 8, 9, 10, 11]
    features = noise(1, 7, 96, seed=0)
    outs = []
    for before in (0, 10):
        rows = rows_of([[[1] * before, tokens]] if before else [[tokens]], length=20)
        placed = noise(1, 20, 96, seed=before)
        placed[:, before : before + 7] = features
        keep = torch.ones(1, 1, dtype=torch.bool)
        blocks = build_blocks(rows, torch.tensor([[before + 4]]), keep, block_size=4, mask_token_id=MASK, gamma=4.0)
        outs.append(forward(drafter, rows, placed, blocks))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)


def test_parameter_count_and_names() -> None:
    for shape in SHAPES.values():
        drafter = Drafter(shape, dense_attention)
        assert count_parameters(shape) == sum(p.numel() for p in drafter.parameters())
    names = set(Drafter(toy_shape(num_layers=1), dense_attention).state_dict())
    assert names == {"fc.weight", "hidden_norm.weight", "norm.weight"} | {f"layers.0.{part}.weight" for part in (
        "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
        "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}


def test_initialisation_depends_on_the_seed_alone_and_starts_near_uniform() -> None:
    """First logits have standard deviation near 1 for a head of any scale, so that the first loss is near log V."""
    first, again, other = (Drafter(toy_shape(), dense_attention) for _ in range(3))
    for number, (drafter, seed) in enumerate(((first, 1), (again, 1), (other, 2))):
        torch.manual_seed(number)
        initialise(drafter, seed=seed, head_scale=40.0)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.fc.weight, other.fc.weight)
    rows, features, blocks = laid_out(toy_shape(), [[40]], length=48, per_row=20)
    hidden = forward(first, rows, 10 * features, blocks).detach()
    head = 40.0 / 32**0.5 * noise(VOCAB, 32, seed=4)
    assert 0.7 < float((hidden @ head.T).std()) < 1.3


@pytest.mark.parametrize(("change", "sentence"), [
    ({"block_size": 1}, r"drafter.block_size = 1: must be at least 2"),
    ({"target_layer_ids": (1, 5)}, r"has 5: must lie in 0\.\.4 .*last layer \(5\) is never used"),
    ({"target_layer_ids": (-1, 2)}, r"has -1: must lie in 0\.\.4"),
    ({"target_layer_ids": (9,)}, r"has 9: must lie in 0\.\.4"),
    ({"target_layer_ids": (3, 2)}, "distinct layers in increasing order"),
    ({"target_layer_ids": (2, 2)}, "distinct layers in increasing order"),
    ({"target_layer_ids": ()}, "distinct layers in increasing order"),
    ({"mask_token_id": VOCAB}, rf"mask_token_id = {VOCAB}: must lie in 0\.\.{VOCAB - 1}"),
    ({"mask_token_id": -1}, r"mask_token_id = -1: must lie in"),
    ({"num_kv_heads": 3}, "must be a multiple of drafter.num_kv_heads = 3"),
    ({"head_dim": 15}, "must be even"),
    ({"layer_types": (FULL,)}, "must name 2 layers"),
    ({"layer_types": (FULL, "linear_attention")}, "must name 2 layers"),
    ({"layer_types": (FULL, SLIDING)}, "drafter.sliding_window = None: must be set exactly when"),
    ({"sliding_window": 4}, "drafter.sliding_window = 4: must be set exactly when"),
])
def test_bad_shapes_are_refused_in_one_sentence(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        toy_shape(**change)

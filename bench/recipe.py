"""How should the demo train? Variants of its recipe, each with the accepted length that greedy decoding would reach.

    python bench/recipe.py --target runs/demo/target --device cuda

The target answers the demo's prompts; each variant trains a drafter on them and is scored on held-out ones. The score walks the
target's own greedy answers with the drafter's predictions from every position: what greedy drafting and verifying would accept,
without decoding. One line a variant; the last line is JSON.
"""

import argparse
import json
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.config import OptimizerConfig
from outrider.data.packing import build_row, pack
from outrider.data.rows import positions_in_documents
from outrider.demo.prompts import make_prompts
from outrider.demo.target import MASK_TOKEN_ID
from outrider.features.capture import capture
from outrider.features.facts import read_facts
from outrider.features.target import Target, load_target, load_tokenizer
from outrider.layout.anchors import draw_anchors
from outrider.layout.blocks import build_blocks
from outrider.layout.mask import dense_mask
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter, initialise
from outrider.objective.frozen_head import frozen_head_loss
from outrider.records import FULL, DraftBlocks, DrafterShape, Features, TokenRows
from outrider.train.optim import build_optimizer, learning_rate_at, set_rate
from outrider.train.resolve import default_gamma, default_layer_ids

LOGITS_BYTES = 2**28


@dataclass(frozen=True)
class Variant:
    """One recipe. `blocks` a step, from `rows` rows of `row_length`; `prompts` of the demo's are trained on."""

    steps: int = 600
    blocks: int = 96
    rows: int = 1
    row_length: int = 1024
    prompts: int = 360
    layers: int = 2
    seed: int = 0
    optimizer: dict[str, float] = field(default_factory=lambda: {"learning_rate": 1e-3})


VARIANTS: dict[str, Variant] = {
    "the demo's": Variant(),
    "another seed": Variant(seed=1),
    "learning rate 2e-3": Variant(optimizer={"learning_rate": 2e-3}),
    "learning rate 7e-4": Variant(optimizer={"learning_rate": 7e-4}),
    "300 steps of 192": Variant(steps=300, blocks=192),
    "1200 steps of 48": Variant(steps=1200, blocks=48),
    "two rows a step": Variant(rows=2),
    "four rows of 512": Variant(rows=4, row_length=512),
    "240 prompts": Variant(prompts=240),
    "780 prompts": Variant(prompts=780),
    "beta2 0.99": Variant(optimizer={"learning_rate": 1e-3, "beta2": 0.99}),
    "no weight decay": Variant(optimizer={"learning_rate": 1e-3, "weight_decay": 0.0}),
    "one layer": Variant(layers=1),
    "four layers": Variant(layers=4),
    "1200 steps": Variant(steps=1200),
}


def answers(target: Target, tokenizer: Any, prompts: list[dict[str, str]], limit: int) -> list[tuple[list[int], list[int]]]:
    """The target's greedy answer to each prompt: (prompt ids, new tokens)."""
    asked = [[{"role": "user", "content": prompt["prompt"]}] for prompt in prompts]
    ids = [tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) for messages in asked]
    order, found = sorted(range(len(ids)), key=lambda i: len(ids[i])), {}
    for start in range(0, len(ids), 240):
        batch = order[start : start + 240]
        new = target.answer([ids[i] for i in batch], max_new_tokens=limit, stop_ids=target.stop_ids(tokenizer), temperature=0.0,
                            top_p=1.0, top_k=0, seed=0)
        found |= {i: (ids[i], tokens) for i, tokens in zip(batch, new, strict=True)}
    return [found[i] for i in range(len(ids))]


def rows_from(pairs: list[tuple[list[int], list[int]]], row_length: int) -> TokenRows:
    documents = [(np.array(prompt + answer, np.int32)[:row_length], (np.arange(len(prompt + answer)) >= len(prompt))[:row_length])
                 for prompt, answer in pairs]
    packed = [build_row([documents[i] for i in row], row_length=row_length)
              for row in pack([len(ids) for ids, _ in documents], row_length=row_length)]
    document_ids = np.stack([row.document_ids for row in packed])
    return TokenRows(
        input_ids_BS=torch.from_numpy(np.stack([row.input_ids for row in packed]).astype(np.int64)),
        document_ids_BS=torch.from_numpy(document_ids.astype(np.int64)),
        positions_BS=torch.from_numpy(np.stack([positions_in_documents(ids) for ids in document_ids])),
        loss_mask_BS=torch.from_numpy(np.stack([row.loss_mask for row in packed])),
        row_ids_B=torch.arange(len(packed)),
    )


def some(rows: TokenRows, index: list[int]) -> TokenRows:
    return TokenRows(**{f.name: getattr(rows, f.name)[index] for f in fields(rows)})


def forward(drafter: Drafter, target: Target, rows: TokenRows, features: Features, blocks: DraftBlocks) -> torch.Tensor:
    B, A, K = blocks.noise_ids_BAK.shape
    return drafter(target.embed(blocks.noise_ids_BAK.view(B, A * K)), features.values_BSF, blocks.positions_BAK.view(B, A * K),
                   rows.positions_BS, {FULL: dense_mask(rows, blocks, window=None)})


@torch.no_grad()
def walked_tau(drafter: Drafter, target: Target, rows: TokenRows, features: Features) -> float:
    """tokens / forwards of greedy drafting and verifying over the rows' answers."""
    device, K = features.values_BSF.device, drafter.shape.block_size
    tokens = forwards = 0
    for b in range(len(rows.row_ids_B)):
        row = some(rows, [b])
        mask, document = row.loss_mask_BS[0], row.document_ids_BS[0]
        anchors_1A = mask.nonzero().view(1, -1)
        placed = row.to(device)
        keep_1A = torch.ones_like(anchors_1A, dtype=torch.bool)
        blocks = build_blocks(placed, anchors_1A.to(device), keep_1A.to(device), block_size=K, mask_token_id=MASK_TOKEN_ID,
                              gamma=default_gamma(K))
        hidden = forward(drafter, target, placed, Features(features.values_BSF[b : b + 1]), blocks)
        guess_AK = target.head.logits(hidden.view(-1, K, hidden.shape[-1])[:, 1:]).argmax(-1)
        reach_AK = blocks.weights_BAK[0, :, 1:] > 0
        runs = ((guess_AK == blocks.labels_BAK[0, :, 1:]) & reach_AK).int().cumprod(1).sum(1).tolist()
        reach = reach_AK.sum(1).tolist()
        at = {anchor: i for i, anchor in enumerate(anchors_1A[0].tolist())}
        for first in at:
            if mask[first - 1] and document[first - 1] == document[first]:
                continue  # not the first token of an answer
            anchor = first
            while anchor in at and reach[at[anchor]]:
                gained = min(runs[at[anchor]] + 1, reach[at[anchor]])
                tokens, forwards, anchor = tokens + gained, forwards + 1, anchor + gained
    return tokens / forwards


def train(
    variant: Variant, target: Target, shape: DrafterShape, rows: TokenRows, features: Features
) -> tuple[Drafter, list[float]]:
    """Train one variant; the drafter and its losses."""
    device, config = features.values_BSF.device, OptimizerConfig(**variant.optimizer)
    drafter = Drafter(shape, dense_attention)
    initialise(drafter, seed=variant.seed, head_scale=float(target.head.weight_VD.float().norm(dim=1).mean()))
    drafter.to(device)
    optimizer = build_optimizer(drafter, config)
    draw, order, epoch, losses = np.random.default_rng(variant.seed), [], -1, []
    for step in range(variant.steps):
        set_rate(optimizer, learning_rate_at(step, variant.steps, config))
        if len(order) < variant.rows:
            order, epoch = draw.permutation(len(rows.row_ids_B)).tolist(), epoch + 1
        index, order = order[: variant.rows], order[variant.rows :]
        some_rows = some(rows, index)
        anchors_BA, keep_BA, _ = draw_anchors(
            some_rows, per_row=variant.blocks // variant.rows, document_floor=8, seed=variant.seed,
            epochs_B=[epoch] * variant.rows,
        )
        some_rows = some_rows.to(device)
        blocks = build_blocks(some_rows, anchors_BA.to(device), keep_BA.to(device), block_size=shape.block_size,
                              mask_token_id=MASK_TOKEN_ID, gamma=default_gamma(shape.block_size))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = forward(drafter, target, some_rows, Features(features.values_BSF[index]), blocks)
            terms = frozen_head_loss(hidden, blocks, target.head, budget_bytes=LOGITS_BYTES)
        loss = terms.loss_sum / terms.weight_sum.clamp(min=1e-12)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return drafter, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("runs/demo/target"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    options = parser.parse_args()
    if not options.target.is_dir() or options.device == "cpu":
        print(json.dumps({"skipped": "needs a CUDA device and the demo's target (`make demo` builds it)"}))
        return
    path, device = str(options.target), torch.device(options.device)
    tokenizer, facts = load_tokenizer(path), read_facts(path)
    target = load_target(path, dtype="bfloat16", device=options.device, last_layer=None, head=True)
    heldout = make_prompts(48, seed=1, exclude=set())
    pairs = answers(target, tokenizer, make_prompts(780, seed=2, exclude={p["prompt"] for p in heldout}), 96)
    layer_ids = default_layer_ids(facts.num_layers, 5)

    def with_features(some_pairs: list[tuple[list[int], list[int]]], row_length: int) -> tuple[TokenRows, Features]:
        rows = rows_from(some_pairs, row_length)
        values = [capture(target, some(rows, [b]), layer_ids).values_BSF for b in range(len(rows.row_ids_B))]
        return rows, Features(torch.cat(values).float())

    scored = with_features(answers(target, tokenizer, heldout, 96), 1024)
    results = {}
    for name in options.only:
        variant, began = VARIANTS[name], time.monotonic()
        rows, features = with_features(pairs[: variant.prompts], variant.row_length)
        shape = DrafterShape(
            hidden_size=facts.hidden_size, intermediate_size=facts.intermediate_size, num_layers=variant.layers,
            num_heads=facts.num_heads, num_kv_heads=facts.num_kv_heads, head_dim=facts.head_dim, rms_norm_eps=facts.rms_norm_eps,
            rope_theta=facts.rope_theta, vocab_size=facts.vocab_size, max_position_embeddings=facts.max_position_embeddings,
            block_size=8, mask_token_id=MASK_TOKEN_ID, target_layer_ids=layer_ids, num_target_layers=facts.num_layers,
            tie_word_embeddings=facts.tie_word_embeddings, layer_types=(FULL,) * variant.layers,
        )
        drafter, losses = train(variant, target, shape, rows, features)
        supervised = int(rows.loss_mask_BS.sum())
        with torch.autocast(device.type, dtype=torch.bfloat16):
            tau = walked_tau(drafter, target, *scored)
        results[name] = {
            "tau": round(tau, 3), "first_loss": round(losses[0], 2), "last_loss": round(float(np.mean(losses[-20:])), 2),
            "passes": round(variant.steps * variant.blocks / supervised, 2), "supervised_tokens": supervised,
            "seconds": round(time.monotonic() - began, 1),
        }
        print(f"{name:24s} {json.dumps(results[name])}", flush=True)
    where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "heldout_prompts": 48}
    print(json.dumps({**where, "results": results}))


if __name__ == "__main__":
    main()

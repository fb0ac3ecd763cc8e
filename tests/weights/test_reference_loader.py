"""What we export, loaded by the format's own package (dflash 0.1.0): same hidden states, same text, same accepted lengths."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from overfit import overfit_drafter, random_drafter
from toys import VOCAB, noise, toy_shape

from outrider.data.prompts import read_prompts
from outrider.features.target import Target, load_target, load_tokenizer
from outrider.model.drafter import ContextCache, Drafter
from outrider.model.published import to_config
from outrider.records import FULL, SLIDING
from outrider.verify.decode import speculate, target_alone
from outrider.verify.sampling import DecodeOptions
from outrider.weights.export import write_published
from outrider.weights.opening import open_drafter

pytestmark = pytest.mark.skipif(importlib.util.find_spec("dflash") is None,
                                reason="the dflash package is not installed: pip install --no-deps dflash==0.1.0")
PROMPT = [72, 101, 108, 108, 111, 32, 104]
SHAPES = {
    "full": toy_shape(),
    "sliding": toy_shape(layer_types=(SLIDING, SLIDING), sliding_window=6),
    "mixed": toy_shape(layer_types=(FULL, SLIDING), sliding_window=6, rope_theta=5e5),
    "sizes": toy_shape(num_layers=3, num_heads=6, num_kv_heads=3, head_dim=8, intermediate_size=40, target_layer_ids=(3,)),
}


def both(folder: Path, drafter: Drafter) -> tuple[Drafter, Any]:
    """Our loader's and the reference package's model of one exported folder, float32."""
    write_published(folder, drafter, to_config(drafter.shape, embedding_scale=1.0, softcap=None, dtype="bfloat16"))
    return open_drafter(folder, dtype="float32", device="cpu"), their_model(folder)


def their_model(folder: Path) -> Any:
    """The reference package's model of an exported folder, float32."""
    from dflash import DFlashDraftModel

    return DFlashDraftModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def their_text(
    target: Target, theirs: Any, prompt: Sequence[int], limit: int, stop_ids: list[int]
) -> tuple[list[int], list[int]]:
    """New tokens and tokens given by each forward, as the reference package generates greedily."""
    from dflash.model import dflash_generate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash.model._cuda_time", lambda: 0.0)  # it asks a GPU for the time
        out = dflash_generate(theirs, target.model, torch.tensor([list(prompt)]), limit, stop_ids, return_stats=True)
    return out.output_ids[0, len(prompt):].tolist(), out.acceptance_lengths


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_hidden_states(tmp_path: Path, name: str) -> None:
    """Two drafts in a row, the second over cached context; tolerance: float32 rounding, other order of sums."""
    from transformers import DynamicCache

    shape = SHAPES[name]
    ours, theirs = both(tmp_path, random_drafter(shape, seed=4))
    features, blocks = noise(1, 14, len(shape.target_layer_ids) * 32, seed=1), noise(2, shape.block_size, 32, seed=2)
    cache, their_cache = ContextCache(), DynamicCache()
    for block, (start, end) in zip(blocks, ((0, 11), (11, 14)), strict=True):
        hidden = ours.draft(block[None], features[:, start:end], cache)
        expected = theirs(
            position_ids=torch.arange(start, end + shape.block_size)[None], noise_embedding=block[None],
            target_hidden=features[:, start:end], past_key_values=their_cache, use_cache=True,
        )
        their_cache.crop(-shape.block_size)
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "sliding"])
@pytest.mark.parametrize("name", ["full", "sliding", "mixed"])
def test_the_same_text_and_accepted_lengths(tmp_path: Path, toy_target: Callable[..., Target], kind: str, name: str) -> None:
    """With a drafter trained until it is partly right, at every limit around a block's end, and with a stop token."""
    target = toy_target(kind)
    text = target_alone(target, PROMPT, DecodeOptions.greedy(max_new_tokens=33, stop_ids=())).tokens
    trained = overfit_drafter(target, SHAPES[name], (*PROMPT, *text), prompt=len(PROMPT), steps=40)
    ours, theirs = both(tmp_path, trained)
    lengths = []
    for prompt, limit, stop_ids in [(PROMPT, n, []) for n in (2, 3, 5, 30, 33)] + [(PROMPT, 33, [text[9]]), ([9, 9, 9], 24, [])]:
        decoded = speculate(target, ours, prompt, DecodeOptions.greedy(max_new_tokens=limit, stop_ids=tuple(stop_ids)))
        assert (decoded.tokens, decoded.acceptance_lengths) == their_text(target, theirs, prompt, limit, stop_ids)
        lengths += decoded.acceptance_lengths
    assert len(set(lengths)) >= 3, "the drafter must be right sometimes and wrong sometimes, or this compares nothing"


@pytest.mark.skipif("OUTRIDER_DEMO" not in os.environ, reason="OUTRIDER_DEMO names no folder of a finished demo")
def test_the_same_on_the_demo() -> None:
    """The real target and the drafter trained for it: hidden states, greedy text and accepted lengths on held-out prompts."""
    folder = Path(os.environ["OUTRIDER_DEMO"])
    target = load_target(str(folder / "target"), dtype="float32", device="cpu", last_layer=None, head=True)
    ours = open_drafter(folder / "drafter", dtype="float32", device="cpu")
    theirs = their_model(folder / "drafter")
    shape = ours.shape
    features = noise(1, 20, len(shape.target_layer_ids) * shape.hidden_size, seed=1)
    block = target.embed(torch.tensor([[7] + [shape.mask_token_id] * (shape.block_size - 1)]))
    expected = theirs(position_ids=torch.arange(20 + shape.block_size)[None], noise_embedding=block, target_hidden=features)
    torch.testing.assert_close(ours.draft(block, features, ContextCache()), expected, atol=1e-4, rtol=1e-4)
    tokenizer = load_tokenizer(str(folder / "target"))
    lengths = []
    for prompt in read_prompts(folder / "heldout.jsonl", tokenizer, template_options={})[:8]:
        decoded = speculate(target, ours, prompt.ids, DecodeOptions.greedy(max_new_tokens=48, stop_ids=(2,)))
        assert (decoded.tokens, decoded.acceptance_lengths) == their_text(target, theirs, prompt.ids, 48, [2])
        lengths += decoded.acceptance_lengths
    assert len(set(lengths)) >= 4, "a trained drafter is right to many lengths"


def test_the_toys_vocabulary_is_the_configs(tmp_path: Path) -> None:
    _, theirs = both(tmp_path, random_drafter(toy_shape(), seed=0))
    assert theirs.config.vocab_size == VOCAB
    assert (theirs.block_size, theirs.mask_token_id, theirs.target_layer_ids) == (4, 260, [1, 2, 4])

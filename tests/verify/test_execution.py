"""Compiled forwards: the same numbers as the code as it stands, one compilation for all layers; graphs on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from overfit import random_drafter
from toys import KINDS, toy_shape, toy_tokenizer

from outrider.features.target import Target
from outrider.records import FULL, SLIDING
from outrider.verify import execution
from outrider.verify.decode import decode
from outrider.verify.execution import COMPILED, EAGER, GRAPH, Execution
from outrider.verify.reading import TargetReader
from outrider.verify.sampling import DecodeOptions
from outrider.verify.stops import StopStrings

ToyTarget = Callable[..., Target]
PROMPTS = [[5], [72, 101, 108, 108, 111, 32, 104], list(range(40, 52))]
SHAPE = toy_shape(layer_types=(FULL, SLIDING), sliding_window=6)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_all_layers_share_one_compilation(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    target, compilations = toy_target(kind), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compilations.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(execution, "BACKEND", backend)
    found = []
    for how in (Execution(EAGER, torch.device("cpu")), Execution(COMPILED, torch.device("cuda"))):
        reader = TargetReader(target, (1, 3), rows=3, capacity=40, execution=how)
        reader.read_settled(torch.arange(15).view(3, 5), torch.tensor([5, 2, 4]))
        for kept in ([4, 1, 2], [0, 3, 4]):
            found.append(reader.read(torch.arange(20, 32).view(3, 4)))
            reader.keep(torch.tensor(kept), 4)
    torch._dynamo.reset()
    for (hidden, features), (compiled_hidden, compiled_features) in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(compiled_hidden, hidden, rtol=0, atol=1e-5)  # float32, values near 1
        torch.testing.assert_close(compiled_features, features, rtol=0, atol=1e-4)
    assert len(compilations) == 1
    assert all("forward" not in vars(layer) for layer in target.layers)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("stop", [(), ("e",)])
def test_cycles_begun_ahead_change_no_text(
    toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch, kind: str, stop: tuple[str, ...]
) -> None:
    """As on a GPU: rows end by a token, a limit or a string while the next cycle is under way."""
    target, drafter = toy_target(kind), random_drafter(SHAPE, seed=3)
    stops = StopStrings(toy_tokenizer(), stop) if stop else None
    options = DecodeOptions(max_new_tokens=24, stop_ids=(7,), temperature=1.0, top_p=0.9, top_k=0, seed=5)
    for side in (drafter, None):
        one_by_one = decode(target, side, PROMPTS, options, batch_size=2, execution=EAGER, stops=stops)
        with monkeypatch.context() as patch:
            patch.setattr(Execution, "ahead", 1)
            ahead = decode(target, side, PROMPTS, options, batch_size=2, execution=EAGER, stops=stops)
        assert [text.cycles for text in ahead.texts] == [text.cycles for text in one_by_one.texts]
        assert len(ahead.target_seconds) > len(one_by_one.target_seconds)  # the cycle that nobody needed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice; float32 is what is compared here
@pytest.mark.parametrize("how", [GRAPH, COMPILED])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_and_compiled_forwards_write_the_same_texts(toy_target: ToyTarget, kind: str, how: str) -> None:
    """float32, greedy and sampled, a chain and (dense targets) a tree, and the target alone."""
    target = toy_target(kind)
    target = Target(target.model.cuda(), target.facts)
    drafter = random_drafter(SHAPE, seed=3).cuda()
    greedy = DecodeOptions.greedy(max_new_tokens=20, stop_ids=(7,))
    sampled = replace(greedy, temperature=1.0, top_p=0.9, seed=5)
    cases = [(drafter, greedy), (None, greedy), (drafter, sampled)]
    if kind != "qwen3_5":
        cases.append((drafter, replace(greedy, tree_budget=6)))
    for side, options in cases:
        plain, fast = (decode(target, side, PROMPTS, options, batch_size=2, execution=one, stops=None) for one in (EAGER, how))
        assert [text.tokens for text in fast.texts] == [text.tokens for text in plain.texts]

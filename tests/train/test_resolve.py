"""What the run file leaves out is derived from the target, and what does not fit is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from toys import MASK, VOCAB

from outrider.config import RunConfig, load_run, parse_run, to_toml
from outrider.errors import UserError
from outrider.features.facts import TargetFacts, read_facts
from outrider.train.resolve import default_gamma, default_layer_ids, resolve


def run_of(**drafter: object) -> RunConfig:
    return parse_run({"target": {"path": "t"}, "data": {"rows": "r"}, "train": {"folder": "f"},
                      "drafter": {"mask_token_id": MASK, "num_target_features": 2, **drafter}}, where="test")


@pytest.fixture
def facts(toy_folder: Callable[..., Path]) -> TargetFacts:
    return read_facts(str(toy_folder("llama")))


@pytest.mark.parametrize(("layers", "count", "expected"), [
    (36, 5, (1, 9, 17, 25, 33)), (64, 5, (1, 16, 31, 46, 61)),
    (30, 5, (1, 8, 14, 20, 27)), (6, 2, (1, 3)), (6, 1, (3,)), (3, 1, (1,)),
])
def test_default_layer_ids(layers: int, count: int, expected: tuple[int, ...]) -> None:
    assert default_layer_ids(layers, count) == expected


@pytest.mark.parametrize("layers", range(1, 70))
def test_too_many_features_for_the_target(layers: int) -> None:
    """What the refusal calls the most is."""
    most = max((n for n in range(1, layers + 1) if spreads(layers, n)), default=0)
    way_out = f"set it to at most {most}, or give drafter" if most else "repeats a layer: give drafter"
    for count in (most + 1, most + 2, 128):
        with pytest.raises(UserError, match=rf"_features = {count}: too many for a target of {layers} layers.*{way_out}"):
            default_layer_ids(layers, count)


def spreads(layers: int, count: int) -> bool:
    try:
        return len(default_layer_ids(layers, count)) == count
    except UserError:
        return False


def test_default_ids_are_always_legal_or_refused(facts: TargetFacts) -> None:
    for layers in range(1, 70):
        for count in range(1, 9):
            try:
                ids = default_layer_ids(layers, count)
            except UserError:
                continue
            assert ids == tuple(sorted(set(ids)))
            assert len(ids) == count
            assert ids[0] >= 0
            assert ids[-1] < layers - 1


def test_everything_is_derived_and_reported(facts: TargetFacts) -> None:
    resolved = resolve(run_of(num_layers=3), facts)
    assert resolved.derived == {
        "drafter.target_layer_ids": (1, 3), "drafter.intermediate_size": 48, "drafter.num_heads": 4, "drafter.num_kv_heads": 2,
        "drafter.head_dim": 16, "drafter.rope_theta": 10000.0, "drafter.layer_types": ("full_attention",) * 3,
        "objective.gamma": 7.0, "train.attention": "dense",
    }
    shape = resolved.shape
    assert (shape.hidden_size, shape.vocab_size, shape.num_target_layers, shape.target_layer_ids) == (32, VOCAB, 6, (1, 3))
    assert resolved.gamma == 7.0


def test_a_resolved_run_resolves_to_itself(facts: TargetFacts, tmp_path: Path) -> None:
    """What is saved with the run must mean the same run when it is read again."""
    resolved = resolve(run_of(layer_types=["full_attention", "sliding_attention"], num_layers=2, sliding_window=20), facts)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(resolved.config), encoding="utf-8")
    again = resolve(load_run(path), facts)
    assert (again.config, again.shape, again.gamma, again.derived) == (resolved.config, resolved.shape, resolved.gamma, {})


@pytest.mark.parametrize(("drafter", "sentence"), [
    ({"block_size": 1}, r"^drafter\.block_size = 1: must be at least 2"),
    ({"block_size": -3}, r"^drafter\.block_size = -3: must be at least 2"),
    ({"target_layer_ids": [1, 5]}, r"^drafter\.target_layer_ids has 5: .*last layer \(5\) is never used"),
    ({"target_layer_ids": [6]}, r"^drafter\.target_layer_ids has 6: must lie in 0\.\.4"),
    ({"target_layer_ids": []}, r"^drafter\.target_layer_ids = \[\]: must be a list of distinct layers"),
    ({"layer_types": []}, r"^drafter\.layer_types = \[\]: must name 5 layers"),
    ({"mask_token_id": VOCAB}, rf"^drafter\.mask_token_id = {VOCAB}: must lie in 0\.\.{VOCAB - 1}"),
    ({"num_heads": 3}, r"^drafter\.num_heads = 3: must be a multiple of drafter\.num_kv_heads = 2"),
])
def test_what_does_not_fit_is_refused(facts: TargetFacts, drafter: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        resolve(run_of(**drafter), facts)


def test_only_the_allowed_things_come_from_the_target(facts: TargetFacts) -> None:
    """Fields of the target that are no drafter's business (kinds of its layers) do not change the shape."""
    assert resolve(run_of(), replace(facts, layer_kinds=("linear_attention",) * 6)).shape == resolve(run_of(), facts).shape


@pytest.mark.parametrize(("device", "attention"), [("cpu", "dense"), ("cuda", "fused"), ("cuda:1", "fused")])
def test_the_road_follows_the_device_and_is_reported(facts: TargetFacts, device: str, attention: str) -> None:
    config = run_of(num_layers=2)
    resolved = resolve(config.model_copy(update={"train": config.train.model_copy(update={"device": device})}), facts)
    assert resolved.config.train.attention == resolved.derived["train.attention"] == attention


def test_default_gamma() -> None:
    assert [default_gamma(k) for k in (4, 8, 9, 10, 13, 16, 32)] == [2.0, 4.0, 4.5, 5.0, 6.0, 7.0, 14.0]
    assert all(default_gamma(k) > 0 for k in range(2, 64))

"""The formats beside the published one: GGUF and speculators in an export, the golden vector, the model card."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llamacpp import merging_tokenizer
from overfit import random_drafter
from safetensors.torch import load_file, save_file
from test_export import export, save_run
from toys import EOS, VOCAB, toy_model, toy_shape

from outrider.errors import UserError
from outrider.features.target import load_target
from outrider.files import write_json
from outrider.model.published import CONFIG_NAME, WEIGHTS_NAME
from outrider.records import FULL, SLIDING, DrafterShape
from outrider.verify.decode import speculate
from outrider.verify.sampling import DecodeOptions
from outrider.weights.card import CARD_NAME
from outrider.weights.gguf import GGUF_NAME
from outrider.weights.golden import GOLDEN_NAME, STAGES, check_golden, golden_draft
from outrider.weights.opening import open_drafter
from outrider.weights.selfcheck import rounded
from outrider.weights.speculators import is_speculators

Change = Callable[[dict[str, Any]], object]
SHAPES = {
    "full": toy_shape(rope_theta=5e5), "sliding": toy_shape(layer_types=(SLIDING, SLIDING), sliding_window=6),
    "mixed": toy_shape(layer_types=(FULL, SLIDING), sliding_window=6, tie_word_embeddings=True),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy target whose tokenizer can be written as GGUF."""
    folder = tmp_path_factory.mktemp("target")
    toy_model("qwen3", seed=0).save_pretrained(folder)
    merging_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tied_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    toy_model("qwen3", seed=0, tie=True).save_pretrained(folder)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run_of(folder: Path, shape: DrafterShape, target: Path) -> Path:
    return save_run(folder / "run", random_drafter(shape, seed=0), target=target)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_folder_holds_what_was_asked(tmp_path: Path, target: Path, dtype: str) -> None:
    run = run_of(tmp_path, toy_shape(), target)
    result = export(run, tmp_path / "out", None, formats=["hf", "gguf"], dtype=dtype, golden=True)
    assert names(tmp_path / "out") == sorted([CARD_NAME, CONFIG_NAME, GGUF_NAME, GOLDEN_NAME, WEIGHTS_NAME])
    assert result["formats"] == ["gguf", "hf"]
    assert set(result["serve"]) == {"vllm", "sglang", "llamacpp"}
    loaded, trained = open_drafter(tmp_path / "out", dtype="float32", device="cpu"), random_drafter(toy_shape(), seed=0)
    for name, tensor in rounded(trained, dtype).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    export(run, tmp_path / "out", None, formats=["gguf"])  # an earlier export is replaced as a whole
    assert names(tmp_path / "out") == sorted([CARD_NAME, GGUF_NAME])


@pytest.mark.parametrize(("formats", "message"), [
    (["hf", "onnx"], "--format hf,onnx: must be of hf, gguf, speculators"),
    ([""], "--format : must be of"),
    (["speculators", "hf"], "both write a config.json"),
])
def test_formats_that_do_not_go(tmp_path: Path, target: Path, formats: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        export(run_of(tmp_path, toy_shape(), target), tmp_path / "out", None, formats=formats)
    assert not (tmp_path / "out").exists()


def test_a_mixed_drafter_is_not_written_for_llama_cpp(tmp_path: Path, target: Path) -> None:
    with pytest.raises(UserError, match="one causality for all layers"):
        export(run_of(tmp_path, SHAPES["mixed"], target), tmp_path / "out", None, formats=["hf", "gguf"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SHAPES)
def test_speculators_comes_back_as_it_was(tmp_path: Path, target: Path, tied_target: Path, name: str) -> None:
    shape, made_for = SHAPES[name], tied_target if SHAPES[name].tie_word_embeddings else target
    export(run_of(tmp_path, shape, made_for), tmp_path / "out", None, formats=["speculators"])
    config = json.loads((tmp_path / "out" / CONFIG_NAME).read_text())
    assert is_speculators(config)
    assert config["aux_hidden_state_layer_ids"] == [i + 1 for i in shape.target_layer_ids]
    assert config["sliding_window_non_causal"] is (name == "full")
    assert config["speculators_config"]["verifier"] == {"name_or_path": str(made_for), "architectures": ["Qwen3ForCausalLM"]}
    assert open_drafter(tmp_path / "out", dtype="float32", device="cpu").shape == shape


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: c.update(speculators_model_type="eagle3"), "speculators_model_type = 'eagle3': must be 'dflash'"),
    (lambda c: c.update(draft_vocab_size=32000), f"draft_vocab_size = 32000: must be {VOCAB}"),
    (lambda c: c.update(sample_from_anchor=True), "sample_from_anchor = True: must be False"),
    (lambda c: c.update(projector_type="domino"), "projector_type = 'domino': must be 'dflash'"),
    (lambda c: c.update(target_hidden_size=64), "target_hidden_size = 64: must be 32"),
    (lambda c: c.update(aux_hidden_state_layer_ids=[0, 3, 5]), r"target_layer_ids has -1: must lie in 0..4"),
    (lambda c: c.update(aux_hidden_state_layer_ids="2 3 5"), "aux_hidden_state_layer_ids = '2 3 5': must be a list of int"),
    (lambda c: c.update(mask_token_id=None), "mask_token_id = None: must be of type int"),
    (lambda c: c.update(mask_token_id=VOCAB), f"mask_token_id = {VOCAB}: must lie in"),
    (lambda c: c.update(transformer_layer_config=[]), "transformer_layer_config = "),
    (lambda c: c["transformer_layer_config"].update(hidden_size="wide"), "transformer_layer_config: |hidden_size"),
    (lambda c: c["transformer_layer_config"]["rope_parameters"].update(rope_type="yarn", factor=4.0), "rope_parameters = .*yarn"),
    (lambda c: c["speculators_config"]["verifier"].update(name_or_path=None), "verifier.name_or_path is missing"),
    (lambda c: c["speculators_config"]["verifier"].update(name_or_path="/no/where/at"), "name_or_path: .*no config.json"),
    (lambda c: c.pop("speculators_config"), "verifier.name_or_path is missing"),
])
def test_a_speculators_config_that_does_not_fit_is_refused(tmp_path: Path, target: Path, change: Change, message: str) -> None:
    export(run_of(tmp_path, toy_shape(), target), tmp_path / "out", None, formats=["speculators"])
    config = json.loads((tmp_path / "out" / CONFIG_NAME).read_text())
    change(config)
    write_json(tmp_path / "out" / CONFIG_NAME, config)
    with pytest.raises(UserError, match=message):
        open_drafter(tmp_path / "out", dtype="float32", device="cpu")


def test_the_golden_vector_is_what_decoding_does(tmp_path: Path, target: Path) -> None:
    export(run_of(tmp_path, toy_shape(), target), tmp_path / "out", None, golden=True)
    golden = load_file(tmp_path / "out" / GOLDEN_NAME)
    assert set(golden) == set(STAGES)
    loaded = load_target(str(target), dtype="float32", device="cpu", last_layer=None, head=True)
    drafter = open_drafter(tmp_path / "out", dtype="float32", device="cpu")
    prompt = golden["prompt_ids"].tolist()
    assert check_golden(tmp_path / "out" / GOLDEN_NAME, golden_draft(loaded, drafter, prompt), tolerance=1e-6) == []
    first = speculate(loaded, drafter, prompt, DecodeOptions.greedy(max_new_tokens=1, stop_ids=(EOS,)))
    assert first.tokens == golden["anchor"].tolist()


FAULTS: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "another token": ("prompt_ids: entry 3", lambda t: t[3].add_(1)),
    "features of another layer": ("features: differs", lambda t: t.copy_(t.roll(32, dims=1))),
    "context without its norm": ("context: differs", lambda t: t.mul_(1.5)),
    "another first token": ("anchor: entry 0", lambda t: t.add_(1)),
    "a slot too far": ("hidden: differs", lambda t: t.copy_(t.roll(1, dims=0))),
    "another draft": ("drafts: entry 1", lambda t: t[1].add_(1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_golden_vector_names_the_stage_that_differs(tmp_path: Path, target: Path, fault: str) -> None:
    export(run_of(tmp_path, toy_shape(), target), tmp_path / "out", None, golden=True)
    file = tmp_path / "out" / GOLDEN_NAME
    found, (message, change) = load_file(file), FAULTS[fault]
    change(found[message.split(":")[0]])
    reasons = check_golden(file, found, tolerance=1e-4)
    assert len(reasons) == 1
    assert reasons[0].startswith(message)
    short = {name: tensor[:-1] for name, tensor in found.items()}
    assert len(check_golden(file, short, tolerance=1e-4)) == len(STAGES)
    with pytest.raises(UserError, match="'logits' is not a stage"):
        check_golden(file, {"logits": torch.zeros(1)}, tolerance=1e-4)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="golden vector cannot be read"):
        check_golden(file, found, tolerance=1e-4)


def test_the_card_says_what_the_run_says(tmp_path: Path, target: Path) -> None:
    run = run_of(tmp_path, toy_shape(), target)
    (run / "metrics.jsonl").write_text('{"step": 1, "tau": 1.5, "acceptance_by_slot": [0.5, 0.25, 0.0], "tokens": 30, '
                                       '"forwards": 20}\n{"step": 5, "lo')
    (run / "resolved.toml").write_text(
        f'[target]\npath = "{target}"\n[data]\nrows = "{tmp_path}/rows"\n[drafter]\nmask_token_id = 260\n'
        f'[train]\nfolder = "{run}"\naccept_prompts = 3\n')
    export(run, tmp_path / "out", None)
    card = (tmp_path / "out" / CARD_NAME).read_text()
    for part in ("| accepted length tau | 1.500 tokens per target forward",
                 "step 1; greedy, 3 held-out prompts of up to 128 tokens",
                 "accept_prompts = 3", "The rows are not there any more", "| mask token | 260 |", "vllm serve",
                 "outputs of the target's layers 1, 2, 4 (0-based, of 6)"):
        assert part in card, part


def test_a_card_without_a_run_invents_nothing(tmp_path: Path, target: Path) -> None:
    export(run_of(tmp_path, toy_shape(), target), tmp_path / "out", None)
    card = (tmp_path / "out" / CARD_NAME).read_text()
    assert "Not measured" in card
    assert card.count("lies in no run folder") == 2
    assert "base_model" not in card  # a local folder is no hub id


def test_a_published_folder_of_transformers_4_is_read(tmp_path: Path, target: Path) -> None:
    """z-lab's first drafters: rope_theta without rope_parameters, keys of Qwen3's config that mean nothing here."""
    export(run_of(tmp_path, toy_shape(), target), tmp_path / "out", None)
    config = json.loads((tmp_path / "out" / CONFIG_NAME).read_text())
    for key in ("rope_parameters", "is_causal"):
        del config[key]
    config |= {"rope_scaling": None, "max_window_layers": 2, "initializer_range": 0.02, "use_cache": True, "eos_token_id": 2,
               "attention_dropout": 0.0, "transformers_version": "4.57.1"}
    write_json(tmp_path / "out" / CONFIG_NAME, config)
    assert open_drafter(tmp_path / "out", dtype="float32", device="cpu").shape == toy_shape()
    tensors = load_file(tmp_path / "out" / WEIGHTS_NAME)
    tensors["norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "out" / WEIGHTS_NAME)
    with pytest.raises(UserError, match="not finite"):
        open_drafter(tmp_path / "out", dtype="float32", device="cpu")

"""The verbs as a user calls them: the whole road on a toy target, the contract of --json and exit codes, and bad input."""

import inspect
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from verbs import call, refusal, result

from outrider import cli

ToyFolder = Callable[..., Path]

RUN_FILE = """
[target]
path = "{target}"
dtype = "float32"
[data]
rows = "{folder}/rows"
heldout = "{folder}/prompts.jsonl"
[drafter]
num_layers = 1
block_size = 4
mask_token_id = 3
target_layer_ids = [1, 3]
[layout]
anchors = 16
[train]
folder = "{folder}/run"
precision = "float32"
steps = 4
accept_every = 2
accept_prompts = 2
accept_tokens = 8
[checkpoint]
every = 2
"""


@pytest.fixture(scope="module")
def road(toy_folder: ToyFolder, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A toy target, and a folder with prompts, answers, rows and a run file, made by the verbs."""
    target, folder = toy_folder("llama"), tmp_path_factory.mktemp("road")
    lines = [{"prompt": f"Say {i}.", "kind": "even" if i % 2 == 0 else "odd"} for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    cli.respond(folder / "prompts.jsonl", target=str(target), out=folder / "answers.jsonl", max_new_tokens=24, dtype="float32")
    cli.prepare([folder / "answers.jsonl"], target=str(target), out=folder / "rows", row_length=128)
    (folder / "run.toml").write_text(RUN_FILE.format(target=target, folder=folder), encoding="utf-8")
    return target, folder


def test_the_whole_road(
    road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, folder = road
    pair = ("--target", target, "--drafter", tmp_path / "drafter")
    run = ("--set", f"train.folder={tmp_path / 'run'}")
    answered = result(capsys, "respond", folder / "prompts.jsonl", "--target", target, "--out", tmp_path / "a.jsonl",
                      "--max-new-tokens", 12, "--dtype", "float32", "--batch-size", 3)
    assert {k: answered[k] for k in ("prompts", "answered", "failed")} == {"prompts": 8, "answered": 8, "failed": 0}
    prepared = result(capsys, "prepare", tmp_path / "a.jsonl", "--target", target, "--out", tmp_path / "rows", "--row-length", 96)
    assert prepared["documents_in"] == prepared["documents_kept"] == 8
    assert prepared["supervised_tokens"] == answered["tokens"]
    trained = result(capsys, "train", folder / "run.toml", *run)
    assert trained["steps"] == 4
    assert trained["tau"] >= 1.0
    assert Path(trained["checkpoint"]).name == "step-00000004"
    exported = result(capsys, "export", tmp_path / "run", "--out", tmp_path / "drafter")
    assert exported["selfcheck"] is True
    assert {"vllm", "sglang"} <= set(exported["serve"])
    evaluated = result(capsys, "evaluate", folder / "prompts.jsonl", *pair, "--max-new-tokens", 12)
    assert evaluated["identical"] is True
    assert len(evaluated["acceptance_by_slot"]) == 3
    assert set(evaluated["tau_by_kind"]) == {"even", "odd"}
    generated = result(capsys, "generate", "Say 1.", *pair, "--max-new-tokens", 12)
    assert generated["tokens"] == 12
    branched = result(capsys, "generate", "Say 1.", *pair, "--max-new-tokens", 12, "--tree-budget", 6)
    assert branched["text"] == generated["text"]
    assert result(capsys, "evaluate", folder / "prompts.jsonl", *pair, "--max-new-tokens", 12, "--tree-budget", 6)["identical"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Say 2.\n\nSay 3.\n"))
    chat = result(capsys, "generate", "Say 1.", "--chat", *pair, "--max-new-tokens", 12)
    assert [m["content"] for m in chat["messages"][::2]] == ["Say 1.", "Say 2.", "Say 3."]
    assert chat["turns"][0]["text"] == generated["text"]
    assert "prompt: is missing" in refusal(capsys, "generate", *pair)


def test_progress_and_tables_keep_apart(road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, folder = road
    code, out, err = call(capsys, "prepare", folder / "answers.jsonl", "--target", target, "--out", tmp_path / "rows",
                          "--row-length", 96)
    assert code == 0
    assert "supervised tokens: " in out
    assert "supervised" in err


def test_resume_goes_on_and_refuses_a_changed_run(
    road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = (road[1] / "run.toml", "--set", f"train.folder={tmp_path / 'run'}")
    code, out, err = call(capsys, "train", *run)
    assert code == 0
    assert re.search(r"^peak measured: [\d.]+ [MG]iB$", out, re.MULTILINE)
    assert re.search(r"labels: 100% of \d+ looked at are the target's own likeliest token", err)
    assert "optimizer.learning_rate (0.0006 -> 1e-05)" in refusal(capsys, "train", *run, "--set", "optimizer.learning_rate=1e-5")
    code, _, err = call(capsys, "train", *run)
    assert code == 0
    assert "step-00000004, 4 steps done" in err
    assert "all 4 steps are done already: nothing is left to do" in err
    assert "labels: " not in err, "what the rows teach is looked at when a run begins"


@pytest.mark.parametrize(("setting", "words"), [
    ("drafter.block_size=1", ["drafter.block_size = 1", "at least 2"]),
    ("drafter.target_layer_ids=[1, 5]", ["target_layer_ids has 5", "last layer"]),
    ("drafter.target_layer_ids=[1, 9]", ["target_layer_ids has 9", "0..4"]),
    ("drafter.mask_token_id=258", ["drafter.mask_token_id = 258", "eos"]),
    ("drafter.mask_token_id=257", ["drafter.mask_token_id = 257", "occurs in the data"]),
    ("drafter.mask_token_id=100000", ["drafter.mask_token_id = 100000", "0.."]),
    ("optimizer.learning_rat=1", ["unknown key 'optimizer.learning_rat'", "did you mean 'optimizer.learning_rate'"]),
    ("train.device=gpu9", ['train.device = "gpu9"', "cpu"]),
    ("data.rows=nowhere", ["nowhere"]),
    ("data.heldout=nowhere.jsonl", ["nowhere.jsonl"]),
    ("target.path=./nowhere", ["nowhere", "config.json"]),
    ("optimizer", ["section.key=value"]),
])
def test_a_run_file_that_cannot_work(
    road: tuple[Path, Path], tmp_path: Path, setting: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    sentence = refusal(capsys, "train", road[1] / "run.toml", "--set", f"train.folder={run}", "--set", setting)
    for word in words:
        assert word in sentence
    assert not run.exists()


@pytest.mark.parametrize(("text", "words"), [
    ("", ["empty.jsonl", "at least one record"]),
    ('{"prompt": "a", "response": "b"}\n' * 6 + "{broken\n", ["bad.jsonl:7"]),
    ('{"messages": [{"role": "assistant", "content": "x"}]}\n', [":1", "role"]),
    ('{"messages": [{"role": "user", "content": "x"}]}\n', [":1", "assistant"]),
    ('{"input_ids": [1, 99999], "loss_mask": [true, true]}\n', [":1", "99999"]),
])
def test_conversations_that_cannot_be_used(
    road: tuple[Path, Path], tmp_path: Path, text: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("bad.jsonl" if text else "empty.jsonl")
    path.write_text(text, encoding="utf-8")
    sentence = refusal(capsys, "prepare", path, "--target", road[0], "--out", tmp_path / "rows")
    for word in words:
        assert word in sentence
    assert not (tmp_path / "rows").exists()


def test_a_drafter_made_for_another_target(
    road: tuple[Path, Path], toy_folder: ToyFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.train(road[1] / "run.toml", settings=[f"train.folder={tmp_path / 'run'}", "train.accept_every=4"])
    sentence = refusal(capsys, "evaluate", road[1] / "prompts.jsonl", "--target", toy_folder("llama", layers=4), "--drafter",
                       tmp_path / "run")
    assert "6" in sentence
    assert "4" in sentence


def test_a_target_of_the_same_sizes_that_it_was_not_trained_for_is_warned_of(
    road: tuple[Path, Path], toy_folder: ToyFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "run", toy_folder("llama", seed=1)
    cli.train(road[1] / "run.toml", settings=[f"train.folder={run}", "train.steps=1", "train.accept_every=4"])
    for target, warned in ((road[0], False), (other, True)):
        for words in (("generate", "Hi.", "--drafter", run, "--max-new-tokens", 2), ("export", run, "--out", tmp_path / "out")):
            code, _, err = call(capsys, *words, "--target", target)
            assert code == 0, err
            assert (f"was trained for another target than {target} is now" in err) == warned, words
    refused = refusal(capsys, "generate", "Hi.", "--target", other, "--drafter", other)
    assert "is a model's folder, not a drafter's: name an exported drafter" in refused


def test_damaged_checkpoint_and_export(road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    cli.train(road[1] / "run.toml", settings=[f"train.folder={run}"])
    cli.export(run, tmp_path / "drafter")
    for folder in (run / "checkpoints" / "step-00000004" / "drafter", tmp_path / "drafter"):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    pair = ("--target", road[0], "--drafter")
    assert "step-00000004/drafter/model.safetensors" in refusal(capsys, "generate", "Say 1.", *pair, run)
    assert "drafter/model.safetensors" in refusal(capsys, "generate", "Say 1.", *pair, tmp_path / "drafter")


@pytest.mark.parametrize(("words", "found"), [
    *((("--engine", "vllm", "--base-url", "http://127.0.0.1:9", name, value), f"{name}: a server drafts and answers as it was")
      for name, value in (("--tree-budget", 6), ("--batch-size", 4), ("--execution", "eager"), ("--rival", "lookup"),
                          ("--dtype", "bfloat16"))),
    (("--engine", "vllm"), "needs --base-url"),
    (("--engine", "tgi", "--base-url", "http://127.0.0.1:9"), "--engine tgi: must be one of vllm, sglang, llamacpp"),
    (("--engine", "llamacpp", "--base-url", "http://127.0.0.1:9"), "cannot be reached"),
    (("--engine", "llamacpp", "--base-url", "http://127.0.0.1:9", "--concurrency", 0), "--concurrency 0: must be at least 1"),
    (("--drafter", ".", "--base-url", "http://127.0.0.1:9"), "say with --engine which one answers"),
    (("--drafter", ".", "--concurrency", 4), "say with --engine which one answers"),
    (("--drafter", ".", "--batch-size", "2,x"), "--batch-size 2,x"),
    ((), "--drafter: is missing"),
])
def test_measurements_that_cannot_be_made(
    road: tuple[Path, Path], words: tuple[object, ...], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert found in refusal(capsys, "evaluate", road[1] / "prompts.jsonl", "--target", road[0], *words)


def test_output_places_that_cannot_be_written(
    road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, folder = road
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for words in (
        ("prepare", folder / "answers.jsonl", "--target", target, "--out", tmp_path / "file" / "rows"),
        ("train", folder / "run.toml", "--set", f"train.folder={tmp_path / 'file' / 'run'}"),
        ("respond", folder / "prompts.jsonl", "--target", target, "--out", tmp_path / "file" / "a.jsonl", "--dtype", "float32"),
    ):
        assert str(tmp_path / "file") in refusal(capsys, *words)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("verb", ["respond", "plan", "evaluate", "report"])
def test_a_file_is_written_into_a_folder_that_exists_or_not_at_all(
    verb: str, road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing parent of a file is more often a slip of the hand than a wish; folders that a user names are made."""
    target, folder = road
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("", encoding="utf-8")
    words: dict[str, tuple[object, ...]] = {
        "respond": (folder / "prompts.jsonl", "--target", target, "--out"),
        "plan": (folder / "run.toml", "--gpus", "1x h200", "--simulate", 2, "--page"),
        "evaluate": (folder / "prompts.jsonl", "--target", target, "--drafter", ".", "--page"),
        "report": (run, "--out"),
    }
    assert f"{tmp_path / 'typo'} does not exist: create it" in refusal(capsys, verb, *words[verb], tmp_path / "typo" / "x.html")
    assert not (tmp_path / "typo").exists()


def test_a_prompt_without_room_is_named_by_its_line_before_anything_is_loaded(
    road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "Hi."}\n' + json.dumps({"prompt": "Go on. " * 900}) + "\n", encoding="utf-8")
    assert f"{prompts}:2: has " in refusal(capsys, "evaluate", prompts, "--target", road[0], "--drafter", "nowhere")


def test_wrong_words_are_refused(road: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--target" in refusal(capsys, "prepare", "x.jsonl", "--out", "rows")
    assert "nonsense" in refusal(capsys, "nonsense")
    assert call(capsys)[0] == 0
    assert "--device tpu" in refusal(capsys, "generate", "x", "--target", road[0], "--drafter", ".", "--device", "tpu")


@pytest.mark.parametrize("verb", [
    "respond", "prepare", "plan", "train", "doctor", "evaluate", "generate", "export", "report", "demo"])
def test_help_fits_one_screen_and_shows_an_example_to_copy(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, verb, "--help")
    assert code == 0
    example = inspect.getdoc(getattr(cli, verb)).partition("Example: ")[2]  # type: ignore[union-attr]
    assert example.startswith(f"outrider {verb}")
    assert f"Example: {example.strip()}\n" in out
    assert len(out.splitlines()) <= 60
    code, out, _ = call(capsys, "--help")
    commands = out.partition("Commands:\n")[2]
    assert f"  {verb} " in commands
    assert "..." not in commands, "each verb says what it does in one line"


def test_an_interrupted_answer_file_goes_on(road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, folder = road
    words = ("respond", folder / "prompts.jsonl", "--target", target, "--out", tmp_path / "a.jsonl", "--max-new-tokens", 24,
             "--dtype", "float32")
    whole = folder / "answers.jsonl"
    shutil.copy(whole.with_name("answers.jsonl.meta.json"), tmp_path / "a.jsonl.meta.json")
    (tmp_path / "a.jsonl").write_bytes(whole.read_bytes()[:-40])
    assert result(capsys, *words)["reused"] == 7
    assert sorted((tmp_path / "a.jsonl").read_text().splitlines()) == sorted(whole.read_text().splitlines())


@pytest.mark.parametrize(("setting", "words"), [
    ("layout.anchors=129", ["layout.anchors = 129", "128"]),
    ("layout.anchors=100000000000000", ["layout.anchors"]),
    ("drafter.block_size=100000000000000000000000", ["drafter.block_size"]),
    ("drafter.block_size=200", ["drafter.block_size = 200", "128"]),
])
def test_sizes_beyond_a_row(
    road: tuple[Path, Path], tmp_path: Path, setting: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refusal(capsys, "train", road[1] / "run.toml", "--set", f"train.folder={tmp_path / 'run'}", "--set", setting)
    for word in words:
        assert word in sentence


def test_a_folder_with_metrics_of_something_else_is_left_alone(
    road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("mine", encoding="utf-8")
    assert "metrics.jsonl" in refusal(capsys, "train", road[1] / "run.toml", "--set", f"train.folder={tmp_path}")
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == "mine"


def test_answers_that_were_not_asked_for_are_refused(
    road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, folder = road
    words = ("respond", folder / "prompts.jsonl", "--target", target, "--out", tmp_path / "a.jsonl", "--max-new-tokens", 24,
             "--dtype", "float32")
    shutil.copy(folder / "answers.jsonl.meta.json", tmp_path / "a.jsonl.meta.json")
    lines = (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for wrong in (lines[0], json.dumps({**json.loads(lines[0]), "prompt_id": 999}) + "\n"):
        (tmp_path / "a.jsonl").write_text("".join([*lines[:3], wrong]), encoding="utf-8")
        assert "a.jsonl:4" in refusal(capsys, *words)


@pytest.mark.parametrize(("words", "found"), [
    (("--max-new-tokens", 2048), "2048 positions"),
    (("--temperature", "1e-300"), "temperature = 1e-300"),
])
def test_answers_that_cannot_be_given(
    road: tuple[Path, Path], tmp_path: Path, words: tuple[object, ...], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, folder = road
    out = tmp_path / "a.jsonl"
    assert found in refusal(capsys, "respond", folder / "prompts.jsonl", "--target", target, "--out", out, *words)
    assert not (tmp_path / "a.jsonl").exists()


def test_a_prompt_that_is_not_text(road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "UTF-8" in refusal(capsys, "generate", "\udcff\udcfe", "--target", road[0], "--drafter", tmp_path)


def test_an_interrupt_says_so_and_exits_130(
    road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.data.prepare.prepare", interrupted)
    code, _, err = call(capsys, "prepare", road[1] / "answers.jsonl", "--target", road[0], "--out", tmp_path / "rows")
    assert code == 130
    assert "interrupted" in err


@pytest.mark.parametrize(("times", "setting", "line"), [(900, 8, 2), (1, 99_999_999, 1)], ids=["prompt", "setting"])
def test_a_held_out_prompt_without_room_ends_a_run_before_it_begins(
    road: tuple[Path, Path], tmp_path: Path, times: int, setting: int, line: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it would end at its first measurement, with all steps before it lost."""
    held, run = tmp_path / "held.jsonl", tmp_path / "run"
    held.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi.", "Go on. " * times)), encoding="utf-8")
    sentence = refusal(capsys, "train", road[1] / "run.toml", "--set", f"train.folder={run}", "--set", f"data.heldout={held}",
                       "--set", f"train.accept_tokens={setting}")
    positions = json.loads((road[0] / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    for word in (f"data.heldout: {held}:{line}: has ", " tokens", f"{positions} positions",
                 f"lower train.accept_tokens = {setting}"):
        assert word in sentence
    assert not run.exists()


def test_a_card_shows_only_what_was_measured_of_its_own_weights(
    road: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, target = tmp_path / "run", road[0]
    cli.train(road[1] / "run.toml", settings=[f"train.folder={run}", "train.accept_every=4", "checkpoint.keep_last=9"])
    early, late = (run / "checkpoints" / f"step-{step:08d}" for step in (2, 4))

    def card(checkpoint: Path) -> str:
        cli.export(checkpoint, tmp_path / "out")
        return (tmp_path / "out" / "README.md").read_text(encoding="utf-8")

    def measure(drafter: Path) -> None:
        result(capsys, "evaluate", road[1] / "prompts.jsonl", "--target", target, "--drafter", drafter, "--max-new-tokens", 4,
               "--limit", 2, "--page", run / "evaluation.json")

    assert "step 4; greedy" in card(late)
    assert "Not measured: no evaluation" in card(early)
    measure(run)
    assert "drafter: " + str(late) in card(late)
    assert "Not measured: the run folder's evaluation is of other weights" in card(early)
    card(early)
    measure(tmp_path / "out")  # an export's own weights, which another export of the same checkpoint has too
    assert "drafter: " + str(tmp_path / "out") in card(early)
    assert "step 4; greedy" in card(late)


@pytest.mark.parametrize("text", ["[1]", '{"a": 1}', "3", "null", '{"acceptance_by_slot": [], "conditions": 3}'])
def test_an_evaluation_that_is_none_is_refused_by_an_export(
    road: tuple[Path, Path], tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    cli.train(road[1] / "run.toml", settings=[f"train.folder={run}", "train.steps=1", "train.accept_every=9"])
    (run / "evaluation.json").write_text(text, encoding="utf-8")
    sentence = refusal(capsys, "export", run, "--out", tmp_path / "out")
    assert f"{run / 'evaluation.json'}: is no evaluation" in sentence
    assert not (tmp_path / "out").exists()

"""The run file: round trips, settings, and errors that name the field, the value and the rule."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from outrider.config import load_run, parse_run, to_toml
from outrider.errors import UserError

SMALLEST = """
[target]
path = "models/toy"
[data]
rows = "rows"
[drafter]
mask_token_id = 260
[train]
folder = "runs/a"
"""


def written(tmp_path: Path, text: str = SMALLEST) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_those_of_the_definitions(tmp_path: Path) -> None:
    run = load_run(written(tmp_path))
    assert (run.drafter.block_size, run.drafter.num_layers, run.layout.anchors, run.train.epochs) == (16, 5, 512, 6)
    o = run.optimizer
    assert (o.learning_rate, o.beta1, o.beta2, o.final_share, o.warmup_share, o.clip_norm) == (6e-4, 0.9, 0.95, 0.1, 0.04, 1.0)


@pytest.mark.parametrize("changes", [
    {},
    {"target.path": 'a "quoted" \\ path\twith\nall é\u0007\u2028'},
    {"drafter.target_layer_ids": [1, 5, 9], "drafter.layer_types": ["full_attention", "sliding_attention"],
     "drafter.sliding_window": 7},
    {"optimizer.learning_rate": 1e-05, "optimizer.epsilon": 1.2345678901234567e-300, "optimizer.weight_decay": 0},
    {"train.seed": 2**63 - 1, "train.steps": 12, "train.accept_every": 3, "data.heldout": "held out.jsonl"},
    {"objective.gamma": 4.5, "layout.document_floor": 0},
])
def test_toml_round_trip(changes: dict[str, Any], tmp_path: Path) -> None:
    document = tomllib.loads(SMALLEST)
    for name, value in changes.items():
        section, key = name.split(".")
        document.setdefault(section, {})[key] = value
    run = parse_run(document, where="test")
    assert load_run(written(tmp_path, to_toml(run))) == run


def test_settings_override_the_file(tmp_path: Path) -> None:
    run = load_run(written(tmp_path), [
        "optimizer.learning_rate=3e-4", "train.folder=runs/b", "drafter.target_layer_ids=[1, 2]", 'target.path="x=y"',
        "train.steps = 7",
    ])
    assert (run.optimizer.learning_rate, run.train.folder, run.drafter.target_layer_ids) == (3e-4, Path("runs/b"), (1, 2))
    assert (run.target.path, run.train.steps) == ("x=y", 7)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = load_run(written(tmp_path), ["target.path=~/model", "train.folder=~/runs"])
    assert (run.target.path, run.train.folder) == (f"{tmp_path}/model", tmp_path / "runs")


def test_the_run_is_frozen(tmp_path: Path) -> None:
    run = load_run(written(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        run.train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(("setting", "sentence"), [
    ("drafter.blocksize=8", "unknown key 'drafter.blocksize': did you mean 'drafter.block_size'?"),
    ("optimiser.epsilon=1", "unknown key 'optimiser': did you mean 'optimizer'?"),
    ("train.learning_rate=1", "unknown key 'train.learning_rate': did you mean 'optimizer.learning_rate'?"),
    ("data.precision='fp8'", "unknown key 'data.precision': did you mean 'features.precision' or 'train.precision'?"),
    ("layout.zzz=1", "unknown key 'layout.zzz': known keys: anchors, document_floor"),
    ("train.epochs=six", 'train.epochs = "six": must be a whole number'),
    ("train.epochs=true", "train.epochs = true: must be a whole number"),
    ("train.epochs=2.5", "train.epochs = 2.5: must be a whole number"),
    ("train.epochs=0", "train.epochs = 0: must be greater than or equal to 1"),
    ("train.device=gpu0", "train.device = \"gpu0\": must be 'cpu', 'cuda', or one card such as 'cuda:1'"),
    ("train.device=cuda:x", "train.device = \"cuda:x\": must be 'cpu', 'cuda', or one card such as 'cuda:1'"),
    ("optimizer.learning_rate=true", "optimizer.learning_rate = true: must be a number"),
    ("drafter.num_layers=1000", "drafter.num_layers = 1000: must be less than or equal to 128"),
    ("drafter.num_target_features=1000", "drafter.num_target_features = 1000: must be less than or equal to 128"),
    ("drafter.intermediate_size=999999999999",
     "drafter.intermediate_size = 999999999999: must be less than or equal to 1048576"),
    ("drafter.num_heads=1025", "drafter.num_heads = 1025: must be less than or equal to 1024"),
    ("drafter.num_kv_heads=1025", "drafter.num_kv_heads = 1025: must be less than or equal to 1024"),
    ("drafter.head_dim=1025", "drafter.head_dim = 1025: must be less than or equal to 1024"),
    ("drafter.sliding_window=2147483648", "drafter.sliding_window = 2147483648: must be less than or equal to 2147483647"),
    ("train.rows_per_batch=99999999", "train.rows_per_batch = 99999999: must be less than or equal to 4096"),
    ("train.accumulation=99999999", "train.accumulation = 99999999: must be less than or equal to 4096"),
    ("objective.gamma=1e-300", "objective.gamma = 1e-300: must be greater than or equal to 0.1"),
    ("optimizer.clip_norm=1e-300", "optimizer.clip_norm = 1e-300: must be greater than or equal to 0.001"),
    ("optimizer.learning_rate=6", "optimizer.learning_rate = 6: must be less than or equal to 0.1"),
    ("optimizer.epsilon=1", "optimizer.epsilon = 1: must be less than or equal to 0.001"),
    ("optimizer.weight_decay=100", "optimizer.weight_decay = 100: must be less than or equal to 10"),
    ("optimizer.learning_rate=nan", "optimizer.learning_rate = nan: must be a finite number"),
    ("optimizer.learning_rate=0", "optimizer.learning_rate = 0: must be greater than 0"),
    ("target.dtype=float16", "target.dtype = \"float16\": must be 'float32' or 'bfloat16'"),
    ("target.path=3", "target.path = 3: must be a text in quotes"),
    ("features.server=ftp://x", 'features.server = "ftp://x": must be an address such as http://host:8000'),
    ("features.server=http:///v1", 'features.server = "http:///v1": must be an address such as http://host:8000'),
    ("data.rows=3", "data.rows = 3: must be a path in quotes"),
    ("drafter.target_layer_ids=3", "drafter.target_layer_ids = 3: must be a list"),
    ("drafter.target_layer_ids=[1, 2.0]", "drafter.target_layer_ids.1 = 2.0: must be a whole number"),
])
def test_errors_name_field_value_and_rule(setting: str, sentence: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(UserError) as error:
        load_run(path, [setting])
    assert str(error.value) == f"{path}: {sentence}"


@pytest.mark.parametrize(("settings", "sentence"), [
    (["store=kept"], 'store = "kept": does nothing with features.keep = "no": set it to "disk", or leave this out'),
    (["store=kept", "keep=memory"], 'store = "kept": does nothing with features.keep = "memory": set it to "disk"'),
    (["keep_dtype=fp8"], 'keep_dtype = "fp8": does nothing with features.keep = "no": set it to "disk"'),
    (["keep_dtype=fp8", "keep=memory"], 'keep_dtype = "fp8": does nothing with features.keep = "memory"'),
    (["server_folder=/mnt/f"], 'server_folder = "/mnt/f": does nothing without features.server: name the server, or'),
    (["server_requests=4"], "server_requests = 4: does nothing without features.server"),
    (["server_check=first"], 'server_check = "first": does nothing without features.server'),
])
def test_an_option_that_would_do_nothing_is_refused(settings: list[str], sentence: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(UserError) as error:
        load_run(path, [f"features.{setting}" for setting in settings])
    assert str(error.value).startswith(f"{path}: features.{sentence}")
    assert ";" not in str(error.value)


def test_an_option_that_does_something_is_taken(tmp_path: Path) -> None:
    disk = load_run(written(tmp_path), ["features.keep=disk", "features.store=kept", "features.keep_dtype=fp8"]).features
    assert (disk.store, disk.keep_dtype) == (Path("kept"), "fp8")
    served = load_run(written(tmp_path), ["features.server=http://gpu7:8000", "features.server_folder=f",
                                          "features.server_requests=4", "features.server_check=first"]).features
    assert (served.server_folder, served.server_requests, served.server_check) == (Path("f"), 4, "first")
    with pytest.raises(UserError, match=r"^[^;]*features\.server = [^;]*$"):  # one mistake, one sentence
        load_run(written(tmp_path), ["features.server=gpu7", "features.server_requests=4"])


@pytest.mark.parametrize("setting", ["steps", "steps=3", "a.b.c=3", ".x=3", "train.=3", "train.steps"])
def test_malformed_setting(setting: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--set .*must read section\.key=value"):
        load_run(written(tmp_path), [setting])


@pytest.mark.parametrize(("text", "sentence"), [
    (SMALLEST.replace("mask_token_id = 260", ""), "'drafter.mask_token_id' is missing: add it"),
    ("[target]\npath = 'x'\n", "'data' is missing: add it"),
    ("drafter = 3", "drafter = 3: must be a section of keys"),
    ("[target\n", r"not valid TOML: .*line 1"),
    ("", "'target' is missing"),
])
def test_bad_files(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        load_run(written(tmp_path, text))


def test_missing_file_folder_and_bytes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml: the run file is missing"):
        load_run(tmp_path / "none.toml")
    with pytest.raises(UserError, match="is a folder, a run file is one TOML file"):
        load_run(tmp_path)
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not valid TOML"):
        load_run(binary)
    with pytest.raises(UserError, match="cannot be read"):
        load_run(binary / "run.toml")


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "plain.toml").write_text("[target]\npath = 'x'\n", encoding="utf-8")
    (tmp_path / "marked.toml").write_text("[target]\npath = 'x'\n", encoding="utf-8-sig")
    refusals = []
    for name in ("plain.toml", "marked.toml"):
        with pytest.raises(UserError) as refused:
            load_run(tmp_path / name)
        refusals.append(str(refused.value).replace(name, "run.toml"))
    assert refusals[0] == refusals[1]

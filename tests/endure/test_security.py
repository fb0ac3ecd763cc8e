"""Nothing from outside is run or unpickled, no name from outside leaves its folder, no secret is written down."""

import ast
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider import cli
from outrider.errors import UserError
from outrider.features.facts import read_facts
from outrider.features.target import load_target, load_tokenizer

ToyFolder = Callable[..., Path]
SOURCE = Path(cli.__file__).parents[1]
FORBIDDEN_MODULES = {"pickle", "dill", "joblib", "marshal", "shelve", "tarfile"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "os.system", "np.load", "numpy.load", "yaml.load"}


def forbidden(source: str) -> list[str]:
    """What a module of ours does that could run what it reads: unpickling, evaluating, a shell, code of a model folder."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name in FORBIDDEN_CALLS or name.endswith(".extractall"):
                found.append(name)
            found += [f"{name}({key}={options[key]})" for key in ("shell", "trust_remote_code", "allow_pickle")
                      if options.get(key, "False") != "False"]
    return found


@pytest.mark.parametrize("module", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_our_code_runs_nothing_that_it_reads(module: Path) -> None:
    assert forbidden(module.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("line", [
    "import pickle", "from pickle import loads", "torch.load(path)", "subprocess.run(x, shell=True)", "eval(text)",
    "AutoConfig.from_pretrained(p, trust_remote_code=True)", "np.load(p)", "archive.extractall(out)",
])
def test_the_rule_itself(line: str) -> None:
    assert forbidden(line)


class Armed:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


def test_pickled_weights_of_a_target_are_not_read(toy_folder: ToyFolder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy_folder("llama"), tmp_path / "target"))
    torch.save({"armed": Armed(tmp_path / "mark"), **load_file(folder / "model.safetensors")}, folder / "pytorch_model.bin")
    load_target(str(folder), dtype="float32", device="cpu", last_layer=None, head=True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="the weights cannot be loaded"):
        load_target(str(folder), dtype="float32", device="cpu", last_layer=None, head=True)
    assert not (tmp_path / "mark").exists()
    with pytest.raises(FileNotFoundError):  # the weapon works, where it is let
        pickle.loads(pickle.dumps(Armed(tmp_path / "no" / "mark")))


def test_code_in_a_target_folder_is_not_run_and_nobody_is_asked(
    toy_folder: ToyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left unsaid, transformers asks on the terminal whether it may run it."""
    def asked(*args: object) -> str:
        pytest.fail("somebody was asked")

    monkeypatch.setattr("builtins.input", asked)
    folder = Path(shutil.copytree(toy_folder("llama"), tmp_path / "target"))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    for file, keys in (("config.json", ("AutoConfig", "AutoModelForCausalLM")), ("tokenizer_config.json", ("AutoTokenizer",))):
        values = json.loads((folder / file).read_text())
        values["auto_map"] = {key: "evil.Evil" if key != "AutoTokenizer" else ["evil.Evil", None] for key in keys}
        values["model_type" if file == "config.json" else "tokenizer_class"] = "Evil"
        (folder / file).write_text(json.dumps(values))
    with pytest.raises(UserError, match="no usable model config"):
        read_facts(str(folder))
    with pytest.raises(UserError, match="no usable tokenizer"):
        load_tokenizer(str(folder))
    assert not (tmp_path / "mark").exists()


def test_no_secret_is_written_or_said(
    toy_folder: ToyFolder, toy_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    secrets = {name: f"secret-of-{name.lower()}" for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run.toml"
    run.write_text(f'[target]\npath = "{toy_folder("llama")}"\ndtype = "float32"\n[data]\nrows = "{toy_rows}"\n[drafter]\n'
                   'num_layers = 1\nblock_size = 4\nmask_token_id = 260\ntarget_layer_ids = [1, 3]\n[layout]\nanchors = 8\n'
                   f'[train]\nfolder = "{tmp_path / "run"}"\nsteps = 2\n[guards]\ntoo_good = 1e-6\n', encoding="utf-8")
    again = ["train", str(run), "--set", "train.steps=9"]
    for words in (["train", str(run), "--json"], ["report", str(tmp_path / "run")], again):
        monkeypatch.setattr(sys, "argv", ["outrider", *words])
        with pytest.raises(SystemExit):
            cli.main()
    said = capfd.readouterr()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 8
    for secret in secrets.values():
        assert secret not in said.out + said.err
        assert not any(secret.encode() in data for data in written)

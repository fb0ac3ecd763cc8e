"""Nothing from outside is run or unpickled, no name from outside leaves its folder, no secret is written down."""

import ast
import json
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toys import toy_shape
from transformers import dynamic_module_utils

from outrider import cli
from outrider.data.sets import SETS, parse_wheel
from outrider.errors import UserError
from outrider.features import trust
from outrider.features.facts import read_facts
from outrider.features.store import FeatureStore, StoreInfo
from outrider.features.target import load_target, load_tokenizer, target_digest
from outrider.model.published import to_config
from outrider.weights.opening import open_drafter

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


CONFIG_CODE = """
from pathlib import Path
from transformers import LlamaConfig
Path({mark!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODEL_CODE = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(toy_folder: ToyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy target that loads only with Python code of its own, which leaves `mark` beside the folder when it runs."""
    def asked(*args: object) -> str:
        pytest.fail("somebody was asked on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr(trust, "_trusted", set())
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    folder = Path(shutil.copytree(toy_folder("llama"), tmp_path / "target"))
    (folder / "configuration_own.py").write_text(CONFIG_CODE.format(mark=str(tmp_path / "mark")))
    (folder / "modeling_own.py").write_text(MODEL_CODE)
    values = json.loads((folder / "config.json").read_text())
    values |= {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig",
                                                 "AutoModelForCausalLM": "modeling_own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def run_file(folder: Path, target: Path, rows: Path, **of_target: bool) -> Path:
    path = folder / "run.toml"
    trusted = "".join(f"{key} = {str(value).lower()}\n" for key, value in of_target.items())
    path.write_text(f'[target]\npath = "{target}"\ndtype = "float32"\n{trusted}[data]\nrows = "{rows}"\n[drafter]\n'
                    'num_layers = 1\nblock_size = 4\nmask_token_id = 260\ntarget_layer_ids = [1, 3]\n[layout]\nanchors = 8\n'
                    f'[train]\nfolder = "{folder / "run"}"\nsteps = 2\n[guards]\ntoo_good = 1e-6\n', encoding="utf-8")
    return path


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["outrider", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_a_target_with_code_of_its_own_is_refused_in_one_sentence_with_the_way_out(
    own_code: Path, toy_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    way_out = r"needs Python code of its own to load, .* set target\.trust_remote_code = true .* or give --trust-remote-code$"
    with pytest.raises(UserError, match=way_out):
        read_facts(str(own_code))
    assert command(monkeypatch, "train", run_file(tmp_path, own_code, toy_rows)) == 2
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    assert command(monkeypatch, "prepare", tmp_path / "chats.jsonl", "--target", own_code, "--out", tmp_path / "rows") == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(re.search(way_out, line) for line in said)
    assert not (tmp_path / "mark").exists()
    values = json.loads((own_code / "tokenizer_config.json").read_text())
    (own_code / "tokenizer_config.json").write_text(json.dumps(
        {**values, "tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    with pytest.raises(UserError, match=way_out):
        load_tokenizer(str(own_code))
    assert not (tmp_path / "mark").exists()


def test_its_code_runs_when_asked_for_and_that_is_said_once_kept_with_the_run_and_in_the_card(
    own_code: Path, toy_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_file(tmp_path, own_code, toy_rows, trust_remote_code=True)
    assert command(monkeypatch, "train", run) == 0
    said = capfd.readouterr().err
    assert said.count(f"trust_remote_code: Python code in {own_code} may run on this machine, as you asked") == 1
    assert (tmp_path / "mark").exists()
    assert "trust_remote_code = true" in (tmp_path / "run" / "resolved.toml").read_text()

    monkeypatch.setattr(trust, "_trusted", set())
    export = ["export", tmp_path / "run", "--out", tmp_path / "out"]
    assert command(monkeypatch, *export) == 2, "what a checkpoint says of its target is no leave to run its code"
    assert command(monkeypatch, *export, "--trust-remote-code") == 2
    assert "name the target with --target" in capfd.readouterr().err
    assert command(monkeypatch, *export, "--target", own_code, "--trust-remote-code") == 0
    assert "`--trust-remote-code` too: read that code first" in (tmp_path / "out" / "README.md").read_text()


def test_other_code_behind_the_same_target_is_another_target(own_code: Path) -> None:
    before = target_digest(str(own_code))
    trust.trust_code(str(own_code))
    trusted = target_digest(str(own_code))
    (own_code / "modeling_own.py").write_text(MODEL_CODE + "# other\n")
    assert len({before, trusted, target_digest(str(own_code))}) == 3


def test_only_one_place_says_whether_code_may_run() -> None:
    named = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if '"trust_remote_code"' in path.read_text()}
    assert named == {"features/trust.py"}


@pytest.mark.parametrize("name", ["../model.safetensors", "a/../../model.safetensors", "{outside}", "", "a\0b"])
def test_an_index_of_weights_names_no_file_outside_its_folder(toy_folder: ToyFolder, tmp_path: Path, name: str) -> None:
    """transformers follows any name."""
    folder = Path(shutil.copytree(toy_folder("llama"), tmp_path / "target"))
    weights = (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    place = name.replace("{outside}", str(weights))
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), place)}))
    with pytest.raises(UserError, match=r"^[^\n]*index\.json: names the file [^\n]*, which is not in its own folder"):
        load_target(str(folder), dtype="float32", device="cpu", last_layer=None, head=True)


def test_an_index_of_weights_that_are_links_as_in_a_hubs_cache_is_followed(toy_folder: ToyFolder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy_folder("llama"), tmp_path / "snapshot"))
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "part-1.safetensors").symlink_to(tmp_path / "blob")
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {}, "weight_map": dict.fromkeys(load_file(tmp_path / "blob"), "part-1.safetensors")}))
    load_target(str(folder), dtype="float32", device="cpu", last_layer=None, head=True)


def test_an_archive_of_prompts_writes_no_file(tmp_path: Path) -> None:
    """Only the one member that the set names is read, whatever else lies in the archive."""
    one = replace(SETS["gsm8k"], count=1)
    with zipfile.ZipFile(tmp_path / "set.whl", "w") as archive:
        archive.writestr(one.member, '{"prompt": "1+1?", "expected": "2"}\n')
        for name in ("../evil", "/tmp/outrider-evil", "a/../../evil"):
            archive.writestr(name, "evil")
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    assert [task.answer for task in parse_wheel(tmp_path / "set.whl", one)] == ["2"]
    assert [path.name for path in tmp_path.rglob("*")] == ["set.whl"]
    assert not list(tmp_path.parent.glob("evil")) + list(Path("/tmp").glob("outrider-evil"))


def test_a_link_in_the_place_of_a_features_file_is_replaced_not_written_through(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / "store", StoreInfo(target="t", rows="r", precision="p", dtype="float32", layer_ids=(1,),
                                                       hidden_size=4, row_length=2, num_rows=2))
    (tmp_path / "precious").write_text("precious")
    store.put(1, torch.zeros(2, 4))
    (tmp_path / "store" / "row-00000000.safetensors").symlink_to(tmp_path / "precious")
    store.put(0, torch.ones(2, 4))
    assert (tmp_path / "precious").read_text() == "precious"
    found = store.get(0, torch.float32)
    assert found is not None
    assert torch.equal(found, torch.ones(2, 4))


def test_pickled_weights_of_a_drafter_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    shape = toy_shape()
    config = to_config(shape, embedding_scale=1.0, softcap=None, dtype="float32")
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    for name in ("pytorch_model.bin", "model.safetensors", "optimizer.pt", "training_args.bin"):
        (tmp_path / "drafter" / name).write_bytes(pickle.dumps({"armed": Armed(tmp_path / "mark")}))
    with pytest.raises(UserError, match="the drafter's weights cannot be read"):
        open_drafter(tmp_path / "drafter", dtype="float32", device="cpu")
    assert not (tmp_path / "mark").exists()


def test_no_secret_is_written_or_said(
    toy_folder: ToyFolder, toy_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    secrets = {name: f"secret-of-{name.lower()}" for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    run = run_file(tmp_path, toy_folder("llama"), toy_rows)
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

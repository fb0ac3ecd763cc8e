"""Mutates what a user gives (run files, records, checkpoints, tokenizer folders) and calls the verbs on it as a user would."""

import contextlib
import io
import json
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from toys import MASK

from outrider import cli
from outrider.files import sha256_file

HANG_S = 10
ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**63, 2**64, -2**63, 0.0, -0.5, 1.5, 1e300, 5e-324, float("inf"),
    float("nan"), "", "x", "cpu", "\x00", "é", "../../etc/passwd", "a" * 5000, [], [0], [1, 2, 4], [4, 2, 1], [[1]], {},
    {"a": 1}, {"role": "user"},
]
odd = st.sampled_from(ODD_VALUES) | st.integers(-5, 300) | st.text(max_size=8)


@dataclass
class Found:
    """What a series of examples came to: exit codes, and each failure with its last lines."""

    codes: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class HangError(BaseException):
    """Not an Exception, so that nothing of ours takes it for an error that it knows."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def on_alarm(number: int, frame: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def call(*words: object) -> tuple[int, str]:
    """The command line in this process: exit code and all that it said; -1 for a hang, -2 for an exception that got out."""
    said, before = io.StringIO(), sys.argv
    sys.argv = ["outrider", *map(str, words)]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), time_limit(HANG_S):
            cli.main()
    except SystemExit as ended:
        return int(ended.code or 0), said.getvalue()
    except HangError:
        return -1, f"no end within {HANG_S} s: {traceback.format_exc()[-600:]}"
    except BaseException:
        return -2, traceback.format_exc()
    finally:
        sys.argv = before
    return 0, said.getvalue()


def judge(found: Found, what: str, words: list[object], *, keep: Path, example: str) -> None:
    """Call; a failure is a traceback, an exit code other than 0 and 2, a hang, or a changed file under `keep`."""
    before = digests(keep)
    code, said = call(*words)
    found.codes[code] += 1
    lost = [name for name, value in before.items() if digests(keep).get(name) != value]
    if code not in (0, 2) or "Traceback" in said or lost:
        found.failures.append(f"{what}: code {code}, lost {lost}, example {example[:300]!r}\n{said[-900:]}")


def digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


@st.composite
def edited(draw: Callable[..., Any], data: bytes) -> bytes:
    """A few spans of the bytes removed, doubled, or overwritten."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at, length = draw(st.integers(0, max(len(out) - 1, 0))), draw(st.integers(1, 12))
        how = draw(st.sampled_from(("cut", "double", "overwrite", "truncate")))
        match how:
            case "cut":
                del out[at : at + length]
            case "double":
                out[at:at] = out[at : at + length]
            case "overwrite":
                out[at : at + length] = draw(st.binary(min_size=1, max_size=4))
            case "truncate":
                del out[at:]
    return bytes(out)


@st.composite
def altered(draw: Callable[..., Any], value: Any) -> Any:
    """A JSON value with something in it replaced, removed or added."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value)))
        how = draw(st.sampled_from(("inside", "inside", "replace", "remove", "add")))
        rest = {name: item for name, item in value.items() if name != key}
        match how:
            case "inside":
                return {**value, key: draw(altered(value[key]))}
            case "replace":
                return {**value, key: draw(odd)}
            case "remove":
                return rest
            case "add":
                return {**value, draw(st.text(max_size=6)): draw(odd)}
    if isinstance(value, list) and value and draw(st.integers(0, 9)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(altered(value[at])), *value[at + 1 :]]
    return draw(odd)


def series(examples: int, strategy: st.SearchStrategy[Any], one: Callable[[Any], None], *, number: int) -> None:
    """Run `one` on so many examples of the strategy, the same ones for the same number."""
    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def go(example: Any) -> None:
        one(example)

    go()


def toml_of(document: dict[str, Any]) -> str:
    """TOML as a user might have written it, right or wrong."""
    lines = []
    for section, values in document.items():
        if isinstance(values, dict):
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        else:
            lines.append(f"{section} = {json.dumps(values)}")
    return "\n".join(lines)


def run_document(folder: Path, name: str) -> dict[str, Any]:
    return {
        "target": {"path": str(folder / "target"), "dtype": "float32"}, "data": {"rows": str(folder / "rows")},
        "drafter": {"num_layers": 1, "block_size": 4, "mask_token_id": MASK, "target_layer_ids": [1, 2, 4]},
        "layout": {"anchors": 4, "document_floor": 2}, "optimizer": {"learning_rate": 3e-3},
        "train": {"folder": str(folder / name), "steps": 2}, "checkpoint": {"every": 1},
        "guards": {"min_free_gib": 0.0},
    }


def fuzz_run_files(folder: Path, found: Found, examples: int) -> None:
    base = run_document(folder, "scratch/run")
    strategy = altered(base).map(lambda d: toml_of(d) if isinstance(d, dict) else json.dumps(d)).map(
        lambda text: text.encode("utf-8", "replace")) | edited(toml_of(base).encode())

    def one(data: bytes) -> None:
        shutil.rmtree(folder / "scratch", ignore_errors=True)
        (folder / "run.toml").write_bytes(data)
        with contextlib.chdir(folder / "elsewhere"):
            judge(found, "run file", ["train", folder / "run.toml"], keep=folder / "keep", example=repr(data))

    series(examples, strategy, one, number=1)


def fuzz_records(folder: Path, found: Found, examples: int) -> None:
    talk = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good day"}]}
    ready = {"input_ids": [1, 2, 3, 4], "loss_mask": [False, True, True, True]}
    forms = (talk, ready, {"prompt": "a", "response": "b"})
    records = st.one_of(*(altered(record).map(json.dumps).map(str.encode) for record in forms),
                        edited(json.dumps(talk).encode()), st.binary(max_size=30))
    strategy = st.tuples(st.lists(records, min_size=1, max_size=3), st.sampled_from(("stop", "drop")))

    def one(example: tuple[list[bytes], str]) -> None:
        lines, on_bad = example
        shutil.rmtree(folder / "scratch", ignore_errors=True)
        (folder / "records.jsonl").write_bytes(b"\n".join([json.dumps(talk).encode(), *lines]))
        words = ["prepare", folder / "records.jsonl", "--target", folder / "target", "--out", folder / "scratch" / "rows",
                 "--row-length", 64, "--on-bad-record", on_bad, "--max-bad-share", "1"]
        judge(found, "records", words, keep=folder / "keep", example=repr(lines))

    series(examples, strategy, one, number=2)


def fuzz_checkpoints(folder: Path, found: Found, examples: int) -> None:
    """A file of the newest checkpoint, or of an exported drafter, damaged: the run goes on or is refused, the export refused."""
    checkpoint = sorted((folder / "keep" / "run" / "checkpoints").iterdir())[-1]
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    config = json.loads((checkpoint / "drafter" / "config.json").read_text())
    damage = st.sampled_from(files).flatmap(lambda path: st.tuples(st.just(path), st.none() | edited(path.read_bytes())))
    exported = altered(config).map(lambda value: (None, json.dumps(value).encode()))

    def one(example: tuple[Path | None, bytes | None]) -> None:
        path, data = example
        shutil.rmtree(folder / "scratch", ignore_errors=True)
        if path is None:
            assert data is not None
            drafter = Path(shutil.copytree(checkpoint / "drafter", folder / "scratch" / "drafter"))
            (drafter / "config.json").write_bytes(data)
            words: list[object] = ["export", drafter, "--target", folder / "target", "--out", folder / "scratch" / "out"]
        else:
            shutil.copytree(folder / "keep" / "run", folder / "scratch" / "run")
            place = folder / "scratch" / path.relative_to(folder / "keep")
            place.unlink() if data is None else place.write_bytes(data)
            (folder / "run.toml").write_text(toml_of(run_document(folder, "scratch/run")))
            words = ["train", folder / "run.toml"]
        judge(found, "checkpoint", words, keep=folder / "keep", example=f"{path} {(data or b'')[:200]!r}")

    series(examples, damage | exported, one, number=3)


def fuzz_tokenizers(folder: Path, found: Found, examples: int) -> None:
    """A JSON file of the target's folder altered or damaged."""
    files = [path for path in sorted((folder / "target").glob("*.json")) if path.name != "model.safetensors.index.json"]
    strategy = st.sampled_from(files).flatmap(lambda path: st.tuples(st.just(path), edited(path.read_bytes()) | altered(
        json.loads(path.read_text())).map(lambda value: json.dumps(value).encode())))

    def one(example: tuple[Path, bytes]) -> None:
        path, data = example
        shutil.rmtree(folder / "scratch", ignore_errors=True)
        target = Path(shutil.copytree(folder / "target", folder / "scratch" / "target"))
        (target / path.name).write_bytes(data)
        words = ["prepare", folder / "chats.jsonl", "--target", target, "--out", folder / "scratch" / "rows", "--row-length", 96]
        judge(found, "tokenizer folder", words, keep=folder / "keep", example=f"{path.name} {data[:200]!r}")

    series(examples, strategy, one, number=4)


KINDS = {"run files": fuzz_run_files, "data records": fuzz_records, "checkpoints": fuzz_checkpoints,
         "tokenizer folders": fuzz_tokenizers}


def prepare_folder(folder: Path) -> None:
    """`keep/run`: a finished toy run, which nothing may change; the run file of the fuzzed checkpoints fits it."""
    (folder / "elsewhere").mkdir()
    (folder / "run.toml").write_text(toml_of(run_document(folder, "scratch/run")))
    code, said = call("train", folder / "run.toml")
    assert code == 0, said
    (folder / "keep").mkdir()
    (folder / "scratch" / "run").rename(folder / "keep" / "run")

"""Question: does a run that is killed again and again, for as long as you let it, lose a bit, memory or speed?

    python bench/soak.py FOLDER --seconds 420 --kill-every 32

Two runs of the same run file train side by side on one device: `killed` gets SIGKILL at random moments, so many seconds apart on
average, and goes on from its newest checkpoint; `control` is left alone. A call goes on with what the last one left in FOLDER,
on any machine: at its end `killed` is killed once more, `control` saves and stops. Compared are the files of every checkpoint
that both came to, every logged loss, the steps of the same seconds, and memory over the length of each start; the JSON line that
comes last sums up all calls so far. Ends early, in the same way, when the file --stop appears or SIGTERM comes.

Both run on torch's deterministic algorithms: attention's usual backward on a GPU adds in any order, and two runs there part in
their last bits though nobody kills either.
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests")]

import torch  # noqa: E402
from toys import EOS, MASK, PAD, VOCAB, toy_tokenizer  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from outrider.config import parse_run, to_toml  # noqa: E402
from outrider.data.prepare import PrepareOptions, prepare  # noqa: E402
from outrider.files import write_atomic  # noqa: E402
from outrider.train.checkpoint import list_checkpoints  # noqa: E402

KILLED, CONTROL = "killed", "control"
LOOK_EVERY_S = 0.5
SETTLED_S = 10.0  # after its first step a start's memory is taken for settled
CHILD = """
import json, os, sys, threading, time
from pathlib import Path
import torch
from outrider.config import load_run
from outrider.train.loop import train

def sample():
    page = os.sysconf("SC_PAGE_SIZE")
    with open(sys.argv[2], "a", buffering=1) as file:
        while True:
            cuda = torch.cuda.is_initialized()
            line = {"t": time.time(), "pid": os.getpid(), "resident": int(Path("/proc/self/statm").read_text().split()[1]) * page,
                    "allocated": torch.cuda.memory_allocated() if cuda else 0,
                    "reserved": torch.cuda.memory_reserved() if cuda else 0}
            file.write(json.dumps(line) + chr(10))
            time.sleep(1)

threading.Thread(target=sample, daemon=True).start()
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)
print(json.dumps(train(load_run(Path(sys.argv[1])), check=None)))
"""


def make_inputs(folder: Path, device: str, *, toy: bool) -> None:
    """A target of width 64, rows of conversations, and a run file for each of the two. Small: the folder travels."""
    row_length, anchors, every = (96, 6, 5) if toy else (384, 48, 50)
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, eos_token_id=EOS,
        num_key_value_heads=2, pad_token_id=PAD, bos_token_id=None, initializer_range=0.1, max_position_embeddings=2048))
    target.to(torch.bfloat16).save_pretrained(folder / "target")  # half the bytes; loaded in float32
    toy_tokenizer().save_pretrained(folder / "target")
    chats = [{"messages": [{"role": "user", "content": f"{i}+{i}?"}, {"role": "assistant", "content": f"{i} and {i} is {2 * i}"}]}
             for i in range(400)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    options = PrepareOptions(vocab_size=VOCAB, row_length=row_length, supervise="all", on_bad_record="stop", max_bad_share=1.0,
                             max_unsupervised_share=0.0, stop_token_ids=(), template_options={})
    prepare([folder / "chats.jsonl"], tokenizer=toy_tokenizer(), out=folder / "rows", options=options)
    for name in (KILLED, CONTROL):
        run = parse_run({
            "target": {"path": "target", "dtype": "float32"}, "data": {"rows": "rows"},
            "drafter": {"num_layers": 2, "block_size": 8, "mask_token_id": MASK, "target_layer_ids": [1, 2, 4],
                        "intermediate_size": 64},
            "layout": {"anchors": anchors, "document_floor": 2}, "optimizer": {"learning_rate": 1e-3, "warmup_share": 0.01},
            "train": {"folder": name, "steps": 200_000, "device": device, "attention": "dense", "log_every": 5},
            "checkpoint": {"every": every, "keep_last": 1},
        }, where="bench")
        (folder / f"{name}.toml").write_text(to_toml(run), encoding="utf-8")


class Log:
    """Lines of JSON under one name; the newest may have been cut by a kill of this process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, **line: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> Iterator[dict[str, Any]]:
        if self.path.exists():
            for text in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(text)
                except ValueError:
                    continue


@dataclasses.dataclass
class Start:
    """One start of a run: `begun`, the step that it goes on from; `left`, bytes of metrics before it has cut and added lines."""

    name: str
    child: subprocess.Popen[bytes]
    begun: int
    left: int
    training: bool = False  # its first new step is logged

    def step(self, folder: Path) -> int:
        metrics = folder / self.name / "metrics.jsonl"
        if not self.training and size_of(metrics) == self.left:
            return self.begun
        step = last_step(metrics)
        self.training = self.training or step > self.begun
        return max(step, self.begun)


def begin(folder: Path, name: str) -> Start:
    saved = list_checkpoints(folder / name)
    with (folder / f"{name}.said").open("ab") as said:
        child = subprocess.Popen([sys.executable, "-c", CHILD, f"{name}.toml", f"{name}.memory.jsonl"], cwd=folder, stdout=said,
                                 stderr=said, start_new_session=True, env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    return Start(name, child, int(saved[-1].name[5:]) if saved else 0, size_of(folder / name / "metrics.jsonl"))


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def last_step(metrics: Path) -> int:
    """The step of the newest whole line."""
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 8192))
        lines = file.read().splitlines(keepends=True)
    return next((json.loads(line)["step"] for line in reversed(lines[1:]) if line.endswith(b"\n")), 0)


class Call:
    """One call: both runs started, looked at twice a second, one of them killed at the moments drawn."""

    def __init__(self, folder: Path, *, number: int, seconds: float, kill_every: float, stop: Path | None) -> None:
        self.folder, self.number, self.stop = folder, number, stop
        self.began, self.until = time.monotonic(), time.monotonic() + seconds
        self.wall = time.time()
        draw = random.Random(number)
        gaps = (kill_every * draw.uniform(0.5, 1.5) for _ in range(int(2 * seconds / kill_every)))
        self.kill_at = list(accumulate(gaps, initial=self.began))[1:]
        self.looks, self.events = Log(folder / "looks.jsonl"), Log(folder / "events.jsonl")
        self.sums, self.seen = Log(folder / "sums.jsonl"), set[tuple[str, int]]()
        self.told = False
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, frame: object) -> None:
        self.told = True

    def run(self) -> None:
        runs = {name: begin(self.folder, name) for name in (CONTROL, KILLED)}
        try:
            while time.monotonic() < self.until and not self.told and not self._stopped():
                time.sleep(LOOK_EVERY_S)
                if self.kill_at and time.monotonic() > self.kill_at[0]:
                    self.kill_at.pop(0)
                    self._kill(runs[KILLED], "kill")
                    runs[KILLED] = begin(self.folder, KILLED)
                    begun = runs[KILLED].begun  # what it makes again is compared too
                    self.seen = {(name, step) for name, step in self.seen if name == CONTROL or step <= begun}
                for name, start in runs.items():
                    if start.child.poll() is not None:
                        self.events.add(call=self.number, t=time.time(), event="ended by itself", run=name,
                                        code=start.child.returncode)
                        return
                self._look(runs)
        finally:
            self._end(runs)

    def _stopped(self) -> bool:
        """Has the file appeared? One of an earlier call does not count."""
        return self.stop is not None and self.stop.exists() and self.stop.stat().st_mtime > self.wall

    def _look(self, runs: dict[str, Start]) -> None:
        for start in runs.values():
            for folder in list_checkpoints(self.folder / start.name):
                self._remember(start.name, folder)
        line = {name: [start.child.pid, start.step(self.folder), start.training] for name, start in runs.items()}
        self.looks.add(call=self.number, t=round(time.time(), 3), **line)

    def _remember(self, name: str, checkpoint: Path) -> None:
        step = int(checkpoint.name[5:])
        if (name, step) in self.seen:
            return
        try:
            files = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
        except FileNotFoundError:  # replaced by a newer one just now
            return
        self.seen.add((name, step))
        self.sums.add(run=name, step=step, files={file: value for file, value in files.items() if file.endswith(".safetensors")})

    def _kill(self, start: Start, why: str) -> None:
        start.child.send_signal(signal.SIGKILL)
        start.child.wait()
        checkpoints = self.folder / KILLED / "checkpoints"
        self.events.add(call=self.number, t=time.time(), event=why, step=start.step(self.folder), training=start.training,
                        in_save=any(checkpoints.glob(".step-*.partial")))

    def _end(self, runs: dict[str, Start]) -> None:
        if runs[KILLED].child.poll() is None:
            self._kill(runs[KILLED], "kill at the end of a call")
        control = runs[CONTROL].child
        if control.poll() is None:
            control.send_signal(signal.SIGTERM)
            try:
                control.wait(timeout=60)
            except subprocess.TimeoutExpired:
                control.kill()
                control.wait()
        cuda = torch.cuda.is_available()
        self.events.add(call=self.number, t=time.time(), event="end of a call", seconds=round(time.monotonic() - self.began, 1),
                        control_ended=control.returncode, torch=torch.__version__, python=platform.python_version(),
                        device=torch.cuda.get_device_name() if cuda else "cpu", load=os.getloadavg()[0])
        for name in runs:
            said = self.folder / f"{name}.said"
            write_atomic(said, lambda path, said=said: path.write_bytes(said.read_bytes()[-200_000:]))  # type: ignore[misc]
            for folder in list_checkpoints(self.folder / name):
                self._remember(name, folder)
            for old in list_checkpoints(self.folder / name)[:-1]:
                shutil.rmtree(old)  # the folder travels


def summary(folder: Path) -> dict[str, Any]:
    """All calls so far in one record."""
    events = list(Log(folder / "events.jsonl").lines())
    kills = [event for event in events if event["event"].startswith("kill")]
    ends = [event for event in events if event["event"] == "end of a call"]
    looks = list(Log(folder / "looks.jsonl").lines())
    return {
        "calls": len(ends), "minutes": round(sum(event["seconds"] for event in ends) / 60, 1),
        "devices": sorted({f"{event['device']}, torch {event['torch']}, Python {event['python']}" for event in ends}),
        "kills": len(kills), "kills_while_training": sum(event["training"] for event in kills),
        "kills_in_save": sum(event["in_save"] for event in kills), "ended_by_themselves": len(events) - len(kills) - len(ends),
        "control_saved_and_stopped": [event["control_ended"] for event in ends],
        "steps": {name: max((look[name][1] for look in looks), default=0) for name in (KILLED, CONTROL)},
        **same_states(folder), **same_losses(folder), **rates(looks), "memory": memory(folder, looks),
        "said_not_deterministic": sorted({line.strip()[:200] for name in (KILLED, CONTROL)
                                          for line in (folder / f"{name}.said").read_text(errors="replace").splitlines()
                                          if "deterministic" in line}),
    }


def same_states(folder: Path) -> dict[str, Any]:
    """Of the checkpoints that both came to: how many, and which differ in a file of weights, moments or generators."""
    found: dict[str, dict[int, list[dict[str, str]]]] = {KILLED: defaultdict(list), CONTROL: defaultdict(list)}
    for line in Log(folder / "sums.jsonl").lines():
        found[line["run"]][line["step"]].append(line["files"])
    common = sorted(found[KILLED].keys() & found[CONTROL].keys())
    different = [step for step in common if any(one != found[CONTROL][step][0] for one in found[KILLED][step])]
    return {"checkpoints_compared": len(common), "last_compared_at_step": common[-1] if common else None,
            "checkpoints_different": len(different), "first_different_checkpoint": different[0] if different else None}


def same_losses(folder: Path) -> dict[str, Any]:
    lines = {name: {line["step"]: (line["loss"], line["gradient_norm"]) for line in Log(folder / name / "metrics.jsonl").lines()
                    if "gradient_norm" in line} for name in (KILLED, CONTROL)}
    common = sorted(lines[KILLED].keys() & lines[CONTROL].keys())
    different = [step for step in common if lines[KILLED][step] != lines[CONTROL][step]]
    return {"losses_compared": len(common), "losses_different": len(different),
            "first_different_loss": different[0] if different else None}


def rates(looks: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps of both over the spans in which both train, from the first new step of a start to its kill."""
    spans: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for look in looks:
        if look[KILLED][2] and look[CONTROL][2]:
            spans[look[KILLED][0], look[CONTROL][0]].append(look)
    long = [span for span in spans.values() if span[-1]["t"] - span[0]["t"] >= SETTLED_S]
    made = {name: [span[-1][name][1] - span[0][name][1] for span in long] for name in (KILLED, CONTROL)}
    seconds = [span[-1]["t"] - span[0]["t"] for span in long]
    both = list(zip(made[KILLED], made[CONTROL], strict=True))
    return {"spans_of_both": len(long), "seconds_of_both": round(sum(seconds), 1),
            "steps_per_s": {name: round(sum(steps) / sum(seconds), 3) for name, steps in made.items()} if seconds else None,
            "killed_over_control": round(sum(made[KILLED]) / sum(made[CONTROL]), 4) if sum(made[CONTROL]) else None,
            "killed_over_control_by_span": [round(one / other, 4) for one, other in both if other]}


def memory(folder: Path, looks: list[dict[str, Any]]) -> dict[str, Any]:
    """MiB at the beginning and the end of every start that trained long enough: medians of the first and last quarter."""
    first_step = {}
    for look in looks:
        for name in (KILLED, CONTROL):
            if look[name][2]:
                first_step.setdefault(look[name][0], look["t"])
    result = {}
    for name in (KILLED, CONTROL):
        starts = defaultdict(list)
        for line in Log(folder / f"{name}.memory.jsonl").lines():
            if line["t"] > first_step.get(line["pid"], float("inf")) + SETTLED_S:
                starts[line["pid"]].append(line)
        result[name] = {key: [_ends(line[key] for line in lines) for lines in starts.values() if len(lines) >= 8]
                        for key in ("resident", "allocated", "reserved")}
        result[name]["seconds"] = [round(lines[-1]["t"] - lines[0]["t"]) for lines in starts.values() if len(lines) >= 8]
    return result


def _ends(values: Iterable[int]) -> list[float]:
    mib = [value / 2**20 for value in values]
    quarter = max(1, len(mib) // 4)
    return [round(statistics.median(mib[:quarter]), 1), round(statistics.median(mib[-quarter:]), 1)]


def largest_growth(memory: dict[str, Any]) -> dict[str, float]:
    """The largest change of a start from its first quarter to its last, and between starts at their ends, in MiB."""
    grown = {}
    for key in ("resident", "allocated", "reserved"):
        grown[f"{key}_within_a_start"] = max((last - first for run in memory.values() for first, last in run[key]), default=0.0)
        grown[f"{key}_from_start_to_start"] = max((after[1] - before[1] for run in memory.values()
                                                   for before, after in pairwise(run[key])), default=0.0)
    return {key: round(value, 1) for key, value in grown.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("--seconds", type=float, default=420.0)
    options.add_argument("--kill-every", type=float, default=32.0, help="seconds, on average; a start takes about 13")
    options.add_argument("--stop", type=Path)
    options.add_argument("--toy", action="store_true", help="shorter rows, more checkpoints: a dry run for a busy CPU")
    chosen = options.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    if not (chosen.folder / f"{CONTROL}.toml").exists():
        make_inputs(chosen.folder, "cuda" if torch.cuda.is_available() else "cpu", toy=chosen.toy)
    number = sum(event["event"] == "end of a call" for event in Log(chosen.folder / "events.jsonl").lines())
    Call(chosen.folder, number=number, seconds=chosen.seconds, kill_every=chosen.kill_every, stop=chosen.stop).run()
    found = summary(chosen.folder)
    print(json.dumps({**found, "largest_growth_mib": largest_growth(found["memory"])}))
    sys.exit(bool(found["checkpoints_different"] or found["losses_different"] or found["ended_by_themselves"]))


if __name__ == "__main__":
    main()

"""Takes a folder, gives the whole road in it, from a wheel to a measured drafter; wires the rooms, computes nothing itself."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from outrider import cli
from outrider.config import load_run
from outrider.data.prompts import read_prompts
from outrider.data.wheels import cache_folder, fetch_wheel
from outrider.demo.prompts import make_prompts
from outrider.demo.stages import Stages
from outrider.demo.target import MASK_TOKEN_ID, TARGET_NAME, WHEEL, build_target
from outrider.features.facts import read_facts
from outrider.features.target import load_target, load_tokenizer
from outrider.files import write_atomic, write_json
from outrider.progress import ProgressBar, clock, say
from outrider.show import identity, slot_table, wide_console
from outrider.train.resolve import resolve
from outrider.train.start import build_drafter
from outrider.verify.decode import speculate
from outrider.verify.sampling import DecodeOptions
from outrider.verify.score import count_acceptance

TRAIN_PROMPTS, HELDOUT_PROMPTS = 360, 16
TRAIN_SEED, HELDOUT_SEED = 2, 1
ANSWER_TOKENS, ANSWER_BATCH, EVALUATE_TOKENS = 96, 48, 48
ROW_LENGTH = 1024
RUN_FILE = """\
# The demo's run: a 2-layer drafter, blocks of 8, on the target's own answers. See bench/results/recipe.md for the choices.
[target]
path = "{folder}/target"
dtype = "{dtype}"

[data]
rows = "{folder}/rows"
heldout = "{folder}/heldout.jsonl"

[drafter]
num_layers = 2
block_size = 8
mask_token_id = {mask}

[layout]
anchors = 96

[features]
keep = "memory"

[optimizer]
learning_rate = 1e-3

[train]
folder = "{folder}/run"
precision = "{dtype}"
steps = 480
log_every = 10
accept_every = 240
accept_prompts = 8
accept_tokens = 48

[checkpoint]
every = 160
"""


@dataclass(frozen=True)
class Road:
    """The stages' work, and where each keeps what it makes. `dtype`: of everything but the evaluation, which is float32."""

    folder: Path
    dtype: str

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def build_target(self, wheel: Path) -> dict[str, Any]:
        build_target(wheel, self / "target")
        return {"name": TARGET_NAME}

    def write_prompts(self) -> dict[str, Any]:
        heldout = make_prompts(HELDOUT_PROMPTS, seed=HELDOUT_SEED, exclude=set())
        train = make_prompts(TRAIN_PROMPTS, seed=TRAIN_SEED, exclude={p["prompt"] for p in heldout})
        for name, prompts in (("prompts.jsonl", train), ("heldout.jsonl", heldout)):
            write_text(self / name, "".join(json.dumps(p) + "\n" for p in prompts))
        return {"train": len(train), "heldout": len(heldout)}

    def respond(self) -> dict[str, Any]:
        return cli.respond(self / "prompts.jsonl", target=str(self / "target"), out=self / "answers.jsonl",
                           max_new_tokens=ANSWER_TOKENS, batch_size=ANSWER_BATCH, dtype=self.dtype)

    def prepare(self) -> dict[str, Any]:
        return cli.prepare([self / "answers.jsonl"], target=str(self / "target"), out=self / "rows", row_length=ROW_LENGTH)

    def write_run_file(self) -> None:
        write_text(self / "run.toml", RUN_FILE.format(folder=self.folder, dtype=self.dtype, mask=MASK_TOKEN_ID))

    def train(self) -> dict[str, Any]:
        result = cli.train(self / "run.toml")
        if result["stopped"]:
            raise KeyboardInterrupt
        return result

    def export(self) -> dict[str, Any]:
        return cli.export(self / "run", self / "drafter")

    def evaluate(self) -> dict[str, Any]:
        """The exported folder, loaded afresh, against the target alone."""
        return cli.evaluate(self / "heldout.jsonl", target=str(self / "target"), drafter=self / "drafter",
                            max_new_tokens=EVALUATE_TOKENS, dtype="float32")

    def measure_untrained(self) -> dict[str, Any]:
        """The accepted length of the drafter that training starts from, on the prompts and in the dtype of `evaluate`."""
        config = load_run(self / "run.toml")
        target = load_target(config.target.path, dtype="float32", device="cpu", last_layer=None, head=True)
        drafter = build_drafter(resolve(config, read_facts(config.target.path)), target.ends)
        tokenizer = load_tokenizer(config.target.path)
        prompts = [p.ids for p in read_prompts(self / "heldout.jsonl", tokenizer, template_options={})]
        options = DecodeOptions.greedy(max_new_tokens=EVALUATE_TOKENS, stop_ids=tuple(target.stop_ids(tokenizer)))
        decoded = []
        with ProgressBar("evaluate untrained", total=len(prompts), unit="prompts") as bar:
            for prompt in prompts:
                decoded.append(speculate(target, drafter, prompt, options))
                bar.advance(1)
        report = count_acceptance(decoded, drafter.shape.block_size)
        return {"tau": report.tau, "acceptance_by_slot": report.acceptance_by_slot, "tokens": report.tokens}


def demo(folder: Path) -> dict[str, Any]:
    """Run or reuse every stage under `folder`; returns the keys of `outrider demo --json`.

    Raises UserError when something outside stands in the way, RuntimeError when the speculative text is not the target's own.
    """
    began = time.monotonic()
    road, stages = Road(folder, fast_dtype()), Stages(folder, count=8)
    say(f"the demo runs in {folder}: {TARGET_NAME}, CPU, {torch.get_num_threads()} threads, {road.dtype} for answers and "
        "training, float32 for the final comparison")
    wheel = fetch_wheel(cache_folder(), WHEEL)
    target, heldout, rows, run = road / "target", road / "heldout.jsonl", road / "rows", road / "run"
    stages.run("target", lambda: road.build_target(wheel), options={}, rooms=["demo"], inputs=[wheel], outputs=[target])
    stages.run("prompts", road.write_prompts, options={}, rooms=["demo"], inputs=[], outputs=[road / "prompts.jsonl", heldout])
    answered = stages.run(
        "respond", road.respond, options={"dtype": road.dtype, "tokens": ANSWER_TOKENS, "batch": ANSWER_BATCH},
        rooms=["data", "features"], inputs=[target, road / "prompts.jsonl"],
        outputs=[road / "answers.jsonl", road / "answers.jsonl.meta.json"],
    )
    prepared = stages.run("prepare", road.prepare, options={"row_length": ROW_LENGTH}, rooms=["data"],
                          inputs=[target, road / "answers.jsonl"], outputs=[rows])
    road.write_run_file()
    trained = stages.run(
        "train", road.train, options={}, rooms=["data", "features", "layout", "model", "objective", "train", "verify"],
        inputs=[road / "run.toml", target, rows, heldout], outputs=[run],
    )
    exported = stages.run("export", road.export, options={}, rooms=["model", "train", "weights"], inputs=[run],
                          outputs=[road / "drafter"])
    rooms, tokens = ["features", "model", "train", "verify", "weights"], {"tokens": EVALUATE_TOKENS}
    after = stages.run("evaluate", road.evaluate, options=tokens, rooms=rooms, inputs=[target, road / "drafter", heldout],
                       outputs=[])
    before = stages.run("evaluate untrained", road.measure_untrained, options=tokens, rooms=rooms,
                        inputs=[target, road / "run.toml", heldout], outputs=[])
    result = {
        "tau_before": before["tau"], "tau_after": after["tau"], "acceptance_by_slot": after["acceptance_by_slot"],
        "identical": after["identical"], "stages": stages.seconds, "reused": stages.reused, "folder": str(folder),
        "seconds": round(time.monotonic() - began, 1), "before": before, "respond": answered, "prepare": prepared,
        "train": trained, "export": exported, "evaluate": after,
    }
    write_json(road / "demo.json", result)
    show_demo(result)
    if not after["identical"]:
        raise RuntimeError(f"greedy speculative output is not the target's own: {identity(after)}")
    return result


def fast_dtype() -> str:
    """bfloat16 where this CPU multiplies it in hardware (AMX), else float32."""
    return "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def show_demo(result: dict[str, Any]) -> None:
    """The demo's closing table, on stdout."""
    after, prepared, console = result["evaluate"], result["prepare"], wide_console()
    console.print(slot_table({"before training": result["before"]["acceptance_by_slot"],
                              "after training": after["acceptance_by_slot"]}))
    table = Table(title="The road", title_justify="left", box=None, show_header=False, pad_edge=False)
    rows = [
        ("accepted length tau before training", f"{result['tau_before']:.3f} tokens per target forward"),
        ("accepted length tau after training", f"{result['tau_after']:.3f} tokens per target forward"),
        *((f"  {kind}", f"{tau:.3f}") for kind, tau in after["tau_by_kind"].items()),
        ("supervised tokens", f"{prepared['supervised_tokens']:,} in {prepared['rows']} rows, the target's own answers"),
        ("same text as the target alone (float32, greedy)", identity(after)),
        ("with the drafter / target alone", f"{after['tokens_per_s']:.1f} / {after['baseline_tokens_per_s']:.1f} tokens/s = "
                                            f"{after['speedup']:.2f} x"),
        *((f"seconds: {name}", f"{seconds:.1f}" + (" (reused)" if name in result["reused"] else ""))
          for name, seconds in result["stages"].items()),
        ("seconds: all stages", f"{sum(result['stages'].values()):.0f} ({clock(result['seconds'])} now)"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(
        "What this shows: the whole road works here, and the text is exactly the target's. What it cannot show: what a drafter "
        "reaches. Minutes of training on a few hundred narrow prompts give a low tau that does not carry over to other prompts, "
        "and a 135M target is itself so cheap that drafting gains little time or loses some. Both change with a larger target "
        "and real data.",
        highlight=False,
    )
    console.print(f"Everything is in {result['folder']}; the drafter to serve is {result['export']['folder']}.", highlight=False)

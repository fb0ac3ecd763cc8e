"""Runs of `train` that really run out of memory on one GPU, and what the doctor says of the records that they leave.

    python bench/out_of_memory.py unfused|too-large|other-process [--out FOLDER] [--toy]

The drafter is the one that the project was born from (1.73 B parameters, rows of 8192 tokens, 512 blocks of 16; but for the first
case 2 of its 5 layers); its target has that width and vocabulary but 8 layers of attention, with random weights that never touch
a disk.
unfused: the allocator is capped to a card of 96 GB and the drafter is not compiled; Outrider's tripwire, which would refuse, is
taken out. too-large: planned for the whole card, whose allocator is then capped below what the run needs. other-process: another
process holds all of the card but a part that is too small. The run's record is kept in FOLDER. `--toy`: a small run on a CPU that
is told it ran out. Last line: JSON.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from ledger import random_target, small_target
from toys import toy_tokenizer

from outrider.cli.diagnosis import explain_record
from outrider.config import RunConfig, parse_run
from outrider.data.prepare import PrepareOptions, prepare
from outrider.errors import RunFailure
from outrider.features import source
from outrider.features.target import Target
from outrider.model import tripwire
from outrider.model.attention import Attention
from outrider.model.drafter import Drafter
from outrider.model.fused_attention import flex_kernels
from outrider.model.fused_drafter import fused_twin
from outrider.planner.gpus import CATALOGUE
from outrider.train import roads, step
from outrider.train.forecast import Card, card_of
from outrider.train.loop import train

GIB = 2**30
ROWS, S, MASK = 4, 8192, 261
LEFT = 20 * GIB  # of the card, for a run that needs more
HOLD = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("holds", len(held), flush=True)
sys.stdin.read()
"""


def make_run(folder: Path, *, layers: int, toy: bool) -> RunConfig:
    """A run on a target's config, a tokenizer and rows of text, all in `folder`; `layers`: the drafter's."""
    length = 256 if toy else S
    config = small_target(128 if toy else 5120, 8, 512 if toy else 248320, intermediate_size=256 if toy else 17408)
    target = folder / "target"
    target.mkdir(parents=True)
    toy_tokenizer().save_pretrained(target)
    (target / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    chats = [{"messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": " ".join(
        str(number) for number in range(i, i + length))[: length - 64]}]} for i in range(ROWS)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    options = PrepareOptions(vocab_size=config["vocab_size"], row_length=length, supervise="all", on_bad_record="stop",
                             max_unsupervised_share=0.0, max_bad_share=1.0, stop_token_ids=(), template_options={})
    prepare([folder / "chats.jsonl"], tokenizer=toy_tokenizer(), out=folder / "rows", options=options)
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16} if toy else {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    return parse_run({
        "target": {"path": str(target)}, "data": {"rows": str(folder / "rows")},
        "drafter": {"mask_token_id": MASK, "num_layers": layers, **heads}, "layout": {"anchors": 8 if toy else 512},
        "train": {"folder": str(folder / "run"), "device": "cpu" if toy else "cuda", "steps": 4},
    }, where="bench")


def loaded(path: str, *, dtype: str, device: str, last_layer: int | None, head: bool) -> Target:
    """What load_target gives, of random weights."""
    assert last_layer is not None, "nothing is held out, so the target ends at its last captured layer"
    target = random_target(Path(path), last_layer, fp8=False, device=device)
    assert head
    return target


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """Attention as it runs where nothing watches over it: flex_attention, and the compiler off."""
    def kernels(device: torch.device, *, head_dim: int, dtype: torch.dtype) -> Any:
        return flex_kernels(device, head_dim=head_dim)

    def uncompiled(drafter: Drafter, attention: Attention, *, dtype: torch.dtype, compile_part: Any) -> Any:
        return fused_twin(drafter, attention, dtype=dtype, compile_part=lambda part: part)

    with (patch.object(roads, "kernels_for", kernels), patch.object(roads, "fused_twin", uncompiled),
          patch.object(tripwire, "install", lambda: None)):
        yield


@contextlib.contextmanager
def held_by_another() -> Iterator[None]:
    """Another process holds the card but for LEFT bytes."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(LEFT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        print(f"another process: {holder.stdout.readline().decode().strip()} bytes", file=sys.stderr)
        yield
    finally:
        holder.kill()
        holder.wait()


def capped(size: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(size / torch.cuda.mem_get_info()[1])


def told_out_of_memory(*args: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.00 GiB. GPU 0 has a total capacity of 94.97 GiB.")


def run_case(case: str, folder: Path, *, toy: bool) -> dict[str, Any]:
    """Train until memory runs out; what the doctor says of the record then. Fails where the run did not end so."""
    config = make_run(folder, layers=5 if case == "unfused" else 2, toy=toy)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(source, "load_target", loaded))
        seen = card_of
        if toy:
            stack.enter_context(patch.object(step, "drafter_terms", told_out_of_memory))
            seen = lambda device: Card("a card", 2**36, 2**36, True, lambda: 1)  # noqa: E731 - a CPU has none
        elif case == "unfused":
            capped(CATALOGUE["rtx-pro-6000"].usable_bytes)
            stack.enter_context(unfused())
        elif case == "too-large":
            total = torch.cuda.mem_get_info()[1]
            seen = lambda device: Card(torch.cuda.get_device_name(), total, total, True, torch.cuda.max_memory_allocated)  # noqa: E731
            capped(LEFT)
        else:
            stack.enter_context(held_by_another())
        try:
            train(config, check=None, card_of=seen)
        except RunFailure as failure:
            print(failure, file=sys.stderr)
        else:
            raise AssertionError(f"{case}: the run did not run out of memory")
    record = config.train.folder / "out_of_memory.json"
    return {"case": case, "record": json.loads(record.read_text()), "doctor": explain_record(record)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["unfused", "too-large", "other-process"])
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    if not args.toy and not torch.cuda.is_available():
        print(json.dumps({"bench": "out_of_memory", "skipped": "needs a CUDA GPU"}))
        return
    with tempfile.TemporaryDirectory() as temporary:
        found = run_case(args.case, Path(temporary), toy=args.toy)
    (args.out / f"out_of_memory_{args.case}.json").write_text(json.dumps(found["record"]))
    doctor = found["doctor"]
    print(json.dumps({"bench": "out_of_memory", "case": args.case, "cause": doctor["cause"], "summary": doctor["summary"],
                      "line": doctor["line"], "requested_bytes": doctor["requested_bytes"]}))


if __name__ == "__main__":
    main()

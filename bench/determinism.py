"""Question: which road through the drafter gives the same bits again, from the same start, in another process?

    python bench/determinism.py [--mode "dense" ...] [--runs 6] [--steps 4]

Each mode runs in two processes at the same time, each makes a few runs of a few steps from one start: rows, features and weights
are the same. Compared by SHA-256 are the first step's hidden states, the gradient that the loss gives them, every parameter's
gradient, and at the end of each run the weights with both moments. One JSON line a mode: how many different ones were seen.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHILD = "--child" in sys.argv
if CHILD and "deterministic" in sys.argv[sys.argv.index("--child") + 1]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS begins
sys.path[:0] = [str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from drafter_step import born_from_shape, random_blocks, random_rows  # noqa: E402
from torch import Tensor  # noqa: E402

from outrider.config import OptimizerConfig  # noqa: E402
from outrider.model.attention import dense_attention  # noqa: E402
from outrider.model.drafter import Drafter, initialise  # noqa: E402
from outrider.model.fused_attention import flex_kernels, span_kernels  # noqa: E402
from outrider.objective.frozen_head import frozen_head_loss  # noqa: E402
from outrider.records import FULL, DraftBlocks, FrozenHead  # noqa: E402
from outrider.train.masters import WholeMasters  # noqa: E402
from outrider.train.optim import build_optimizer  # noqa: E402
from outrider.train.processes import ALONE  # noqa: E402
from outrider.train.roads import DenseRoad, FusedRoad, Road  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
MODES = ("dense", "dense deterministic", "dense deterministic plain", "fused span", "fused flex", "fused flex deterministic")


class Inputs:
    """What all runs of all processes have in common."""

    def __init__(self, *, toy: bool) -> None:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16} if toy else \
            {"hidden_size": 1024, "intermediate_size": 3072, "num_heads": 16, "num_kv_heads": 4}
        self.shape = born_from_shape(**sizes, num_layers=2, layer_types=(FULL,) * 2, vocab_size=512 if toy else 32_768,
                                     target_layer_ids=(1, 16, 31))
        self.S, A = (128, 8) if toy else (2048, 128)
        rows = random_rows(self.S, self.shape.vocab_size, 3, 1)
        self.rows, self.blocks = rows.to(DEVICE), random_blocks(rows, self.shape, A).to(DEVICE)
        D, V = self.shape.hidden_size, self.shape.vocab_size
        generator = torch.Generator().manual_seed(0)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(DEVICE, torch.bfloat16)

        self.features_BSF, self.embedding_VD = draw(1, self.S, 3 * D), draw(V, D)
        self.head = FrozenHead(draw(V, D).mul_(D**-0.5), None)

    def road(self, mode: str) -> Road:
        drafter = Drafter(self.shape, dense_attention)
        initialise(drafter, seed=0, head_scale=1.0)
        drafter = drafter.to(DEVICE)
        if mode.startswith("dense"):
            return DenseRoad(drafter, dtype=torch.bfloat16)
        kernels = flex_kernels(DEVICE, head_dim=self.shape.head_dim) if "flex" in mode else span_kernels(
            DEVICE, head_dim=self.shape.head_dim, dtype=torch.bfloat16)
        assert kernels is not None
        return FusedRoad(drafter, kernels, dtype=torch.bfloat16, activation_budget=1.0)


def bits(tensors: Iterable[Tensor]) -> str:
    sums = hashlib.sha256()
    for tensor in tensors:
        sums.update(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return sums.hexdigest()[:16]


def one_run(road: Road, inputs: Inputs, steps: int) -> dict[str, str]:
    """Digests of the first step's parts and of what the run ends with."""
    drafter, rows, blocks = road.drafter, inputs.rows, inputs.blocks
    optimizer = build_optimizer(drafter, OptimizerConfig())
    masters, found = WholeMasters(drafter, ALONE), dict[str, str]()
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        road.begin(masters)
        hidden = road.hidden(lambda ids: F.embedding(ids, inputs.embedding_VD), inputs.features_BSF, rows, blocks)
        hidden.retain_grad()
        loss = frozen_head_loss(hidden, blocks, inputs.head, budget_bytes=64 * 2**20).loss_sum / blocks.weights_BAK.sum()
        loss.backward()
        road.collect(masters)
        if step == 0:
            found |= {"hidden": bits(learned_from(hidden, blocks)), "loss": bits([loss]),
                      "loss gradient": bits(learned_from(hidden.grad, blocks))}
            found |= {f"gradient {name}": bits([p.grad]) for name, p in drafter.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm([p.grad for p in drafter.parameters() if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(drafter.parameters(), 1.0, norm)
        optimizer.step()
    found["end"] = bits(t for p in drafter.parameters() for t in (p, *optimizer.state[p].values()))
    return found


def learned_from(hidden_BQD: Tensor | None, blocks: DraftBlocks) -> list[Tensor]:
    """Without slot 0, which may be anything."""
    assert hidden_BQD is not None
    return [hidden_BQD.unflatten(1, blocks.labels_BAK.shape[1:])[:, :, 1:]]


def child(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    if "deterministic" in mode:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    if "plain" in mode:
        for backend in (torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.enable_cudnn_sdp):
            backend(False)
    began = time.perf_counter()
    inputs = Inputs(toy=options.toy)
    road = inputs.road(mode)
    begun = [p.detach().clone() for p in road.drafter.parameters()]
    runs, times = [], []
    for _ in range(options.runs):
        for parameter, value in zip(road.drafter.parameters(), begun, strict=True):
            parameter.data.copy_(value)
        started = time.perf_counter()
        runs.append(one_run(road, inputs, options.steps))
        times.append(round(time.perf_counter() - started, 2))
    return {"runs": runs, "seconds": round(time.perf_counter() - began, 1), "seconds_of_a_run": times}


def compare(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Two processes of a mode, side by side."""
    command = [sys.executable, __file__, "--child", mode, "--runs", str(options.runs), "--steps", str(options.steps)]
    children = [subprocess.Popen(command + ["--toy"] * options.toy, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                for _ in range(2)]
    said = [one.communicate() for one in children]
    if any(one.returncode for one in children):
        return {"mode": mode, "failed": [stderr.strip().splitlines()[-1:] for _, stderr in said]}
    answers = [json.loads(stdout.splitlines()[-1]) for stdout, _ in said]
    runs = [run for answer in answers for run in answer["runs"]]
    different = {key: len({run[key] for run in runs}) for key in runs[0]}
    gradients = [key for key in different if key.startswith("gradient")]
    return {"mode": mode, "runs": len(runs), **{key: different[key] for key in ("hidden", "loss", "loss gradient")},
            "gradients": len(gradients), "gradients_that_differ": [key for key in gradients if different[key] > 1],
            "different_ends": different["end"], "ends_differ_between_processes_only":
            different["end"] > 1 and all(len({run["end"] for run in answer["runs"]}) == 1 for answer in answers),
            "seconds": [answer["seconds"] for answer in answers], "seconds_of_a_run": answers[0]["seconds_of_a_run"],
            "warned": sorted({line[:160] for _, stderr in said for line in stderr.splitlines() if "determinis" in line})}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES if CUDA else MODES[:3]))
    options.add_argument("--runs", type=int, default=6)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--toy", action="store_true", help="a dry run at toy size")
    options.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.child:
        warnings.simplefilter("default")
        print(json.dumps(child(chosen.child, chosen)))
        return
    for mode in chosen.mode:
        device = torch.cuda.get_device_name() if CUDA else "cpu"
        print(json.dumps({**compare(mode, chosen), "device": device, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()

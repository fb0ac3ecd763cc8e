"""The target's capture on one GPU: the case that the project was born from, and what its first call spends its time on.

    python bench/capture.py [--precision as_loaded|fp8] [--documents packed|apart] [--no-compile] [--calls 10] [--profile]

The case: a Qwen3.5-27B-shaped target (64 layers of 5120, every 4th with full attention, 24/4 heads of 256, the others gated delta
nets of 16/48 heads of 128, FFN 17408), random weights, 8192 tokens from 1, 4 and 16 documents, features of layers 1, 16, 31,
46 and 61, layers after 61 not made. Timed with device events, calls back to back. TFLOP counts products and attention of need.
`--check` compares a small target with the same head sizes instead: packed, its documents alone, and float32 on the CPU, where the
kernels are plain loops. `--toy` runs a small one on a CPU. Last line: JSON.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import calculate_time_spent
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from outrider.features import guards
from outrider.features.capture import CaptureRows, capture
from outrider.features.eight_bit import quantise_layer
from outrider.features.facts import facts_of
from outrider.features.fp8 import Fp8Linear, quantise_rows
from outrider.features.packed import PackedCapture
from outrider.features.target import Target
from outrider.records import Features, TokenRows

S, LAYER_IDS = 8192, (1, 16, 31, 46, 61)
WARM_UP = 2
CHECKED_SIZE, CHECKED_TOKENS = 1024, 512


def born_from_config(num_layers: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=num_layers, num_attention_heads=24,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128,
        linear_value_head_dim=128, max_position_embeddings=32768,
    )


def toy_config(num_layers: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
                         "mrope_interleaved": True},
    )


def random_target(config: Qwen3_5TextConfig, device: torch.device, *, precision: str) -> Target:
    """Random weights made on the device, the 8-bit ones one layer at a time; no head."""
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config).to(torch.bfloat16)
    if precision == "fp8":
        for layer in model.model.layers:
            quantise_layer(layer)
    model.set_output_embeddings(nn.Linear(config.hidden_size, 1, bias=False, device=device, dtype=torch.bfloat16))
    buffers = dict(Qwen3_5ForCausalLM(shrunk(config)).named_buffers())
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            weight, scale = quantise_rows(torch.randn(module.weight.shape, device=device, dtype=torch.bfloat16) * 0.02)
            module.weight.data.copy_(weight)
            module.scale.data.copy_(scale)
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if name == "A_log":
                parameter.data.uniform_(0.01, 16).log_()
            elif parameter.dim() == 1:
                parameter.data.fill_(1.0 if name == "dt_bias" or hasattr(module, "variance_epsilon") else 0.0)
            else:
                parameter.data.normal_(0.0, 0.02)
    model.eval().requires_grad_(False)
    return Target(model, facts_of(config.to_dict(), path="random"))


def shrunk(config: Qwen3_5TextConfig) -> Qwen3_5TextConfig:
    """The same head sizes in a model of one layer and 16 tokens, for its buffers (the rotation's frequencies)."""
    return Qwen3_5TextConfig(**{**config.to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"], "vocab_size": 16,
                                "intermediate_size": 16})


def random_rows(length: int, vocab: int, documents: int) -> TokenRows:
    """One row of `documents` documents of random lengths, none shorter than half the mean."""
    generator = torch.Generator().manual_seed(documents)
    shares = torch.rand(documents, generator=generator) + 0.5
    lengths = (shares / shares.sum() * length).long()
    lengths[0] += length - lengths.sum()
    ids = torch.repeat_interleave(torch.arange(documents), lengths)
    starts = lengths.cumsum(0) - lengths
    return TokenRows(
        torch.randint(vocab, (1, length), generator=generator), ids[None], (torch.arange(length) - starts[ids])[None],
        torch.ones(1, length, dtype=torch.bool), torch.tensor([documents]),
    )


def tflop_of_need(target: Target, rows: TokenRows) -> float:
    """Products of the captured layers' weights, and causal attention and the delta rule's state within each document."""
    config: Any = target.decoder.config
    weights = sum(p.numel() for layer in target.layers for p in layer.parameters() if p.dim() == 2 and p.shape[1] > 1)
    lengths = rows.document_ids_BS.unique(return_counts=True)[1].double()
    full = sum(kind == "full_attention" for kind in config.layer_types[: len(target.layers)])
    attention = full * 2 * float((lengths**2).sum()) * config.num_attention_heads * config.head_dim
    linear = len(target.layers) - full
    state_size = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    state = linear * 6 * float(lengths.sum()) * state_size
    return (2 * weights * rows.input_ids_BS.numel() + attention + state) / 1e12


@dataclasses.dataclass
class Clock:
    """Seconds spent in functions that were wrapped, by name; nested ones count in both."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def wrap(self, owner: Any, function: str, name: str) -> None:
        inner = getattr(owner, function)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        setattr(owner, function, timed)


def watch_first_call() -> Clock:
    clock = Clock()
    from triton.compiler import compiler
    from triton.runtime import autotuner, jit

    clock.wrap(autotuner.Autotuner, "_bench", "autotune: all trials")
    clock.wrap(compiler, "compile", "Triton compilation")
    jit.compile = compiler.compile
    return clock


def timed(call: Callable[[], Features], n: int) -> list[float]:
    """Milliseconds of each of n calls back to back, after a warm-up."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    for _ in range(WARM_UP):
        call()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def matrix_rate(seconds: float) -> float:
    """TFLOP/s of 8192 x 8192 x 8192 bf16 products on random data, the last half of so many seconds."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 10)
    return 2 * 8192**3 / 1e9 / statistics.median(times[len(times) // 2 :])


def profile(call: Callable[[], Features]) -> list[tuple[str, float, int]]:
    """(kernel, milliseconds, launches) of one call, the costliest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as result:
        call()
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / 1e3, e.count) for e in result.key_averages() if e.self_device_time_total > 0]
    return sorted(rows, key=lambda row: -row[1])


def relative(found: Features, truth: Features) -> list[float]:
    """||found - truth|| / ||truth|| of each captured layer."""
    pair = [f.values_BSF.float().cpu().unflatten(-1, (-1, CHECKED_SIZE)) for f in (found, truth)]
    return [round(float((a - b).norm() / b.norm()), 5) for a, b in zip(*(p.unbind(2) for p in pair), strict=True)]


def check(device: torch.device) -> dict[str, Any]:
    """Relative differences by captured layer, of layers 1, 3 (full attention), 5 and 7."""
    config = born_from_config(8)
    config.hidden_size, config.intermediate_size, config.vocab_size = CHECKED_SIZE, 2048, 4096
    layer_ids, rows = (1, 3, 5, 7), random_rows(CHECKED_TOKENS, 4096, 4)
    target = random_target(config, device, precision="as_loaded")
    exact = Qwen3_5ForCausalLM(config)
    exact.set_output_embeddings(nn.Linear(config.hidden_size, 1, bias=False))
    exact.load_state_dict({name: value.float().cpu() for name, value in target.model.state_dict().items()})
    truth = PackedCapture(Target(exact.eval().requires_grad_(False), target.facts), layer_ids, compiled=False)(rows)
    packed = PackedCapture(target, layer_ids, compiled=False)
    together = packed(rows)
    alone = torch.empty_like(together.values_BSF)
    for document in range(4):
        at = rows.document_ids_BS[0] == document
        only = TokenRows(*(t[:, at] for t in (rows.input_ids_BS, torch.zeros_like(rows.document_ids_BS), rows.positions_BS,
                                              rows.loss_mask_BS)), rows.row_ids_B)
        alone[:, at.to(device)] = packed(only).values_BSF
    one = dataclasses.replace(rows, document_ids_BS=torch.zeros_like(rows.document_ids_BS))
    found = {"packed": together, "alone": Features(alone), "leaking": packed(one)}
    rounded = {name: relative(features, truth) for name, features in found.items()}
    eight = random_target(config, device, precision="as_loaded")
    for layer in eight.layers:
        quantise_layer(layer)
    return {"to float32": rounded, "packed to alone": relative(together, Features(alone)),
            "fp8 to bf16": relative(PackedCapture(eight, layer_ids, compiled=False)(rows), together)}


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["as_loaded", "fp8"], default="as_loaded")
    parser.add_argument("--documents", choices=["packed", "apart"], default="packed")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--toy", action="store_true")
    return parser.parse_args()


def measured(call: CaptureRows, target: Target, rows: TokenRows, calls: int) -> dict[str, Any]:
    """Times, rates and peak of `calls` captures of the same row."""
    torch.cuda.reset_peak_memory_stats()
    times = timed(lambda: call(rows), calls)
    tflop, ms = tflop_of_need(target, rows), statistics.median(times)
    return {
        "ms": round(ms, 1), "min": round(min(times), 1), "max": round(max(times), 1), "n": len(times),
        "tokens_per_s": round(rows.input_ids_BS.numel() / ms * 1e3), "tflop": round(tflop, 1), "tflops": round(tflop / ms * 1e3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def main() -> None:
    options = asked()
    if not (options.toy or torch.cuda.is_available()):
        print(json.dumps({"bench": "capture", "skipped": "needs a CUDA GPU (or --toy)"}))
        return
    device = torch.device("cpu" if options.toy else "cuda")
    guards.lock_autotuner()
    if options.check:
        print(json.dumps(check(device)))
        return
    config = toy_config(8) if options.toy else born_from_config(max(LAYER_IDS) + 1)
    layer_ids, length = ((1, 3, 6), 256) if options.toy else (LAYER_IDS, S)
    result: dict[str, Any] = {"precision": options.precision, "documents": options.documents, "compiled": not options.no_compile}
    clock = Clock() if options.toy else watch_first_call()
    began = time.perf_counter()
    target = random_target(config, device, precision=options.precision)
    result["load_s"] = round(time.perf_counter() - began, 1)
    began = time.perf_counter()
    packed = PackedCapture(target, layer_ids, compiled=not options.no_compile) if options.documents == "packed" else None

    def call(rows: TokenRows) -> Features:
        return packed(rows) if packed else capture(target, rows, layer_ids)

    features = call(random_rows(length, config.vocab_size, 4))
    assert torch.isfinite(features.values_BSF).all()
    result["first_call_s"] = round(time.perf_counter() - began, 1)
    compilation = calculate_time_spent()
    clock.seconds["torch.compile, with its kernels"] = compilation.get("entire_frame_compile", 0.0)
    clock.seconds["of which in Inductor"] = compilation.get("backend_compile", 0.0)
    result["first_call"] = {name: round(seconds, 1) for name, seconds in clock.seconds.items()}
    print(json.dumps(result), file=sys.stderr, flush=True)
    if options.toy:
        print(json.dumps(result | {"tflop": tflop_of_need(target, random_rows(length, config.vocab_size, 4))}))
        return
    result["weights_gib"] = round(torch.cuda.memory_allocated() / 2**30 - features.values_BSF.nbytes / 2**30, 2)
    del features
    result["matrix_tflops_before"] = round(matrix_rate(1.0))
    for documents in (1, 4, 16):
        rows = random_rows(length, config.vocab_size, documents)
        result[f"{documents} documents"] = measured(call, target, rows, options.calls)
        print(documents, json.dumps(result[f"{documents} documents"]), file=sys.stderr, flush=True)
    result["matrix_tflops_after"] = round(matrix_rate(1.0))
    if options.profile:
        for name, ms, count in profile(lambda: call(random_rows(length, config.vocab_size, 4)))[:40]:
            print(f"{ms:9.2f} ms {count:6d} x {name[:110]}", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Takes where the target and an exported drafter lie, gives the command that serves them in each engine; runs nothing."""

import json
import shlex
from collections.abc import Collection
from pathlib import Path

from outrider.records import DrafterShape
from outrider.weights.gguf import GGUF_NAME


def serve_commands(folder: Path, target: str, shape: DrafterShape, formats: Collection[str]) -> dict[str, str]:
    """One command line an engine that reads one of `formats`. vLLM and llama.cpp count the drafted tokens (K - 1), SGLang K.

    vLLM runs drafters whose layers are all full or all sliding; for a mixed one its line is left out. llama.cpp needs the
    target as a GGUF file too, whose name is not known here.
    Spelling: vLLM's, SGLang's and llama.cpp's documentation of DFlash, and the model cards of the format's authors.
    """
    drafts, mixed = shape.block_size - 1, len(set(shape.layer_types)) > 1
    commands: dict[str, list[str]] = {}
    if not mixed and ("hf" in formats or "speculators" in formats):
        speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": drafts}
        commands["vllm"] = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
    if "hf" in formats:
        commands["sglang"] = [
            "python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "DFLASH",
            "--speculative-draft-model-path", str(folder), "--speculative-num-draft-tokens", str(shape.block_size),
        ]
    if "gguf" in formats:
        commands["llamacpp"] = [
            "llama-server", "--model", f"{Path(target).name}.gguf", "--model-draft", str(folder / GGUF_NAME),
            "--spec-type", "draft-dflash", "--spec-draft-n-max", str(drafts),
        ]
    return {engine: shlex.join(words) for engine, words in commands.items()}

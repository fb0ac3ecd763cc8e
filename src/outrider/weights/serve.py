"""Takes where the target and an exported drafter lie, gives the command that serves them in each engine; runs nothing."""

import json
import shlex
from pathlib import Path

from outrider.records import DrafterShape


def serve_commands(folder: Path, target: str, shape: DrafterShape) -> dict[str, str]:
    """One command line an engine. vLLM counts the drafted tokens (K - 1), SGLang the whole block (K).

    vLLM runs drafters whose layers are all full or all sliding; for a mixed one its line is left out.
    Spelling: vLLM's and SGLang's documentation of DFlash, and the model cards of the format's authors.
    """
    speculative = {"method": "dflash", "model": str(folder), "num_speculative_tokens": shape.block_size - 1}
    commands = {
        "vllm": ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)],
        "sglang": [
            "python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "DFLASH",
            "--speculative-draft-model-path", str(folder), "--speculative-num-draft-tokens", str(shape.block_size),
        ],
    }
    if len(set(shape.layer_types)) > 1:
        del commands["vllm"]
    return {engine: shlex.join(words) for engine, words in commands.items()}

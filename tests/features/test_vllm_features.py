"""Features from a real vLLM server (`make test-engines`), its CPU build: what our own capture gives, to rounding."""

import os
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toys import random_rows, toy_model, toy_tokenizer

from outrider.config import FeaturesConfig
from outrider.errors import UserError
from outrider.features.capture import capture, one_row
from outrider.features.served import Service
from outrider.features.source import Order, Provenance, open_served
from outrider.features.target import load_target

PYTHON = os.environ.get("OUTRIDER_ENGINES", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="OUTRIDER_ENGINES names no python with vLLM's CPU build: make test-engines")
IDS, HEAD, WIDTH = (1, 2, 4), 32, 32
ROWS = random_rows([[60, 9, 1], [30, 30], []], length=80, seed=1)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    toy_model("qwen3", seed=0, head_dim=HEAD).save_pretrained(folder)  # the smallest head that vLLM's CPU kernels take
    toy_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def service(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server started as a refusal of ours says it must be."""
    shared = tmp_path_factory.mktemp("shared")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    service = Service(f"http://127.0.0.1:{port}", shared, 4, 60.0, IDS, WIDTH, torch.float32, pinned=False)
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target_folder), "--port", str(port),
               "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "1024",
               *shlex.split(service.start_options)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1", "PYTHONPATH": str(Path(__file__).parent / "vllm_on_cpu")}
    log = shared.parent / "vllm.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env={**os.environ, **settings}, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 240
        while "Application startup complete" not in log.read_text(errors="replace"):
            assert server.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, "vLLM did not start"
            time.sleep(0.5)
        yield service
    finally:
        server.terminate()
        server.wait(60)


def test_a_real_server_gives_the_features(service: Service, target_folder: Path, tmp_path: Path) -> None:
    order = Order(str(target_folder), "float32", "cpu", IDS, last_layer=None)
    settings = FeaturesConfig(server=service.url, server_folder=service.folder)
    provenance = Provenance("target", "rows", 3, tmp_path)
    source = open_served(order, settings, one_row(ROWS, 0), provenance, timeout_s=60, checks=True)
    whole = load_target(str(target_folder), dtype="float32", device="cpu", last_layer=4, head=True)
    truth = capture(whole, ROWS, IDS).values_BSF
    for _ in range(2):
        found = source.features(ROWS, torch.device("cpu")).values_BSF
        assert float((found - truth).norm() / truth.norm()) < 1e-5
    assert service.folder is not None
    assert list(service.folder.iterdir()) == [], "every file was taken, and removed"
    other = Order(str(target_folder), "float32", "cpu", (0, 1, 3), last_layer=None)  # what ids without the + 1 would give
    with pytest.raises(UserError, match=r"capture of layer 0: the target's logits .* does it serve this target"):
        open_served(other, settings, one_row(ROWS, 0), provenance, timeout_s=60, checks=True)

"""A double of a vLLM server with its hidden-states connector: one toy target, its interface over HTTP, its files and locks."""

import contextlib
import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from http_double import serving
from safetensors.torch import save_file
from torch import Tensor

from outrider.features.capture import captured_layers
from outrider.features.target import Target

Reply = tuple[int, dict[str, Any]] | None  # a status and a body, or None to break the connection off


class HiddenStatesServer:
    """Answers as vLLM 0.32 does: `layers` are its own ids (ours + 1), files are written after the answer, under a lock.

    `fault(number, tokens)` may spoil request `number` (1, 2, ..): it gives a reply to send instead, or None to serve it.
    """

    def __init__(self, target: Target, folder: Path, layers: tuple[int, ...]) -> None:
        self.target, self.folder, self.layers = target, folder, layers
        self.fault: Callable[[int, list[int]], Any] = lambda number, tokens: "serve"
        self.write_s, self.locks, self.shift = 0.0, True, 0
        self.asked: list[list[int]] = []
        self.at_once = self.most_at_once = 0
        self.most_files = 0
        self.wrong_tokens = self.same_name = self.dies_writing = False
        self._lock = threading.Lock()

    @torch.no_grad()
    def run(self, tokens: list[int]) -> Tensor:
        """`[T, L, D]`, one request at a time: the hooks of the toy target are shared."""
        with self._lock, captured_layers(self.target, [i - 1 for i in self.layers], stop_after_last=False) as outputs:
            self.target.decoder(input_ids=torch.tensor([tokens]), use_cache=False)
            return torch.stack([output[0] for output in outputs], dim=1).contiguous()

    def complete(self, body: dict[str, Any]) -> Reply:
        tokens = body["prompt"]
        assert body["max_tokens"] == 1
        with self._lock:
            self.asked.append(tokens)
            number = len(self.asked)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            spoiled = self.fault(number, tokens)
            name = "same" if self.same_name else f"cmpl-{body['request_id']}-0-{number:08x}"
            path = self.folder / f"{name}.safetensors"
            values = self.run(tokens)
            lock = self._locked(path)
            found = {"hidden_states": values, "token_ids": torch.tensor(tokens[::-1] if self.wrong_tokens else tokens)}
            threading.Thread(target=self._write, args=(path, found, lock)).start()
            if spoiled != "serve":
                return spoiled  # type: ignore[no-any-return]
            return 200, {"choices": [{"text": ""}], "kv_transfer_params": {"hidden_states_path": f"/on/the/server/{path.name}"}}
        finally:
            with self._lock:
                self.at_once -= 1

    def _locked(self, path: Path) -> Any:
        if not self.locks:
            return None
        handle = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(handle, fcntl.LOCK_EX)
        return handle

    def _write(self, path: Path, found: dict[str, Tensor], lock: Any) -> None:
        try:
            time.sleep(self.write_s)
            if self.dies_writing:
                self.dies_writing = False
            elif self.locks:
                save_file(found, path)
            else:  # as it grows under the eyes of a reader
                save_file(found, path.with_suffix(".whole"))
                whole = path.with_suffix(".whole").read_bytes()
                path.write_bytes(whole[: len(whole) // 2])
                time.sleep(self.write_s)
                path.write_bytes(whole)
                path.with_suffix(".whole").unlink()
            self.most_files = max(self.most_files, len(list(self.folder.glob("*.safetensors"))))
        finally:
            if lock is not None:
                lock.close()


@contextlib.contextmanager
def hidden_states_server(double: HiddenStatesServer, port: int = 0) -> Iterator[str]:
    """The address at which the double answers."""

    def reply(path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        status, values = (200, {"data": [{"id": "toy"}]}) if body is None else double.complete(body) or (0, {})
        return status, json.dumps(values).encode()

    with serving(reply, port=port) as address:
        yield address

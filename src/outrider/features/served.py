"""Takes rows and the address of a running vLLM server, gives the features it computes; loads no model, knows no drafter.

vLLM's own interface (docs.vllm.ai, "Hidden State Extraction"; 0.32): the server is started with the speculative method
`extract_hidden_states` and the `ExampleHiddenStatesConnector`. Each answer to a completion of one token then names a safetensors
file in a folder that both sides see: `hidden_states [T, L, D]` and `token_ids [T]`. The file is written after the answer, under
an exclusive lock on `<file>.lock`. Its layer ids count the embedding as 0: they are ours + 1.
"""

import fcntl
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outrider.errors import RunFailure, UserError
from outrider.features.calls import Unreachable, call_json
from outrider.features.capture import documents_of
from outrider.progress import say
from outrider.records import Features, TokenRows

POLL_S = 0.005  # between two looks at a file that is being written
ABANDONED_S = 2.0  # a lock that nobody holds, and no file: the server's writer has died
LONGEST_PAUSE_S = 5.0  # between two attempts to reach a server that is away
REMEMBERED = 10_000  # file names: those read last, and those of the answers lost last; a server that mixes up does it at once


@dataclass(frozen=True)
class Service:
    """A server at `url` that answers for layers `layer_ids` (ours) of a target of width `hidden_size` in `dtype`.

    `folder`: where its files lie as seen from here, None where the paths it names are ours too. `requests`: at most so many at
    a time. `timeout_s`: how long an answer and its file may be awaited, and a server that goes away after the start. `pinned`:
    features lie in page-locked memory, from which a GPU fetches them.
    """

    url: str
    folder: Path | None
    requests: int
    timeout_s: float
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype
    pinned: bool

    @property
    def start_options(self) -> str:
        """What `vllm serve` must be started with, to be pasted into a shell."""
        layers = {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in self.layer_ids]}
        method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": {"hf_config": layers}}
        connector = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
                     "kv_connector_extra_config": {"shared_storage_path": str(self.folder or "/a/shared/folder")}}
        return (f"--dtype {str(self.dtype).removeprefix('torch.')} --no-enable-prefix-caching --no-enable-chunked-prefill "
                f"--speculative-config '{json.dumps(method)}' --kv-transfer-config '{json.dumps(connector)}'")


class ServedCapture:
    """Captures rows by asking the server for each document on its own (a `capture.CaptureRows`); features are on the CPU.

    A file is taken only when it holds the very tokens that were asked for, once, and is then removed. An answer that was lost is
    asked for again under another name, and what the lost one may still write is removed too. Raises UserError where the server
    does not answer at the start, at once: then the address is wrong, or nothing was started.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        models = call_json(f"{service.url}/v1/models", None, timeout_s=service.timeout_s)
        try:
            self.model = str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"{service.url}/v1/models: names no model: check that a vLLM server answers there") from error
        self._lock = threading.Lock()
        self._taken: deque[str] = deque(maxlen=REMEMBERED)
        self._lost: deque[str] = deque(maxlen=REMEMBERED)  # names of requests whose answer never came
        self._folder = service.folder

    def __call__(self, rows: TokenRows) -> Features:
        """Features `[B, S, F]`, 0 on padding. Raises UserError for what is wrong with the server's set-up, RunFailure for what
        it did wrong or did not do in time."""
        service = self.service
        B, S = rows.input_ids_BS.shape
        F = len(service.layer_ids) * service.hidden_size
        out_BSF = torch.zeros(B, S, F, dtype=service.dtype, pin_memory=service.pinned)
        pool = ThreadPoolExecutor(service.requests, thread_name_prefix="served")
        try:
            asked = [(document, pool.submit(self._document, ids))
                     for document in documents_of(rows.document_ids_BS)
                     for ids in [rows.input_ids_BS[document.b, document.start : document.start + document.length].tolist()]]
            for document, answer in asked:
                out_BSF[document.b, document.start : document.start + document.length] = answer.result()
        finally:  # where one failed the others would too, each after its own wait
            pool.shutdown(wait=False, cancel_futures=True)
        self._remove_lost()
        return Features(out_BSF)

    def _document(self, ids: Sequence[int]) -> Tensor:
        """Features `[T, F]` of one document; a server that is away is asked again until `timeout_s` have passed."""
        deadline, pause, away = time.monotonic() + self.service.timeout_s, POLL_S, False
        while True:
            name = uuid.uuid4().hex
            try:
                values_TF = self._take(self._ask(ids, name, deadline), ids, deadline)
            except Unreachable as error:
                with self._lock:
                    self._lost.append(name)
                if time.monotonic() + pause > deadline:
                    raise RunFailure(f"{error} (asked again for placement.timeout_s = {self.service.timeout_s:.0f} s)") from error
                if pause > 1.0 and not away:
                    say(f"{error}; asking again")
                    away = True
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                if away:
                    say(f"{self.service.url}: answers again")
                return values_TF

    def _ask(self, ids: Sequence[int], name: str, deadline: float) -> Path:
        """Have the server run the tokens; gives where their features will be."""
        url = f"{self.service.url}/v1/completions"
        body = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "request_id": name}
        answer = call_json(url, body, timeout_s=max(deadline - time.monotonic(), POLL_S))
        named = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
        path = named.get("hidden_states_path") if isinstance(named, dict) else None
        if not isinstance(path, str):
            raise UserError(f"{url}: the answer names no file of hidden states: start the server with "
                            f"{self.service.start_options}")
        self._folder = self.service.folder or Path(path).parent
        return self._folder / Path(path).name

    def _take(self, path: Path, ids: Sequence[int], deadline: float) -> Tensor:
        """The features `[T, F]` in the file, once it is whole; the file is then gone."""
        with self._lock:
            if path.name in self._taken:
                raise RunFailure(f"{path}: the server named this file a second time, so it holds another document's features")
            self._taken.append(path.name)
        found = wait_for(path, deadline)
        service = self.service
        values_TLD, token_ids = found.get("hidden_states"), found.get("token_ids")
        if values_TLD is None or token_ids is None or token_ids.tolist() != list(ids):
            raise RunFailure(f"{path}: holds the features of other tokens than were asked for: the server, or what lies between, "
                             "mixes up requests")
        expected = (len(ids), len(service.layer_ids), service.hidden_size)
        if tuple(values_TLD.shape) != expected or values_TLD.dtype != service.dtype:
            raise UserError(f"{path}: holds {values_TLD.dtype} values of shape {list(values_TLD.shape)}, must be {service.dtype} "
                            f"of {list(expected)} (tokens, captured layers, width): start the server with "
                            f"{service.start_options}")
        remove(path)
        return values_TLD.flatten(1)

    def _remove_lost(self) -> None:
        """What answers that never came have written all the same."""
        with self._lock:
            lost = tuple(self._lost)
        if lost and self._folder:  # one look at the folder: a server that was away for a while has lost thousands
            for path in self._folder.glob("*.safetensors"):
                if any(name in path.name for name in lost):
                    remove(path)


def wait_for(path: Path, deadline: float) -> dict[str, Tensor]:
    """The tensors of a safetensors file that another process may still be writing.

    Where there is a lock file, its lock must be free; a file without one (locking off) is whole when its length is what its
    header says. Raises RunFailure after `deadline` (monotonic), Unreachable where the writer has died.
    """
    abandoned: float | None = None  # since when the lock is free and there is no file
    while True:
        free, what = lock_is_free(path), "is still being written"
        if free is not False:
            try:
                return load_file(path)
            except FileNotFoundError:
                what = "did not appear"
            except (SafetensorError, OSError) as error:
                what = f"did not become whole ({error})"
        abandoned = (abandoned or time.monotonic()) if free and not path.exists() else None
        if abandoned is not None and time.monotonic() - abandoned > ABANDONED_S:
            raise Unreachable(f"{path}: was promised, and the server's writer let go of its lock without it")
        if time.monotonic() > deadline:
            raise RunFailure(f"{path}: {what} within placement.timeout_s: check that features.server_folder is the folder that "
                             "the server writes to (shared_storage_path), and the server's log")
        time.sleep(POLL_S)


def lock_is_free(path: Path) -> bool | None:
    """Whether nobody holds the lock of a file; None where it has none."""
    try:
        with path.with_name(f"{path.name}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return False


def remove(path: Path) -> None:
    """The file and its lock are gone. Raises UserError where they cannot be removed: each would stay, and the disk fill up."""
    for one in (path, path.with_name(f"{path.name}.lock")):
        try:
            one.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{one}: cannot be removed after reading ({error.strerror}): let this user write to the "
                            "folder") from error

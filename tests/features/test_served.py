"""Features from a served target are the local ones; what server or network do wrong is mended or named, never learned."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from hidden_states_double import HiddenStatesServer, hidden_states_server
from toys import random_rows

from outrider.config import FeaturesConfig
from outrider.errors import RunFailure, UserError
from outrider.features.calls import call_json
from outrider.features.capture import FeatureSource, capture, one_row
from outrider.features.served import ServedCapture, Service
from outrider.features.source import Order, Provenance, open_served
from outrider.features.target import Target

CPU = torch.device("cpu")
IDS = (1, 2, 4)
ROWS = random_rows([[20, 9, 1], [30], []], length=40, seed=1)
ToyFolder = Callable[..., Path]


@pytest.fixture
def double(toy_target: Callable[..., Target], tmp_path: Path) -> HiddenStatesServer:
    (tmp_path / "shared").mkdir()
    return HiddenStatesServer(toy_target("llama"), tmp_path / "shared", tuple(i + 1 for i in IDS))


@pytest.fixture
def url(double: HiddenStatesServer) -> Iterator[str]:
    with hidden_states_server(double) as address:
        yield address


def served(double: HiddenStatesServer, url: str, *, timeout_s: float = 20.0, requests: int = 2) -> ServedCapture:
    return ServedCapture(Service(url, double.folder, requests, timeout_s, IDS, 32, torch.float32, pinned=False))


def opened(folder: Path, double: HiddenStatesServer, url: str, tmp_path: Path, **settings: Any) -> FeatureSource:
    order = Order(str(folder), "float32", "cpu", IDS, last_layer=None)
    features = FeaturesConfig(server=url, server_folder=double.folder, **settings)
    provenance = Provenance("target", "rows", 3, tmp_path / "features")
    return open_served(order, features, one_row(ROWS, 0), provenance, timeout_s=5.0, checks=True)


def truth(double: HiddenStatesServer) -> torch.Tensor:
    return capture(double.target, ROWS, IDS).values_BSF


@pytest.mark.parametrize("locks", [True, False])
def test_the_same_features_as_here_and_nothing_is_left_behind(double: HiddenStatesServer, url: str, locks: bool) -> None:
    double.locks, double.write_s = locks, 0.05
    found = served(double, url)(ROWS).values_BSF
    torch.testing.assert_close(found, truth(double), rtol=1e-5, atol=1e-5)  # documents here are run side by side, there alone
    assert sorted(map(len, double.asked)) == [1, 9, 20, 30], "each document once, none for padding"
    assert list(double.folder.iterdir()) == []


def test_back_pressure(double: HiddenStatesServer, url: str) -> None:
    rows = random_rows([[3] * 10], length=40, seed=2)
    double.write_s = 0.03
    served(double, url, requests=3)(rows)
    assert len(double.asked) == 10
    assert 2 <= double.most_at_once <= 3
    assert double.most_files <= 3


def test_lost_answers_are_asked_for_again_and_learned_once(double: HiddenStatesServer, url: str) -> None:
    """The second answer breaks off and the third is refused, both after the features were written."""
    double.fault = lambda number, tokens: {2: None, 3: (503, {"error": "busy"})}.get(number, "serve")
    capturing = served(double, url)
    found = capturing(ROWS).values_BSF
    torch.testing.assert_close(found, truth(double), rtol=1e-5, atol=1e-5)
    assert len(double.asked) == 6
    capturing(ROWS)
    assert list(double.folder.iterdir()) == [], "what the lost answers wrote is gone too"


def test_many_lost_answers_cost_one_look_at_the_folder(
    double: HiddenStatesServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.fault = lambda number, tokens: (503, {"error": "starting"}) if number <= 20 else "serve"
    capturing = served(double, url)
    capturing(ROWS)
    looks: list[str] = []
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: (looks.append(pattern), glob(folder, pattern))[1])
    capturing(ROWS)
    assert len(looks) == 4 + 1, "the double itself looks once a document"
    assert list(double.folder.iterdir()) == []


def test_nothing_grows_and_no_thread_stays(double: HiddenStatesServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run of a million documents neither the names of all files are kept, nor threads once a row is done."""
    monkeypatch.setattr("outrider.features.served.REMEMBERED", 6)
    capturing = served(double, url)
    double.fault = lambda number, tokens: (503, {"error": "busy"}) if number % 2 else "serve"
    for _ in range(3):
        capturing(ROWS)
    assert (len(capturing._taken), len(capturing._lost)) == (6, 6), "of 12 and 12"
    deadline = time.monotonic() + 5
    while (left := [t for t in threading.enumerate() if t.name.startswith("served")]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_a_writer_that_dies_is_noticed(double: HiddenStatesServer, url: str) -> None:
    double.dies_writing = True
    torch.testing.assert_close(served(double, url)(ROWS).values_BSF, truth(double), rtol=1e-5, atol=1e-5)
    assert len(double.asked) == 5


def test_a_server_that_restarts_is_waited_for(double: HiddenStatesServer, capsys: pytest.CaptureFixture[str]) -> None:
    with hidden_states_server(double) as address:
        capturing = served(double, address)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(capturing(ROWS).values_BSF))
    thread.start()
    time.sleep(2.0)
    assert not found
    with hidden_states_server(double, int(address.rpartition(":")[2])):
        thread.join(20)
    torch.testing.assert_close(found[0], truth(double), rtol=1e-5, atol=1e-5)
    said = capsys.readouterr().err
    assert "asking again" in said
    assert "answers again" in said


def test_a_server_that_stays_away_ends_the_run(double: HiddenStatesServer) -> None:
    with hidden_states_server(double) as address:
        capturing = served(double, address, timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(RunFailure, match=r"cannot be reached or broke off .* \(asked again for placement\.timeout_s = 0 s\)"):
        capturing(ROWS)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(("change", "kind", "sentence"), [
    ({"wrong_tokens": True}, RunFailure, "holds the features of other tokens than were asked for"),
    ({"same_name": True}, RunFailure, "named this file a second time|holds the features of other tokens"),
    ({"write_s": 4.0}, RunFailure, "is still being written within placement.timeout_s"),
    ({"layers": (2, 3)}, UserError, r"of shape \[\d+, 2, 32\], must be torch.float32 of \[\d+, 3, 32\] .*: start the server"),
    ({"fault": lambda number, tokens: (200, {"choices": []})}, UserError, r"names no file of hidden states: start the server "
     r"with --dtype float32 .*\[2, 3, 5\].*ExampleHiddenStatesConnector"),
    ({"fault": lambda number, tokens: (400, {"message": "too long"})}, UserError, "refused with status 400: .*too long"),
])
def test_what_a_server_does_wrong_is_named(
    double: HiddenStatesServer, url: str, change: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    for name, value in change.items():
        setattr(double, name, value)
    with pytest.raises(kind, match=sentence):
        served(double, url, timeout_s=1.0, requests=1)(ROWS)


def test_a_run_with_another_target_in_the_server_does_not_begin(
    toy_folder: ToyFolder, toy_target: Callable[..., Target], double: HiddenStatesServer, url: str, tmp_path: Path
) -> None:
    """Or with layer ids that are off by one: the target's logits must come out of what the server gives."""
    source = opened(toy_folder("llama"), double, url, tmp_path)
    assert source.elsewhere
    assert len(source.target.layers) == 0, "only its ends are loaded"
    torch.testing.assert_close(source.features(ROWS, CPU).values_BSF, truth(double), rtol=1e-5, atol=1e-5)
    double.layers = IDS
    for check, layer in (("all", 1), ("first", 1)):
        with pytest.raises(UserError, match=f"features.server = .*capture of layer {layer}: .* agree .*: does it serve"):
            opened(toy_folder("llama"), double, url, tmp_path, server_check=check)
    double.layers = (2, 3, 4)
    with pytest.raises(UserError, match="capture of layer 4"):
        opened(toy_folder("llama"), double, url, tmp_path)
    opened(toy_folder("llama"), double, url, tmp_path, server_check="first")  # looks no further, as it says
    double.layers, double.target = tuple(i + 1 for i in IDS), toy_target("llama", seed=1)
    with pytest.raises(UserError, match="capture of layer 1"):
        opened(toy_folder("llama"), double, url, tmp_path)


def test_kept_features_are_asked_for_once(toy_folder: ToyFolder, double: HiddenStatesServer, url: str, tmp_path: Path) -> None:
    source = opened(toy_folder("llama"), double, url, tmp_path, keep="disk")
    source.features(ROWS, CPU)
    count = len(double.asked)
    torch.testing.assert_close(source.features(ROWS, CPU).values_BSF, truth(double), rtol=1e-5, atol=1e-5)
    assert len(double.asked) == count


def test_settings_that_the_server_decides(toy_folder: ToyFolder, double: HiddenStatesServer, url: str, tmp_path: Path) -> None:
    for change in ({"documents": "packed"}, {"precision": "fp8"}):
        with pytest.raises(UserError, match="the server decides how it runs"):
            opened(toy_folder("llama"), double, url, tmp_path, **change)


PAGE = b"""<!DOCTYPE HTML>
<html lang="en"><head><style>body {}</style><title>Error &amp; response</title></head>
<body><h1>Error response</h1><p>Error code: 404</p></body></html>"""


@pytest.mark.parametrize(("status", "said"), [
    (404, "refused with status 404 and a web page ('Error & response'): no inference server answers there"),
    (200, "answered with a web page ('Error & response'): no inference server answers there"),
])
def test_a_web_page_is_told_in_one_sentence(status: int, said: str) -> None:
    class Web(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, *said: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        try:
            with pytest.raises(UserError) as refusal:
                call_json(f"{address}/v1/models", None, timeout_s=5.0)
        finally:
            server.shutdown()
    assert str(refusal.value) == f"{address}/v1/models: {said}, or a proxy does for it: check host and port"


def test_a_server_that_is_away_at_the_start_is_refused_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port, before = unused.getsockname()[1], time.monotonic()
        service = Service(f"http://127.0.0.1:{port}", None, 1, 60.0, IDS, 32, torch.float32, pinned=False)
        with pytest.raises(UserError, match="cannot be reached"):
            ServedCapture(service)
    assert time.monotonic() - before < 10


def test_what_is_no_vllm_server(double: HiddenStatesServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.features.served.call_json", lambda *given, **named: {})
    with pytest.raises(UserError, match="names no model"):
        served(double, url)

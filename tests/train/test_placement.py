"""Where the target runs changes when features come, never what is learned; failures name their rows and lane."""

import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from learning import CPU, LOGITS_BYTES, make_drafter, make_learner, random_micro_batch
from overlap import overlap_ms
from torch import Tensor
from toys import random_rows, toy_shape

from outrider.config import PlacementConfig
from outrider.errors import UserError
from outrider.features.capture import FeatureSource
from outrider.features.source import capture_in
from outrider.features.spread import SpreadCapture, shares_of
from outrider.features.target import Stretch, Target, load_target
from outrider.records import Features, TokenRows
from outrider.train.lanes import Span, ThreadLane, Trace
from outrider.train.meter import Stopwatch
from outrider.train.placement import Devices, Relay, Turns, find_devices, open_relay, open_turns
from outrider.train.processes import Place
from outrider.train.step import MicroBatch, run_step

ToyTarget = Callable[..., Target]
ToyFolder = Callable[..., Path]
FIRST = Place(rank=0, count=1, local_rank=0)
PIECE_S = 0.05


def relay_of(folder: Path, cards: int, *, copies: bool) -> Relay:
    """Colocated for 0 cards, else that many threads with a target each; `copies`: features cross as between GPUs."""
    targets = [load_target(str(folder), dtype="float32", device="cpu", last_layer=4, head=False) for _ in range(max(cards, 1))]
    sources = [FeatureSource(target, toy_shape().target_layer_ids, keep="no") for target in targets]
    relay = open_relay(sources, Devices(CPU, (CPU,) * cards), PlacementConfig(), meeting="test", trace=None)
    if copies:
        relay._copying = ThreadLane("copy", CPU, None)
    return relay


def learned(target: Target, relay: Relay, batches: list[MicroBatch], *, accumulation: int) -> list[Tensor]:
    """The parameters after the micro-batches, `accumulation` a step."""
    learner = make_learner(make_drafter(toy_shape()), target)
    for first in range(0, len(batches), accumulation):
        coming = [batch.host_rows for batch in batches[first + accumulation :][: relay.ahead]]
        run_step(learner, relay, batches[first : first + accumulation], coming, clip_norm=1.0, logits_bytes=LOGITS_BYTES,
                 watch=Stopwatch())
    return [parameter.detach() for parameter in learner.road.drafter.parameters()]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_pairs_and_fan_ins_learn_the_same_bits(toy_target: ToyTarget, toy_folder: ToyFolder, accumulation: int) -> None:
    target, folder = toy_target("llama"), toy_folder("llama")
    batches = [random_micro_batch([[9 + i], [3, i]], seed=i) for i in range(12)]
    expected = learned(target, relay_of(folder, 0, copies=False), batches, accumulation=accumulation)
    for cards, copies in ((1, False), (1, True), (3, True)):
        found = learned(target, relay_of(folder, cards, copies=copies), batches, accumulation=accumulation)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), (cards, copies)


class SlowSource(FeatureSource):
    """Takes PIECE_S for each capture, and fails or stalls at the rows it is told to."""

    def __init__(self, target: Target, *, raises_at: int = -1, stalls_at: int = -1) -> None:
        super().__init__(target, toy_shape().target_layer_ids, keep="no")
        self.raises_at, self.stalls_at = raises_at, stalls_at
        self.alive: list[weakref.ref[Tensor]] = []
        self.most_alive = 0

    def features(self, rows: TokenRows, device: torch.device) -> Features:
        row = int(rows.row_ids_B[0])
        if row == self.raises_at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        time.sleep(3 if row == self.stalls_at else PIECE_S)
        made = Features(torch.full((1, 4, 6), float(row)))
        self.alive = [ref for ref in self.alive if ref() is not None] + [weakref.ref(made.values_BSF)]
        self.most_alive = max(self.most_alive, len(self.alive))
        return made


def numbered_rows(count: int) -> list[TokenRows]:
    return [replace(random_rows([[8]], length=8, seed=i), row_ids_B=torch.tensor([i])) for i in range(count)]


def drive(relay: Relay, rows: list[TokenRows], *, learn_s: float = PIECE_S) -> list[float]:
    """Take all rows' features as a step does, learning each for `learn_s`; gives the value in each."""
    seen = []
    for i, present in enumerate(rows):
        features = relay.features(present)
        time.sleep(learn_s)
        seen.append(float(features.values_BSF.mean()))
        relay.expect(rows[i + 1 :][: relay.ahead])
    return seen


def slow_relay(sources: list[SlowSource], trace: Trace | None, *, turns: Turns | None = None, timeout_s: int = 60) -> Relay:
    devices = Devices(CPU, (CPU,) * len(sources))
    relay = open_relay(sources, devices, PlacementConfig(timeout_s=timeout_s), meeting="test", trace=trace)
    relay._copying = ThreadLane("copy", CPU, trace)
    relay.turns = turns or relay.turns
    return relay


def test_the_next_row_is_captured_while_this_one_is_learned(toy_target: ToyTarget) -> None:
    """The time line proves it: 8 rows, each 50 ms of capture and 50 ms of learning."""
    target, rows = toy_target("llama"), numbered_rows(8)
    trace = Trace([CPU])
    assert drive(slow_relay([SlowSource(target)], trace), rows) == list(range(8))
    spans = trace.spans()
    assert sum(span.label == "capture" for span in spans) == 8
    assert sum(span.label == "learn" for span in spans) == 8
    assert overlap_ms(spans, "capture", "learn") > 0.7 * 7 * 1e3 * PIECE_S
    assert overlap_ms([s for s in spans if s.lane == "capture 0"], "capture", "capture") < 8.5 * 1e3 * PIECE_S, "only with itself"
    colocated = Trace([CPU])
    relay = open_relay([SlowSource(target)], Devices(CPU, ()), PlacementConfig(), meeting="test", trace=colocated)
    assert drive(relay, rows) == list(range(8))
    assert overlap_ms(colocated.spans(), "capture", "learn") == 0.0


def test_several_cards_take_rows_in_turn_and_hold_one_row_each(toy_target: ToyTarget) -> None:
    target, trace = toy_target("llama"), Trace([CPU])
    sources = [SlowSource(target) for _ in range(3)]
    assert drive(slow_relay(sources, trace), numbered_rows(12), learn_s=0.002) == list(range(12))
    lanes = {lane: sum(s.lane == lane for s in trace.spans()) for lane in ("capture 0", "capture 1", "capture 2")}
    assert set(lanes.values()) == {4}
    assert overlap_ms([s for s in trace.spans() if s.lane == "capture 0"], "capture", "capture") > 0
    assert max(source.most_alive for source in sources) <= 2, "the one being made, and the one that is leaving"


def test_one_at_a_time_is_one_at_a_time(toy_target: ToyTarget, tmp_path: Path) -> None:
    """Two relays that share a turn, as two processes of a machine do; overlapped ones do run at once."""
    target = toy_target("llama")

    def captures(turns: Turns) -> list[Span]:
        trace = Trace([CPU])
        relays = [slow_relay([SlowSource(target)], trace, turns=turns) for _ in range(2)]
        for number, relay in enumerate(relays):
            relay._chains[0].lane.name = f"capture of {number}"
        threads = [threading.Thread(target=drive, args=(relay, numbered_rows(5)), kwargs={"learn_s": 0.0}) for relay in relays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return trace.spans()

    def overlap_of_processes(spans: list[Span]) -> float:
        first, second = ([replace(s, label=s.lane) for s in spans if s.lane == f"capture of {n}"] for n in range(2))
        return overlap_ms([*first, *second], "capture of 0", "capture of 1")

    assert overlap_of_processes(captures(Turns(tmp_path / "turn", timeout_s=60))) == 0.0
    assert overlap_of_processes(captures(Turns(None, timeout_s=60))) > 1e3 * PIECE_S
    own, other = (open_turns(PlacementConfig(turns="one_at_a_time"), meeting)._lock for meeting in "ab")
    assert own != other


def test_a_capture_that_raises_is_the_first_thing_said(toy_target: ToyTarget) -> None:
    relay = slow_relay([SlowSource(toy_target("llama"), raises_at=3)], None)
    with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access was encountered \(features of rows \[3\], by "
                       r"capture 0"):
        drive(relay, numbered_rows(6), learn_s=0.0)


def test_features_that_never_come_are_given_up(toy_target: ToyTarget) -> None:
    relay = slow_relay([SlowSource(toy_target("llama"), stalls_at=2)], None, timeout_s=1)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^features of rows \[2\] did not come within .* 1 s: still at work: capture 0 "
                       r"and then copy$"):
        drive(relay, numbered_rows(6), learn_s=0.0)
    assert time.monotonic() - began < 2.5


@pytest.mark.parametrize(("name", "settings", "place", "sentence"), [
    ("cuda:99", {}, FIRST, r"needs 1 CUDA device\(s\) from number 99 on, and \d+ CUDA devices were found"),
    ("cuda", {"capture_cards": 60}, Place(1, 2, 1), r"needs 61 CUDA device\(s\) from number 61 on"),
    ("cuda", {"capture_cards": 4, "cards_per_target": 2}, FIRST, r"needs 5 CUDA device\(s\) from number 0 on"),
    ("cuda:1", {}, Place(0, 2, 0), r"names one card, and 2 processes need one each: use 'cuda'"),
])
def test_devices_that_are_not_there(name: str, settings: dict[str, int], place: Place, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        find_devices(name, PlacementConfig(**settings), place)


@pytest.mark.parametrize(("name", "cards", "place", "expected"), [
    ("cpu", 0, FIRST, ("cpu", [])), ("cpu", 2, FIRST, ("cpu", ["cpu", "cpu"])),
    ("cuda", 0, Place(3, 4, 3), ("cuda:3", [])), ("cuda", 1, Place(1, 2, 1), ("cuda:2", ["cuda:3"])),
    ("cuda:5", 2, FIRST, ("cuda:5", ["cuda:6", "cuda:7"])),
    ("cuda", 3, Place(4, 8, 0), ("cuda:0", ["cuda:1", "cuda:2", "cuda:3"])),
])
def test_each_process_of_a_machine_takes_the_next_cards(
    monkeypatch: pytest.MonkeyPatch, name: str, cards: int, place: Place, expected: tuple[str, list[str]]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    devices = find_devices(name, PlacementConfig(capture_cards=cards, cards_per_target=max(cards, 1)), place)
    assert [list(map(str, target)) for target in devices.targets] == [expected[1] or [expected[0]]]
    assert (str(devices.learn), [str(device) for device in devices.capture]) == expected


# A target that is spread over several devices


def spread_relay(folder: Path, cuts: tuple[int, ...], *, targets: int, trace: Trace | None, documents: str = "apart") -> Relay:
    """`targets` of them, each on as many threads as it has shares."""
    bounds = (0, *cuts, 5)
    stretches = [Stretch(CPU, range(a, b)) for a, b in pairwise(bounds)]
    ids = toy_shape().target_layer_ids
    sources = []
    for _ in range(targets):
        target = load_target(str(folder), dtype="float32", device=stretches, last_layer=4, head=False)
        shares = shares_of(target, stretches, ids)
        run = SpreadCapture(target, shares, [capture_in(documents, share, share.layer_ids) for share in shares])
        sources.append(FeatureSource(target, ids, keep="no", run=run))
    devices = Devices(CPU, (CPU,) * len(stretches) * targets, len(stretches))
    return open_relay(sources, devices, PlacementConfig(timeout_s=2), meeting="test", trace=trace)


@pytest.mark.parametrize("documents", ["apart", "packed"])
def test_spread_targets_learn_the_same_bits(toy_target: ToyTarget, toy_folder: ToyFolder, documents: str) -> None:
    """Cuts beside and after captured layers, one target and two in turn, all rows in flight at once."""
    target, folder = toy_target("qwen3_5"), toy_folder("qwen3_5")
    batches = [random_micro_batch([[9 + i], [3, i]], seed=i) for i in range(12)]
    whole = spread_relay(folder, (), targets=1, trace=None, documents=documents)
    expected = learned(target, whole, batches, accumulation=3)
    for cuts, targets in (((2,), 1), ((1, 3), 1), ((3,), 2)):
        relay = spread_relay(folder, cuts, targets=targets, trace=None, documents=documents)
        assert relay.ahead == 2 * targets * (len(cuts) + 1)
        found = learned(target, relay, batches, accumulation=3)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), (cuts, targets)


def slowed(relay: Relay, doing: Callable[[int, TokenRows], None]) -> Relay:
    """Each share of the relay's first target does this before its work."""
    spread = relay.sources[0].run
    assert isinstance(spread, SpreadCapture)
    run = spread.run

    def slow(number: int, rows: TokenRows, hidden_BSD: Tensor | None) -> Tensor:
        doing(number, rows)
        return run(number, rows, hidden_BSD)

    spread.run = slow  # type: ignore[method-assign]
    return relay


def test_shares_work_on_several_rows_at_once(toy_folder: ToyFolder) -> None:
    """The time line proves it: while the second half of the layers has a row, the first half has the next one."""
    trace, rows = Trace([CPU]), numbered_rows(8)
    relay = slowed(spread_relay(toy_folder("llama"), (2,), targets=1, trace=trace), lambda number, rows: time.sleep(PIECE_S))
    drive(relay, rows, learn_s=0.0)
    spans = trace.spans()
    by_lane = {lane: [replace(s, label=lane) for s in spans if s.lane == lane] for lane in ("capture 0.0", "capture 0.1")}
    assert [len(found) for found in by_lane.values()] == [8, 8]
    assert sum(s.label == "cross" for s in spans) == sum(s.label == "copy" for s in spans) == 8
    assert overlap_ms([*by_lane["capture 0.0"], *by_lane["capture 0.1"]], "capture 0.0", "capture 0.1") > 0.6 * 7e3 * PIECE_S
    crossed = [s for s in spans if s.label == "cross"]
    for first, between, second in zip(by_lane["capture 0.0"], crossed, by_lane["capture 0.1"], strict=True):
        assert first.end <= between.begin <= between.end <= second.begin


def test_a_share_that_fails_or_stalls_is_named(toy_folder: ToyFolder) -> None:
    def fail(number: int, rows: TokenRows) -> None:
        if number == 1 and int(rows.row_ids_B[0]) == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access .* \(features of rows \[3\], by capture 0\.0 "
                       r"and then cross 0\.1 and then capture 0\.1"):
        drive(slowed(spread_relay(toy_folder("llama"), (2,), targets=1, trace=None), fail), numbered_rows(8), learn_s=0.0)

    def stall(number: int, rows: TokenRows) -> None:
        time.sleep(4.0 if number == 1 and int(rows.row_ids_B[0]) == 2 else 0.0)

    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^features of rows \[2\] did not come within .* 2 s: still at work: capture 0\.1 and "
                       r"then copy$"):
        drive(slowed(spread_relay(toy_folder("llama"), (2,), targets=1, trace=None), stall), numbered_rows(8), learn_s=0.0)
    assert time.monotonic() - began < 3.5


def test_stuck_work_keeps_no_process_alive() -> None:
    """A process that gave up a capture ends, though the capture never does."""
    code = ("import time, torch; from outrider.train.lanes import ThreadLane; "
            "ThreadLane('capture 0', torch.device('cpu'), None).launch('capture', lambda: time.sleep(600), [])")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0

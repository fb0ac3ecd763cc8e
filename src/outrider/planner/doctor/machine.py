"""Takes this machine, and what a run asks of it or nothing, gives findings: what is there, sound or not, and what that means.

Nothing is changed here but that the autotuner's lock is put on this process, as training does. What needs other rooms (the fused
attention's self-test, the host's memory) is handed in.
"""

import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import torch
from packaging.requirements import Requirement

from outrider.data.info import ROWS_FILE, read_info
from outrider.errors import UserError
from outrider.features import guards
from outrider.features.eight_bit import LEAST_CAPABILITY
from outrider.planner.doctor.causes import Finding, gib
from outrider.planner.doctor.readings import ask_driver, card_memory, card_processes, versions
from outrider.planner.doctor.record import CardProcess
from outrider.planner.gpus import Gpu, found_gpus
from outrider.planner.job import Job
from outrider.planner.ledger import DeviceLedger, ledger_of
from outrider.planner.lines import Role
from outrider.planner.plan import nearest_that_fits

CHECKED = ("outrider", "torch", "transformers", "flash-linear-attention")  # whose stated requirements are looked at
LEAST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}  # for any release of that CUDA, by NVIDIA's compatibility table
FOREIGN = 2**30  # bytes of others on a card, below which a monitor or a desktop is not worth a word
FREE_DISK = 2 * 2**30  # kernels, logs and a small checkpoint, where no run says more
WITHOUT_GPU = ("what can be done here: respond, prepare, export, report, doctor --record and --log; plan with --gpus; train and "
               "evaluate with device cpu, at toy sizes")


@dataclass(frozen=True)
class Asked:
    """What a run asks of the machine: its job, the roles of the device that learns, its target, its rows and held-out prompts,
    where it writes and how much stands on that disk at once, its cache of kernels, and whether it is to learn on CUDA and with
    fused attention."""

    job: Job
    roles: tuple[Role, ...]
    target: str
    rows: Path
    heldout: Path | None
    folder: Path
    disk_bytes: int
    kernel_cache: Path | None
    cuda: bool
    fused: bool
    linear: bool


def look_at(asked: Asked | None, *, self_test: Callable[[], str], host_free: int, host_needed: int) -> list[Finding]:
    """All findings, in the order in which they matter. `self_test` says what it found or raises UserError; `host_free` and
    `host_needed`: bytes of the host's memory."""
    cards = range(torch.cuda.device_count())
    found = [_gpus(asked), _driver(), *_versions(), _attention(asked, self_test), _kernels(asked), _autotuner(), _cache(asked)]
    for i in cards:
        device = torch.device("cuda", i)
        found.append(card_finding(i, *card_memory(device), card_processes(device)))
    if asked is not None and cards:
        fp8 = torch.cuda.get_device_capability(0) >= LEAST_CAPABILITY
        found.append(fits(asked, *card_memory(torch.device("cuda", 0)), fp8=fp8))
    if asked is not None:
        found += [target_finding(asked.target), rows_finding(asked)]
    return [*found, _host(host_free, host_needed), disk_finding(asked)]


def _gpus(asked: Asked | None) -> Finding:
    count = torch.cuda.device_count()
    if not count:
        seen = ask_driver("--query-gpu=name,memory.total")
        if seen:
            why = "this torch was built without CUDA" if torch.version.cuda is None else "CUDA does not start (see the driver)"
            return Finding("gpu", False, f"the driver sees {len(seen)} card(s), torch none: {why}: install torch's CUDA build, "
                           "or look at CUDA_VISIBLE_DEVICES")
        needed = asked is not None and asked.cuda
        return Finding("gpu", not needed, f"no CUDA device here{', and the run asks for one' if needed else ''}; {WITHOUT_GPU}")
    try:
        cards = found_gpus()
    except UserError as error:
        return Finding("gpu", None, f"{count} card(s); plans need a known kind: {error}")
    names = ", ".join(f"{gpu.name} ({gib(gpu.usable_bytes)}, compute capability {_capability(i)})" for i, gpu in enumerate(cards))
    return Finding("gpu", True, f"{names}{_eight_bit(cards)}")


def _capability(index: int) -> str:
    return ".".join(map(str, torch.cuda.get_device_capability(index)))


def _eight_bit(cards: Sequence[Gpu]) -> str:
    return "" if all(gpu.fp8 for gpu in cards) else "; no 8-bit products: features.precision = fp8 is refused"


def _driver() -> Finding:
    rows = ask_driver("--query-gpu=driver_version,name")
    return driver_finding(rows[0].split(",")[0].strip() if rows else None, torch.version.cuda)


def driver_finding(driver: str | None, cuda: str | None) -> Finding:
    """Is the driver new enough for the CUDA that torch was built with?"""
    if cuda is None:
        return Finding("driver", None, f"this torch ({torch.__version__}) has no CUDA: it computes on the CPU alone")
    if driver is None:
        return Finding("driver", None, f"nvidia-smi does not answer; torch was built with CUDA {cuda}")
    have = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
    least = LEAST_DRIVER.get(int(cuda.split(".")[0]))
    if least is not None and have < least:
        return Finding("driver", False, f"{driver} is too old for torch's CUDA {cuda}, which needs {least[0]}.{least[1]} or "
                       "newer: update the driver, or install torch for an older CUDA")
    return Finding("driver", True, f"{driver}, enough for torch's CUDA {cuda}")


def _versions() -> list[Finding]:
    here = versions()
    stated: dict[str, list[str]] = {}
    for name in CHECKED:
        try:
            stated[name] = requires(name) or []
        except PackageNotFoundError:
            stated[name] = []
    return version_findings(here, stated, cuda=torch.cuda.is_available())


def version_findings(here: dict[str, str | None], stated: dict[str, list[str]], *, cuda: bool) -> list[Finding]:
    """Each package that decides what runs, held against what the others state that they need. `stated`: requirements as their
    metadata has them, by package."""
    found = []
    for name, version in here.items():
        if name in ("python", "cuda"):
            continue
        wrong = []
        for other, lines in stated.items():
            for need in map(Requirement, lines):
                applies = need.marker is None or need.marker.evaluate({"extra": ""})
                if need.name.lower() == name and applies and version and not need.specifier.contains(version, prereleases=True):
                    wrong.append(f"{other} {here.get(other)} needs {name}{need.specifier}")
        if wrong:
            found.append(Finding(name, False, f"{version}: {' and '.join(wrong)}: install versions that agree"))
        elif version is None:
            found.append(Finding(name, *_missing(name, cuda=cuda)))
        else:
            found.append(Finding(name, True, version))
    return found


def _missing(name: str, *, cuda: bool) -> tuple[bool | None, str]:
    if name == "triton":
        return (False, "not installed: torch.compile has no kernels on this GPU, so no fused attention: install torch's own "
                "triton") if cuda else (None, "not installed, and not needed without a GPU")
    if name == "flash-linear-attention":
        return None, "not installed: needed on a GPU for targets with linear attention layers, which else run many times slower"
    return (None, "run from its source, not installed") if name == "outrider" else (False, "not installed")


def _attention(asked: Asked | None, self_test: Callable[[], str]) -> Finding:
    if not torch.cuda.is_available():
        return Finding("fused attention", None, "needs a CUDA device; here train.attention = dense, the reference, is used")
    if asked is not None and not asked.fused:
        return Finding("fused attention", None, "not used by this run: train.attention = dense, whole tables of queries and keys")
    try:
        return Finding("fused attention", True, self_test())
    except UserError as error:
        return Finding("fused attention", False, str(error))


def _kernels(asked: Asked | None) -> Finding:
    fla = versions()["flash-linear-attention"]
    if asked is None:
        return Finding("target's kernels", None, "no run file, so no target to look at")
    if not asked.linear:
        return Finding("target's kernels", True, "attention layers alone: torch's own kernels")
    if fla is None and asked.cuda:
        return Finding("target's kernels", False, "its linear attention layers run on transformers' reference code, many times "
                       "slower: pip install flash-linear-attention")
    return Finding("target's kernels", True, f"linear attention layers: flash-linear-attention {fla}" if asked.cuda else
                   "linear attention layers: reference code, on a CPU")


def _autotuner() -> Finding:
    early = "fla" in sys.modules
    guards.lock_autotuner()
    try:
        from triton.runtime.autotuner import Autotuner  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return Finding("autotuner guard", None, "no Triton here, nothing to guard")
    if guards.MARK not in Autotuner.__dict__:
        return Finding("autotuner guard", False, "Triton's autotuner cannot be locked: two captures in one process may crash or "
                       "be tuned wrongly: use one capture card a process")
    late = "; flash-linear-attention was imported before it, its own classes are locked too" if early else ""
    return Finding("autotuner guard", True, f"Triton's autotuners take turns in this process{late}")


def _cache(asked: Asked | None) -> Finding:
    if not torch.cuda.is_available() and (asked is None or not asked.cuda):
        return Finding("kernel cache", None, "not used without a GPU")
    try:
        place = guards.kernel_cache_place(None if asked is None else asked.kernel_cache)
    except UserError as error:
        return Finding("kernel cache", False, str(error))
    return cache_finding(place)


def cache_finding(place: Path) -> Finding:
    """Is a folder of compiled kernels on a local disk, and are its entries whole?"""
    kind, damaged = guards.file_system_of(place), guards.damaged_entries(place)
    if kind in guards.NETWORK_FILE_SYSTEMS:
        return Finding("kernel cache", False, f"{place} lies on a network mount ({kind}), where Triton's files vanish or are "
                       "busy: set features.kernel_cache to a local folder")
    if damaged:
        return Finding("kernel cache", False, f"{place}: {len(damaged)} damaged entries, such as {damaged[0].name}, each crashes "
                       "its kernel: training removes them at its start, or remove them by hand")
    return Finding("kernel cache", True, f"{place}, {'no kernels yet' if not place.is_dir() else 'no damaged entry'}")


def card_finding(index: int, free: int, total: int, processes: Sequence[CardProcess]) -> Finding:
    """Free memory of a card, and who has the rest."""
    who = ", ".join(f"{item.name} (process {item.pid}, {gib(item.used_bytes) if item.used_bytes else 'size not told'})"
                    for item in processes)
    name, text = f"memory of card {index}", f"{gib(free)} of {gib(total)} free"
    if total - free < FOREIGN:
        return Finding(name, True, text)
    return Finding(name, False, f"{text}; used by {who or 'processes that the driver does not name (another container?)'}: a run "
                   "is planned for the whole card and may run out beside them")


def fits(asked: Asked, free: int, total: int, *, fp8: bool) -> Finding:
    """Does the run fit a card of `total` bytes, `free` of them now? `fp8`: it has 8-bit products."""
    ledger: DeviceLedger = ledger_of(asked.job, asked.roles)
    if ledger.peak_bytes <= total:
        ok = ledger.device_used_bytes <= free
        return Finding("the run's memory", ok, f"{gib(ledger.peak_bytes)} at the peak, {gib(ledger.device_used_bytes)} with gaps "
                       f"and libraries, of {gib(free)} free" + ("" if ok else ": it may run out"))
    nearest = nearest_that_fits(asked.job, total, fp8=fp8, ledger_of=lambda job: ledger_of(job, asked.roles))
    way = " ".join(f"--set {key}={value}" for key, value in nearest[0].items()) if nearest else "see outrider plan"
    return Finding("the run's memory", False, f"needs {gib(ledger.peak_bytes)} in '{ledger.peak_phase}', the card has "
                   f"{gib(total)}: {way}")


def target_finding(path: str) -> Finding:
    """Are the target's weights there? A plan needs its config alone, training the weights."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return Finding("target", None, f"{path}: no folder here: a hub id, fetched when it is loaded, or in the hub's cache")
    weights = list(folder.glob("*.safetensors"))
    if not weights:
        return Finding("target", False, f"{path}: holds no weights (*.safetensors): enough to plan, not to train")
    size = sum(file.stat().st_size for file in weights)
    return Finding("target", True, f"{path}: {gib(size)} of weights in {len(weights)} file{'s' * (len(weights) > 1)}")


def rows_finding(asked: Asked) -> Finding:
    """Are the prepared rows there, enough of them for a step, and the held-out prompts?"""
    try:
        info = read_info(asked.rows)
    except UserError as error:
        return Finding("data", False, str(error))
    needed = asked.job.rows * asked.job.accumulation
    if not (asked.rows / ROWS_FILE).is_file():
        return Finding("data", False, f"{asked.rows / ROWS_FILE}: the prepared rows are missing: prepare them again")
    if info["num_rows"] < needed:
        return Finding("data", False, f"{asked.rows}: {info['num_rows']} rows, a step takes {needed}: prepare more, or lower "
                       "train.accumulation")
    if asked.heldout is not None and not asked.heldout.is_file():
        return Finding("data", False, f"data.heldout = '{asked.heldout}': there is no such file: check the path")
    return Finding("data", True, f"{asked.rows}: {info['num_rows']:,} rows of {info['row_length']:,} tokens")


def _host(free: int, needed: int) -> Finding:
    what = f"{gib(free)} available" + (f", {gib(needed)} needed by this run" if needed else "")
    return Finding("host memory", free >= needed, what if free >= needed else f"{what}: free some, or give the job more")


def disk_finding(asked: Asked | None) -> Finding:
    """Room on the disk that the run writes to, or on that of the current folder."""
    folder = Path.cwd() if asked is None else asked.folder.resolve()
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free, needed = shutil.disk_usage(there).free, FREE_DISK if asked is None else asked.disk_bytes
    text = f"{gib(free)} free at {there}, {gib(needed)} {'wanted' if asked is None else 'needed for its checkpoints'}"
    return Finding("disk", free >= needed, text if free >= needed else f"{text}: free some, lower checkpoint.keep_last, or set "
                   "train.folder to another disk")

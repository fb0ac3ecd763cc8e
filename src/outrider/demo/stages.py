"""Takes named pieces of work with what they depend on, gives their results, reusing those that would come out the same."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import outrider
from outrider.files import digest, read_json, sha256_file, write_json
from outrider.progress import clock, say


def source_digest(rooms: Sequence[str]) -> str:
    """Digest of the source of the named rooms (or modules) and of the ground modules they all stand on."""
    package = Path(outrider.__file__).parent
    ground = [p for p in package.glob("*.py") if p.name != "progress.py"]
    files = sorted({*ground, *(f for room in rooms for f in (package / room).rglob("*.py"))})
    return digest({str(f.relative_to(package)): sha256_file(f) for f in files})


def path_digest(path: Path) -> str:
    """Digest of a file's bytes, or of every file below a folder."""
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    return digest({str(f.relative_to(path)): sha256_file(f) for f in files})


class Stages:
    """Runs stages in order and remembers each under `folder/stages/<name>.json`.

    A stage is reused when the digest of its ingredients (options, source of its rooms, inputs' bytes) is the same and its
    outputs are there unchanged. One that was interrupted goes on from what it left; anything else begins afresh, its old
    outputs removed. `seconds` holds what each took when it ran.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.seconds: dict[str, float] = {}
        self.reused: list[str] = []

    def run(
        self, name: str, work: Callable[[], dict[str, Any]], *, options: Mapping[str, Any], rooms: Sequence[str],
        inputs: Sequence[Path], outputs: Sequence[Path],
    ) -> dict[str, Any]:
        """The result of `work`, a JSON-able dictionary, run or remembered."""
        title = f"[{len(self.seconds) + 1}/{self.count}] {name}"
        path = self.folder / "stages" / f"{name}.json"
        key = digest({"options": dict(options), "source": source_digest(rooms), "inputs": [path_digest(p) for p in inputs]})
        record: dict[str, Any] = read_json(path, what="a stage's record") if path.exists() else {"key": None}
        same = record["key"] == key
        if same and record["result"] is not None and record["outputs"] == digests(outputs):
            say(f"{title}: unchanged, reused (took {clock(record['seconds'])} when it ran)")
            self.seconds[name] = record["seconds"]
            self.reused.append(name)
            return dict(record["result"])
        interrupted = same and record["result"] is None
        if not interrupted:
            for output in outputs:
                shutil.rmtree(output) if output.is_dir() else output.unlink(missing_ok=True)
            record = {"key": key, "result": None, "seconds": 0.0, "outputs": []}
            write_json(path, record)
        say(f"{title}: going on where it was interrupted" if interrupted else title)
        started = time.monotonic()
        result = work()
        self.seconds[name] = round(record["seconds"] + time.monotonic() - started, 1)
        write_json(path, {"key": key, "result": result, "seconds": self.seconds[name], "outputs": digests(outputs)})
        return result


def digests(outputs: Sequence[Path]) -> list[str | None]:
    """Digest of each output's content, None where it is not there."""
    return [path_digest(p) if p.exists() else None for p in outputs]

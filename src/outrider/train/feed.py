"""Takes a run and a step's number, gives this process's micro-batches of it and the rows that come next; learns nothing.

Which rows a step has follows from its number alone, whatever the number of processes: they are dealt out in turn. Where they
do not come out even, a process learns from an empty micro-batch: all of them must sum.
"""

from dataclasses import replace
from itertools import islice

from outrider.data.rows import RowError
from outrider.errors import RunFailure
from outrider.progress import say
from outrider.records import TokenRows
from outrider.train.start import Run
from outrider.train.step import MicroBatch, lay_out


def micro_batches(run: Run, step: int) -> list[MicroBatch]:
    """This process's micro-batches of the step. Raises RunFailure (see `_read`)."""
    made = []
    for micro in _dealt(run):
        rows = run.read.pop((step, micro), None) or _rows(run, step, micro)
        made.append(lay_out(rows, run.resolved, [epoch for epoch, _ in _places(run, step, micro)], run.device))
    return made


def rows_after(run: Run, step: int) -> list[TokenRows]:
    """The rows of this process's micro-batches after the step, as far ahead as its targets may run."""
    every = ((later, micro) for later in range(step + 1, run.steps) for micro in _dealt(run))
    coming = list(islice(every, run.relay.ahead))  # a long run has millions after this step
    for place in coming:
        if place not in run.read:
            run.read[place] = _rows(run, *place)
    return [run.read[place] for place in coming]


def agree_on_bad_rows(run: Run, *, before: tuple[int, ...]) -> None:
    """All processes leave out what any of them could not read since `before`, the last agreement."""
    found = run.position.bad_rows
    if run.processes.any(found != before):
        everyones = dict.fromkeys(row for rows in run.processes.gather(found) for row in rows)
        run.position = replace(run.position, bad_rows=tuple(everyones))
        _check_count(run, f"{len(everyones)} rows cannot be read any more")


def row_ids(run: Run, step: int) -> list[int]:
    """The numbers of the step's rows, those of all processes."""
    micros = range(run.resolved.config.train.accumulation)
    return [row for micro in micros for row in _numbers(run, _places(run, step, micro))]


def _dealt(run: Run) -> range:
    """The numbers of this process's micro-batches in each step, as many as in every other."""
    count = run.processes.count
    return range(run.processes.rank, -(-run.resolved.config.train.accumulation // count) * count, count)


def _places(run: Run, step: int, micro: int) -> list[tuple[int, int]]:
    """(epoch, place in its order) of each row: the epochs' permutations end to end."""
    settings = run.resolved.config.train
    first = (step * settings.accumulation + micro) * settings.rows_per_batch
    return [divmod(index, len(run.rows)) for index in range(first, first + settings.rows_per_batch)]


def _numbers(run: Run, places: list[tuple[int, int]]) -> list[int]:
    seed = run.resolved.config.train.seed
    orders = {epoch: run.rows.row_order(seed, epoch) for epoch, _ in places}
    return [orders[epoch][at] for epoch, at in places]


def _rows(run: Run, step: int, micro: int) -> TokenRows:
    places = _places(run, step, micro)
    if micro >= run.resolved.config.train.accumulation:
        no_row = len(run.rows)  # a number that no row has: what is kept of it must never stand for one
        return TokenRows.joined([run.rows.empty(no_row) for _ in places])
    return _read(run, _numbers(run, places))


def _read(run: Run, numbers: list[int]) -> TokenRows:
    """These rows; one that cannot be read any more is left out from here on: padding stands in its place. Raises RunFailure when
    there are more of them than `guards.max_bad_rows`."""
    try:
        parts = [run.rows.empty(row) if row in run.position.bad_rows else run.rows.batch([row]) for row in numbers]
        return TokenRows.joined(parts)
    except RowError as error:
        run.position = replace(run.position, bad_rows=(*run.position.bad_rows, error.row))
        _check_count(run, str(error))
        run.metrics.event(run.position.step + 1, "bad row", row=error.row, reason=str(error))
        say(f"left out from here on: {error}")
        return _read(run, numbers)


def _check_count(run: Run, what: str) -> None:
    most, count = run.resolved.config.guards.max_bad_rows, len(run.position.bad_rows)
    if count > most:
        raise RunFailure(f"{what} (guards.max_bad_rows = {most}: {count} rows are bad)")

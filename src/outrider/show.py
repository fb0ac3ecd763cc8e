"""Takes a verb's result, gives what a person reads of it; knows nothing of how it was made."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

PLAIN_WIDTH = 130  # columns where stdout is no terminal and has no width of its own


def wide_console() -> Console:
    """Stdout, with its own width on a terminal and a fixed one in a pipe or file."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def show_result(result: Mapping[str, Any]) -> None:
    """A result on stdout."""
    console = wide_console()
    for line in show_lines(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_lines(result: Mapping[str, Any], *, indent: int = 0) -> list[str]:
    """A result's values, one a line; nested dictionaries are indented."""
    lines = []
    for key, value in result.items():
        name = " " * indent + key.replace("_", " ")
        if isinstance(value, Mapping) and value:
            lines += [f"{name}:", *show_lines(value, indent=indent + 2)]
        elif key.split("_")[0] != "bytes" and "bytes" in key.split("_") and isinstance(value, int):
            lines.append(f"{name.replace(' bytes', '')}: {size(value)}")
        else:
            lines.append(f"{name}: {plain(value)}")
    return lines


def size(count: int) -> str:
    """Bytes in the unit in which a person reads them."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def plain(value: Any) -> str:
    """A value as a person reads it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.3g}" if abs(value) < 1 else f"{value:,.2f}"
        case list() | tuple():
            return ", ".join(plain(item) for item in value) or "none"
        case dict():
            return "none"
        case _:
            return str(value)


def show_evaluation(result: Mapping[str, Any]) -> None:
    """The accepted length, by slot and by kind, the walls of both sides, and whether the texts are the same."""
    console = wide_console()
    if result["acceptance_by_slot"]:
        slots = {"accepted, given all slots before": result["acceptance_by_slot"]}
        if "survival_by_slot" in result:
            slots["reached and accepted, of all forwards"] = result["survival_by_slot"]
        console.print(slot_table(slots))
    for title, header, rows in evaluation_tables(result):
        table = Table(title=title, title_justify="left", box=None, show_header=bool(header), pad_edge=False)
        for i, name in enumerate(header or ("", "")):
            table.add_column(name, justify="right" if header and i else "left")
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        console.print(table)


def evaluation_tables(result: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """All of an evaluation but the slots: (title, header, rows) a table, each number with what qualifies it."""
    tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = [("", (), evaluation_rows(result))]
    if len(result.get("speed_by_batch", ())) > 1:
        tables.append(("Speed by batch size", ("batch", "drafted tokens/s", "alone tokens/s", "speed-up", "draft ms", "target ms",
                                               "same text"),
                       [(str(row["batch"]), f"{row['tokens_per_s']:.1f}", f"{row['baseline_tokens_per_s']:.1f}",
                         f"{row['speedup']:.2f} x", plain(row["draft_ms"]), plain(row["target_ms"]), plain(row["identical"]))
                        for row in result["speed_by_batch"]]))
    if "by_kind" in result:
        tables.append(("By kind", ("kind", "prompts", "tau", "tokens an answer", "right answers"),
                       [(kind, str(row["prompts"]), f"{row['tau']:.3f}", f"{row['mean_answer_tokens']:.0f}",
                         share(row["accuracy"])) for kind, row in result["by_kind"].items()]))
    for title, key in (("By position in the answer", "by_position"), ("By length of the context", "by_context")):
        if len(result.get(key, ())) > 1:
            tables.append((title, ("tokens", "forwards", "tau"),
                           [(f"{row['from']} to {row['below'] - 1}", f"{row['forwards']:,}", f"{row['tau']:.3f}")
                            for row in result[key]]))
    if result.get("rivals"):
        tables.append(("Other ways to draft", ("", "tau", "tokens/s", "speed-up", "same text"),
                       [(name, f"not measured: {row['refused']}", "", "", "") if "refused" in row else
                        (name, f"{row['tau']:.3f}", f"{row['tokens_per_s']:.1f}", f"{row['speedup']:.2f} x",
                         plain(row["identical"])) for name, row in result["rivals"].items()]))
    return tables


def evaluation_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The headline of an evaluation, each number with what qualifies it."""
    given = result["conditions"]
    ceiling = f", {given['block_size']} the ceiling" if "block_size" in given else ""
    rows: list[tuple[str, ...]] = [
        ("accepted length tau", f"{result['tau']:.3f} tokens per target forward (1 is no help{ceiling})"),
        ("draft tokens accepted", f"{share(result.get('acceptance_rate'))} of those verified"),
        ("with the drafter", f"{result['tokens_per_s']:.1f} tokens/s"),
    ]
    if result["speedup"] is None:
        rows.append(("target alone", given["baseline"]))
    else:
        rows += [("target alone", f"{result['baseline_tokens_per_s']:.1f} tokens/s ({given['baseline']})"),
                 ("speed-up", f"{result['speedup']:.2f} x"), ("same text as the target alone", identity(result))]
    if result.get("accuracy"):
        drafted, alone = (share(result["accuracy"][side]) for side in ("drafted", "alone"))
        rows.append(("right answers", f"{drafted} drafted, {alone} alone"))
    where = (f"target {given['target_dtype']}, {given['execution']}, batch {given['batch_sizes'][0]}, {given['device']}, "
             f"{given['threads']} threads" if "engine" not in given else
             f"{given['engine']} at {given['base_url']}, {given['concurrency']} requests at a time")
    thinking = {None: "", True: ", thinking on", False: ", thinking off"}[given.get("thinking")]
    rows.append(("conditions", f"{given['prompts']} prompts{' of ' + given['source'] if 'source' in given else ''}, up to "
                               f"{given['max_new_tokens']} tokens, temperature {given['temperature']}{thinking}, {where}"))
    return rows


def share(value: float | None) -> str:
    """A share in per cent, or a dash."""
    return "-" if value is None else f"{100 * value:.1f} %"


def identity(result: Mapping[str, Any]) -> str:
    """The losslessness check in words."""
    if result["identical"] is None:
        return "not compared: sampled texts differ by chance"
    if result["identical"]:
        return f"yes, token for token, in all {result['conditions']['prompts']} prompts"
    first = result["first_difference"]
    what = {"tie": "at a tie of rounding", "error": "NOT A TIE"}.get(first["kind"], "perhaps a tie of rounding")
    where = first.get("where") or f"prompt {first['prompt'] + 1}"
    gap = "" if first["gap"] is None else f" (logit gap {first['gap']:.2g})"
    return f"no: first difference at {where}, token {first['position'] + 1}, {what}{gap}"


def slot_table(acceptance: Mapping[str, Sequence[float]]) -> Table:
    """Acceptance by slot, one row a measurement."""
    table = Table(title="Acceptance by slot", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    slots = max(len(values) for values in acceptance.values())
    for slot in range(1, slots + 1):
        table.add_column(str(slot), justify="right")
    for name, values in acceptance.items():
        table.add_row(name, *(f"{value:.2f}" for value in values))
    return table


GIB = 2**30
BAR_COLUMNS = 60
BAR_COLOURS = ("blue", "magenta", "cyan", "yellow", "green", "red", "bright_blue", "bright_magenta", "bright_cyan")
PLAN_COLUMNS = {"placement": "left", "changed settings": "left", "fits": "left", "peak GiB used": "right", "headroom": "right",
                "step": "right", "supervised/s": "right", "row tokens/s": "right", "slowest": "left"}
PLANS_DRAWN = 2
SIMULATED_COLUMNS = {"placement": "left", "needs": "left", "fits": "left", "step": "right", "supervised/s": "right",
                     "drafter cards wait": "right", "target cards wait": "right"}
TIME_COLUMNS = 100


def show_plan(result: Mapping[str, Any]) -> None:
    """The placements in one table, the memory of the best ones as bars, and with --explain every line."""
    console = wide_console()
    gpus, job = result["gpus"], result["job"]
    console.print(
        f"{gpus['count']} x {gpus['name']}, {gpus['usable_bytes'] / GIB:.1f} GiB each. Rows of {job['row_length']:,} tokens, "
        f"{job['anchors']} anchors, blocks of {job['block_size']}; drafter {job['drafter_parameters'] / 1e9:.2f} B, target "
        f"{job['target_parameters'] / 1e9:.1f} B parameters, attention {job['road']}.", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name, justify in PLAN_COLUMNS.items():
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    plans = [result, *result["alternatives"]]
    for plan in plans:
        used = " + ".join(f"{device['device_used_bytes'] / GIB:.1f}" for device in plan["devices"])
        changes = ", ".join(f"{key}={value}" for key, value in plan["changes"].items())
        table.add_row(plan["placement"], changes or "-", "yes" if plan["fits"] else "NO", used,
                      f"{plan['headroom_bytes'] / GIB:+.1f}", f"{plan['step_ms']:,.0f} ms",
                      f"{plan['supervised_tokens_per_s']:,.0f}", f"{plan['tokens_per_s']:,.0f}", plan["bottleneck"])
    console.print(table)
    for plan in plans:
        if plan is result or not plan["fits"]:
            console.print(plan["verdict"], highlight=False, markup=False, soft_wrap=True)
    for plan in plans[:PLANS_DRAWN]:
        for device in plan["devices"]:
            _show_device(console, plan, device, explain=result["explain"])
    console.print(f"\nOn the host, in the first process, {result['host_bytes'] / GIB:.1f} GiB:", highlight=False)
    for line in result["host_lines"]:
        console.print(f"  {line['name']}, {line['bytes'] / GIB:.1f} GiB = {line['formula']}", highlight=False, markup=False,
                      soft_wrap=True)
    console.print(f"Times are {result['times']}.", highlight=False)
    if "simulated" in result:
        show_simulation(console, result["simulated"])


def gpus(count: int) -> str:
    """So many GPUs, in words."""
    return "1 GPU" if count == 1 else f"{count} GPUs"


def show_simulation(console: Console, simulated: Mapping[str, Any]) -> None:
    """The arrangements of so many GPUs in one table, the best for fewer, and two steps of the best as bars, one a lane."""
    console.print(f"\nSimulated: {gpus(simulated['gpus'])}, machines of {simulated['gpus_per_machine']}, targets "
                  f"{simulated['turns']}; stage times: {simulated['times']}.", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name, justify in SIMULATED_COLUMNS.items():
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for one in simulated["arrangements"]:
        changes = ", ".join(f"{key}={value}" for key, value in one["changes"].items())
        table.add_row(one["placement"], changes or "-", "yes" if one["fits"] else "NO", f"{one['step_ms']:,.0f} ms",
                      f"{one['supervised_tokens_per_s']:,.0f}", *(share(one["waits"].get(side)) for side in ("learn", "capture")))
    console.print(table)
    if len(simulated["by_gpus"]) > 1:
        best = ", ".join(f"{one['gpus']}: {one['supervised_tokens_per_s']:,.0f}" for one in simulated["by_gpus"])
        console.print(f"Best supervised tokens/s by number of GPUs: {best}.", highlight=False)
    console.print(f"Two steps of: {simulated['arrangements'][0]['placement']}", highlight=False, markup=False)
    for line in time_line_bars(simulated["spans"]):
        console.print(line, highlight=False, soft_wrap=True)


def time_line_bars(spans: Sequence[Mapping[str, Any]]) -> list[str]:
    """Spans as one bar a lane (rich markup), a letter a column: the first of its label, a dot where the lane stands idle."""
    ended = max(span["end_ms"] for span in spans)
    labels = {span["label"]: BAR_COLOURS[i] for i, span in enumerate({s["label"]: s for s in spans}.values())}
    lines = []
    for lane in sorted({span["lane"] for span in spans}):
        columns = ["."] * TIME_COLUMNS
        for span in spans:
            if span["lane"] == lane:
                first, last = (round(TIME_COLUMNS * span[key] / ended) for key in ("begin_ms", "end_ms"))
                letter = f"[{labels[span['label']]}]{span['label'][0]}[/{labels[span['label']]}]"
                columns[first:last] = [letter] * (last - first)
        lines.append(f"{escape(lane):>12} |{''.join(columns)}|")
    legend = ", ".join(f"[{colour}]{label[0]}[/{colour}] {label}" for label, colour in labels.items())
    return [*lines, f"{'':>12}  0 to {ended:,.0f} ms; {legend}"]


def _show_device(console: Console, plan: Mapping[str, Any], device: Mapping[str, Any], *, explain: bool) -> None:
    """A stacked bar of what stands on the card at its fullest moment; with `explain` every line."""
    whole = max(device["usable_bytes"], device["device_used_bytes"])
    console.print(f"\n{plan['placement']}: {device['role']} card ({device['count']} of them), "
                  f"{device['device_used_bytes'] / GIB:.1f} of {device['usable_bytes'] / GIB:.1f} GiB, fullest in "
                  f"'{device['peak_phase']}'", highlight=False, markup=False)
    bar, legend, drawn, begun = "", [], 0, 0
    for i, (name, size) in enumerate(device["groups_at_peak"].items()):
        begun += size
        columns = round(BAR_COLUMNS * begun / whole) - drawn
        drawn += columns
        colour = BAR_COLOURS[i % len(BAR_COLOURS)]
        letter = chr(ord("a") + i)
        bar += f"[{colour}]{letter * columns}[/{colour}]"
        legend.append(f"[{colour}]{letter}[/{colour}] {name} {size / GIB:.1f}")
    console.print(f"|{bar}{'.' * (BAR_COLUMNS - drawn)}|", highlight=False)
    console.print("  ".join(legend), highlight=False)
    if explain:
        table = Table(box=None, pad_edge=False)
        for name in ("line", "GiB", "dtype", "lives", "formula"):
            table.add_column(name, justify="right" if name == "GiB" else "left", overflow="fold")
        for line in sorted(device["lines"], key=lambda line: -line["bytes"]):
            table.add_row(escape(line["name"]), f"{line['bytes'] / GIB:.3f}", line["dtype"],
                          line["phase"] if line["inside"] else "outside the allocator", escape(line["formula"]))
        console.print(table)


REMEDIES_SHOWN, SURPRISES_SHOWN = 6, 8
SOUND = {True: "ok", False: "NO", None: "-"}
ANSWERS = {True: "no", False: "YES", None: "not stated"}


def gib(size: int | None) -> str:
    """Bytes as GiB, or a dash."""
    return "-" if size is None else f"{size / GIB:.2f}"


def show_doctor(result: Mapping[str, Any]) -> None:
    """The machine's findings, or the diagnosis of a crash."""
    if "cause" in result:
        return show_diagnosis(result)
    console = wide_console()
    _show_table(console, "", (), [(check["name"], SOUND[check["ok"]], check["message"]) for check in result["checks"]])
    console.print("sound" if result["ok"] else "NOT sound: see above", highlight=False)


def show_diagnosis(result: Mapping[str, Any]) -> None:
    """Why memory ran out: the cause first, what shows it, the questions, plan against measurement, and the ways out."""
    console = wide_console()

    def tell(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    tell(result["summary"])
    for shown in result["shown_by"]:
        tell(f"  {result['source']}:{shown['line']}: {shown['text'][:200]}")
    if result["note"]:
        tell(result["note"])
    for line in result["lines"]:
        tell(f"ledger: '{line['name']}' ({line['line_bytes'] / GIB:.2f} GiB, {line['lives']}): {line['tensor']}")
    for other in result["other_causes"]:
        tell(f"also: {other}")
    _show_table(console, "", (), [(check["name"], ANSWERS[check["ok"]], check["message"] if check["ok"] is not None else "")
                                  for check in result["checks"]])
    rows = result["planned_against_measured"]
    _show_table(console, "Planned against measured, GiB, largest surprise first", ("line", "planned", "measured", "surprise"), [
        (row["name"], gib(row["planned"]), gib(row["measured"]), f"{(row['measured'] - row['planned']) / GIB:+.2f}")
        for row in rows[:SURPRISES_SHOWN]])
    _show_table(console, "Ways out, GiB as predicted", ("", "peak", "used", "fits", "cost"), [
        (way["set"], gib(way["peak_bytes"]), gib(way["used_bytes"]), plain(way["fits"]), way["cost"])
        for way in result["remedies"][:REMEDIES_SHOWN]])


def _show_table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        if title:
            console.print(title, highlight=False)
        table = Table(box=None, pad_edge=False, show_header=bool(header))
        for i, name in enumerate(header or [""] * len(rows[0])):
            number = name in ("planned", "measured", "surprise", "peak", "used")
            table.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number or not i)
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        console.print(table)

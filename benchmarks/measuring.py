"""How the benchmarks here measure: in alternation, by medians, with what they ran on.

The speed of a machine changes while a benchmark runs, most of all on one that is
shared. So what is compared runs in turn in one process, and the ratio counts.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

PACKAGES = "tensorflow keras numpy scann faiss-cpu torch pytorch-metric-learning"


def arguments(description: str, **options: Any) -> argparse.Namespace:
    """Options of a script by their defaults, `False` for a switch, and `--out`."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in options.items():
        kind: dict[str, Any] = {"type": type(default), "help": f"default: {default}"}
        if default is False:
            kind = {"action": "store_true"}
        elif isinstance(default, list):
            kind = {"type": type(default[0]), "nargs": "+"}
        parser.add_argument(f"--{name}", default=default, **kind)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    return parser.parse_args()


def alternate(
    calls: dict[str, Callable[[], Any]], rounds: int, warm_up: int = 1
) -> dict[str, dict[str, list[float]]]:
    """Times calls in turn, after `warm_up` calls of each.

    Returns `{"seconds": ..., "processor_seconds": ...}`, each `rounds` values by name.
    """
    times = {name: [] for name in calls}
    for round_ in range(warm_up + rounds):
        # The order alternates too, against an advantage of going first.
        for name in list(calls)[:: -1 if round_ % 2 else 1]:
            times[name].append(timed(calls[name]))
    return {
        kind: {name: [pair[i] for pair in times[name][warm_up:]] for name in calls}
        for i, kind in enumerate(("seconds", "processor_seconds"))
    }


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds and processor seconds of a call."""
    start, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - processor


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """Median of each list."""
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times: dict[str, list[float]], name: str, peer: str) -> float:
    """Median over the rounds of one time by the other of the same round."""
    pairs = zip(times[name], times[peer], strict=True)
    return statistics.median(own / other for own, other in pairs)


def in_new_process(function: Callable, *values: Any) -> Any:
    """What a function returns in a process that has begun nothing."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, values)


def resident_megabytes(key: str = "VmRSS") -> float:
    """Resident memory of this process, or with `"VmHWM"` its peak (Linux)."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(key)) / 1024


def peak_megabytes(function: Callable[[], Any]) -> float:
    """Peak resident memory during a call above what there was before (Linux)."""
    before = resident_megabytes()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    function()
    return resident_megabytes("VmHWM") - before


def machine() -> dict[str, str | int]:
    """Processor, number of cores this process may use, and versions."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    installed = {x.name: x.version for x in importlib.metadata.distributions()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": cores or os.cpu_count() or 1,
        "python": platform.python_version(),
        **{name: installed[name] for name in PACKAGES.split() if name in installed},
    }


def print_table(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Prints values of each row as a Markdown table, a dash for one it does not have.

    `columns` has by name a heading, a colon and a format, such as `"seconds:.2f"`.
    """
    headings = {name: text.rpartition(":") for name, text in columns.items()}
    lines = [[heading for heading, _, _ in headings.values()]]
    for row in rows:
        values = ((row.get(name), form) for name, (_, _, form) in headings.items())
        lines.append(["-" if x is None else format(x, form) for x, form in values])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    for cells in lines:
        padded = map(str.ljust, cells, widths)
        print("| " + " | ".join(padded) + " |", flush=True)


def write(out: pathlib.Path | None, name: str, rows: list[dict[str, Any]]) -> None:
    """Writes rows and the machine they were measured on as JSON, if `out` is a file."""
    if out:
        result = {"benchmark": name, "machine": machine(), "results": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")


def report(
    name: str,
    rows: list[dict[str, Any]],
    columns: dict[str, str],
    out: pathlib.Path | None,
) -> None:
    """Prints the machine and the table, and writes all values as JSON."""
    print(f"{name}: {', '.join(f'{key} {value}' for key, value in machine().items())}")
    print_table(rows, columns)
    write(out, name, rows)

"""How the benchmarks here measure: in alternation, by medians, with what they ran on.

The speed of a machine changes while a benchmark runs, most of all on one that is
shared. So what is compared runs in turn in one process, and the ratio counts.
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

_PACKAGES = (
    "tensorflow",
    "keras",
    "numpy",
    "scann",
    "faiss-cpu",
    "torch",
    "pytorch-metric-learning",
)


def alternate(
    calls: dict[str, Callable[[], Any]], rounds: int, warm_up: int = 1
) -> dict[str, dict[str, list[float]]]:
    """Times calls in turn.

    Args:
        calls: functions by name.
        rounds: how often each is timed.
        warm_up: calls of each before that.

    Returns:
        `{"seconds": ..., "processor_seconds": ...}`, each a list of `rounds` by name.
    """
    times = {
        kind: {name: [] for name in calls} for kind in ("seconds", "processor_seconds")
    }
    for round_ in range(warm_up + rounds):
        # The order alternates too, against an advantage of going first.
        for name in list(calls)[:: -1 if round_ % 2 else 1]:
            start, processor = time.perf_counter(), time.process_time()
            calls[name]()
            if round_ >= warm_up:
                times["seconds"][name].append(time.perf_counter() - start)
                times["processor_seconds"][name].append(time.process_time() - processor)
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """Median of each list."""
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times: dict[str, list[float]], name: str, peer: str) -> float:
    """Median over the rounds of one time by the other of the same round."""
    pairs = zip(times[name], times[peer], strict=True)
    return statistics.median(own / other for own, other in pairs)


def resident_megabytes(key: str = "VmRSS") -> float:
    """Resident memory of this process, or with `"VmHWM"` its peak (Linux)."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(key)) / 1024


def peak_megabytes(function: Callable[[], Any]) -> float:
    """Peak resident memory during a call above what there was before (Linux)."""
    before = resident_megabytes()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    function()
    return resident_megabytes("VmHWM") - before


def machine() -> dict[str, str | int]:
    """Processor, number of cores this process may use, and versions."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": cores or os.cpu_count() or 1,
        "python": platform.python_version(),
        **versions,
    }


def print_table(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """Prints some values of each row as a Markdown table.

    Args:
        rows: values by name.
        columns: heading, a colon and a format, such as `"seconds:.2f"`, by name. A row
            without the value has a dash.
    """
    headings = [text.rpartition(":")[0] for text in columns.values()]
    lines = [headings]
    for row in rows:
        lines.append(
            [
                "-" if row.get(name) is None else format(row[name], form)
                for name, (_, _, form) in (
                    (name, text.rpartition(":")) for name, text in columns.items()
                )
            ]
        )
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    for cells in lines:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print("| " + " | ".join(padded) + " |", flush=True)


def write(out: pathlib.Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Writes rows and the machine they were measured on as JSON.

    Args:
        out: file to write.
        name: of the benchmark.
        rows: values by name.
    """
    result = {"benchmark": name, "machine": machine(), "results": rows}
    out.write_text(json.dumps(result, indent=1) + "\n")


def report(
    name: str,
    rows: list[dict[str, Any]],
    columns: dict[str, str],
    out: pathlib.Path | None,
) -> None:
    """Prints the machine and the table, and writes both as JSON.

    Args:
        name: of the benchmark.
        rows: values by name.
        columns: as for `print_table`.
        out: file to write, or `None`.
    """
    print(f"{name}: {', '.join(f'{key} {value}' for key, value in machine().items())}")
    print_table(rows, columns)
    if out:
        write(out, name, rows)

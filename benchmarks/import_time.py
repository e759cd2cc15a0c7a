"""What `import keras_ccp` costs beyond `import keras` with TensorFlow.

Fresh processes, one import each, in alternation. The first of each, which reads files
that the system has not cached, does not count.
"""

import argparse
import pathlib
import subprocess
import sys

from measuring import alternate, medians, report

COLUMNS = {
    "keras_seconds": "import keras s:.2f",
    "keras_ccp_seconds": "import keras_ccp s:.2f",
    "extra_seconds": "extra s:.3f",
    "extra_processor_seconds": "extra processor s:.3f",
    "ratio": "ratio:.3f",
}
# Seconds and processor seconds of what follows; `keras` brings TensorFlow with it.
CODE = """
import time
start = time.perf_counter(), time.process_time()
import {module}
print(time.perf_counter() - start[0], time.process_time() - start[1])
"""


def import_seconds(module: str) -> tuple[float, float]:
    """Seconds and processor seconds of one import in a process of its own."""
    output = subprocess.run(
        [sys.executable, "-c", CODE.format(module=module)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    seconds, processor = output.split()[-2:]
    return float(seconds), float(processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args()
    samples = {"keras": [], "keras_ccp": []}
    calls = {
        name: lambda name=name: samples[name].append(import_seconds(name))
        for name in samples
    }
    alternate(calls, arguments.rounds)
    samples = {name: values[1:] for name, values in samples.items()}
    seconds = medians({name: [s for s, _ in v] for name, v in samples.items()})
    processor = medians({name: [p for _, p in v] for name, v in samples.items()})
    row = {f"{name}_seconds": value for name, value in seconds.items()}
    row["extra_seconds"] = seconds["keras_ccp"] - seconds["keras"]
    row["extra_processor_seconds"] = processor["keras_ccp"] - processor["keras"]
    row["ratio"] = seconds["keras_ccp"] / seconds["keras"]
    report("import_time", [row], COLUMNS, arguments.out)


if __name__ == "__main__":
    main()

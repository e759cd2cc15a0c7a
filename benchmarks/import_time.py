"""What `import keras_ccp` costs beyond `import keras` with TensorFlow.

Fresh processes, one import each, in alternation. The first of each, which reads files
that the system has not cached, does not count.
"""

import subprocess
import sys

from measuring import alternate, arguments, medians, report

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


def import_seconds(module: str) -> list[float]:
    """Seconds and processor seconds of one import in a process of its own."""
    command = [sys.executable, "-c", CODE.format(module=module)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(word) for word in found.stdout.split()[-2:]]


def main() -> None:
    options = arguments(__doc__, rounds=10)
    samples = {"keras": [], "keras_ccp": []}
    calls = {
        name: lambda name=name: samples[name].append(import_seconds(name))
        for name in samples
    }
    alternate(calls, options.rounds)
    seconds, processor = (
        medians({name: [x[kind] for x in found[1:]] for name, found in samples.items()})
        for kind in (0, 1)
    )
    row = {f"{name}_seconds": value for name, value in seconds.items()}
    row["extra_seconds"] = seconds["keras_ccp"] - seconds["keras"]
    row["extra_processor_seconds"] = processor["keras_ccp"] - processor["keras"]
    row["ratio"] = seconds["keras_ccp"] / seconds["keras"]
    report("import_time", [row], COLUMNS, options.out)


if __name__ == "__main__":
    main()

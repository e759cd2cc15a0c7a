#!/usr/bin/env bash
# All benchmarks that need no GPU, one after the other, on a machine that does nothing
# else: about an hour on two cores. The tables are Markdown, for the README beside this.
#
#     pip install -e ".[bench]"
#     bash benchmarks/cpu.sh [folder for the JSON files, default: cpu-results]
#
# PYTHON chooses the interpreter.
set -euo pipefail
out=$(mkdir -p "${1:-cpu-results}" && cd "${1:-cpu-results}" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")"
python=${PYTHON:-python}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}

for name in import_time k_center projection_time evaluation index step_time pipeline soak \
    accuracy; do
    printf '\n== %s\n' "$name"
    "$python" "$name.py" --out "$out/$name.json"
done

#!/usr/bin/env bash
# All that only GPUs can show, by one command: step time of CCP against pairwise with
# BN-Inception at batch 32, 1 to N GPUs, mixed precision, and evaluation.
#
#     bash benchmarks/gpu.sh [folder for the JSON files, default: gpu-results]
#
# With QUICK=1 everything is tiny and devices are parts of the CPU if there is no GPU:
# that it runs is all this shows. PYTHON chooses the interpreter.
set -euo pipefail
out=$(mkdir -p "${1:-gpu-results}" && cd "${1:-gpu-results}" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")"
python=${PYTHON:-python}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}

gpus=$("$python" -c '
import tensorflow as tf
print(len(tf.config.list_physical_devices("GPU")))' | tail -n 1)
has_gpu=$gpus
steps=() scaling=() evaluation=()
if [[ -n "${QUICK:-}" ]]; then
    steps=(--rounds 2 --batch 8)
    scaling=(--rounds 2 --batch 4 --size 64 --classes 4 --proxies 2)
    evaluation=(--rounds 1 --scale 0.02)
    if [[ "$gpus" == 0 ]]; then gpus=2; fi
elif [[ "$gpus" == 0 ]]; then
    echo "There is no GPU that TensorFlow can use; QUICK=1 tries the script without." >&2
    exit 1
fi
devices=(1)
for ((n = 2; n <= gpus; n *= 2)); do devices+=("$n"); done
if ((devices[-1] != gpus)); then devices+=("$gpus"); fi

run() {
    printf '\n== %s\n' "$*"
    "$python" "$@"
}

run scaling.py --devices "${devices[@]}" "${scaling[@]}" --out "$out/scaling.json"
if ((has_gpu)); then # on a CPU float16 is very slow
    run scaling.py --devices "${devices[@]}" "${scaling[@]}" --policy mixed_float16 \
        --out "$out/scaling_mixed_float16.json"
fi
run step_time.py "${steps[@]}" --out "$out/step_time.json"
run evaluation.py "${evaluation[@]}" --out "$out/evaluation.json"

"""What proxies and projections add on the emoji: three methods, seed by seed.

The runs of `examples/train_emoji.py`: the same network, data, loss and steps, the best
weights by validation.
"""

import json
import pathlib
import statistics
import sys
import time

import keras
from measuring import arguments, print_table, write

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import train_emoji  # noqa: E402


def run(method: str, seed: int, steps: int) -> dict:
    """Trains once and scores the unseen classes."""
    start = time.time()
    keras.backend.clear_session()
    training, validation, unseen = train_emoji.load(seed)
    model, callback = train_emoji.train(
        method, training, validation, steps, seed, verbose=0
    )
    embeddings = model.predict(unseen.images, verbose=0)
    return {
        "method": method,
        "seed": seed,
        **train_emoji.score(embeddings, unseen.labels),
        "validation_map_at_r": callback.evaluate()["map_at_r"],
        "num_projections": callback.num_projections,
        "seconds": round(time.time() - start, 1),
    }


def summary(method: str, runs: list[dict]) -> dict:
    """Mean and range in percent over the seeds."""
    row = {"method": method, "seeds": len(runs)}
    for metric in train_emoji.METRICS:
        values = [100 * run[metric] for run in runs]
        low, mean, high = min(values), statistics.mean(values), max(values)
        row[metric] = f"{mean:.1f} ({low:.1f} to {high:.1f})"
    return row


def main() -> None:
    options = arguments(
        __doc__,
        seeds=list(range(5)),
        methods=list(train_emoji.METHODS),
        steps=train_emoji.STEPS,
    )
    results = []
    for seed in options.seeds:
        for method in options.methods:
            results.append(run(method, seed, options.steps))
            print(json.dumps(results[-1]), flush=True)
            write(options.out, "accuracy", results)  # after each run: they are long
    print("unseen classes, %: mean (lowest to highest) over the seeds")
    columns = {"method": "method:", "seeds": "seeds:d"}
    columns |= {key: f"{name}:" for key, name in train_emoji.METRICS.items()}
    rows = [
        summary(method, [row for row in results if row["method"] == method])
        for method in options.methods
    ]
    print_table(rows, columns)


if __name__ == "__main__":
    main()

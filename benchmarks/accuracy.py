"""What CCP adds on the emoji: pairwise loss, one proxy problem and CCP, seed by seed.

All three are the run of `examples/train_emoji.py`: the same network, data, loss and
steps, scored with the last weights. Pairwise has no proxies; "no switching" solves one
proxy problem to the end.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import keras
from measuring import report, write

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import train_emoji  # noqa: E402

METHODS = {
    "pairwise": {"proxies_per_class": 0, "switching": False},
    "no switching": {"proxies_per_class": 4, "switching": False},
    "CCP": {"proxies_per_class": 4, "switching": True},
}


def run(method: str, seed: int, steps: int) -> dict:
    """Trains once and scores the unseen classes."""
    start = time.time()
    settings = METHODS[method]
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    training, validation, unseen = train_emoji.load(seed)
    model = train_emoji.make_model(
        training.num_classes, steps, settings["proxies_per_class"]
    )
    callback = train_emoji.train(
        model, training, validation, steps, seed, settings["switching"], verbose=0
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


def summary(results: list[dict]) -> list[dict]:
    """Mean and range in percent over the seeds, for each method that was run."""
    rows = []
    for method in dict.fromkeys(result["method"] for result in results):
        runs = [result for result in results if result["method"] == method]
        row = {"method": method, "seeds": len(runs)}
        for metric in train_emoji.METRICS:
            values = [100 * run[metric] for run in runs]
            mean = statistics.mean(values)
            row[metric] = f"{mean:.1f} ({min(values):.1f} to {max(values):.1f})"
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=train_emoji.STEPS)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args()
    results = []
    for seed in arguments.seeds:
        for method in arguments.methods:
            results.append(run(method, seed, arguments.steps))
            print(json.dumps(results[-1]), flush=True)
            if arguments.out:
                # After each run: they are long.
                write(arguments.out, "accuracy", results)
    print("unseen classes, %: mean (lowest to highest) over the seeds")
    columns = {"method": "method:", "seeds": "seeds:d"}
    columns |= {key: f"{name}:" for key, name in train_emoji.METRICS.items()}
    report("accuracy", summary(results), columns, None)


if __name__ == "__main__":
    main()

"""Draws what CCP does to proxies: the paper's proof of concept, on MNIST.

A ResNet20V2 learns 2-D embeddings of the ten digits against four proxies each. At the
end of the first problem the four have collapsed to one point; each projection spreads
them again over the digits that they did not cover, and the next problem pulls these in.

All ten classes train, as in the paper, so this is no test of unseen classes. What is
drawn and measured are other images of the ten digits: one tenth of them, which are
neither trained on nor used to decide when to project; another tenth decides that. The
paper does not say which images its figure shows, nor its loss, learning rate, batch and
number of steps: those here are ours.
"""

import argparse
import json
import logging
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

from keras_ccp import (
    CCPCallback,
    CCPModel,
    balanced_batches,
    build_embedder,
    datasets,
    losses,
    plots,
    retrieval,
)
from keras_ccp.backbones import resnet20_v2, small_cnn
from keras_ccp.monitor.projection_log import (
    Projection,
    ProjectionLog,
    load_projections,
    measure,
    proxy_spreads,
)

# MAP@R, mean covering radius and mean inter-class distance, problem by problem.
PAPER = [
    (0.87, 0.54, 0.92),
    (0.85, 0.52, 0.96),
    (0.92, 0.43, 0.97),
    (0.96, 0.30, 1.36),
    (0.97, 0.27, 1.31),
]
INTERVAL = 75  # steps from one evaluation to the next
EVALUATIONS = 120


def load(path: pathlib.Path | None, seed: int) -> list[datasets.Dataset]:
    """Digits to train on, to decide by and to measure: 8, 1 and 1 tenth of each class.

    Without a path it is the MNIST of Keras, all 70,000, which it downloads.
    """
    if path is None:
        (x, y), (x_test, y_test) = keras.datasets.mnist.load_data()
        images, labels = np.concatenate([x, x_test])[..., None], np.append(y, y_test)
    else:
        digits = datasets.npz(path)
        images, labels = digits.images, digits.labels
    order = np.random.default_rng(seed).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    # Of each ten images of a class, in random order, one here and one there.
    place = np.arange(len(order)) % 10
    parts = order[place < 8], order[place == 8], order[place == 9]
    return [datasets.Dataset(images[rows], labels[rows]) for rows in parts]


def shifted(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Moves each digit by up to two pixels."""
    corners = tf.random.stateless_uniform((len(images), 2), seed, 0, 5, tf.int32)
    padded = tf.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))
    size = images.shape[1:]
    return tf.map_fn(
        lambda pair: tf.slice(pair[0], (pair[1][0], pair[1][1], 0), size),
        (padded, corners),
        fn_output_signature=images.dtype,
    )


def train(
    parts: list[datasets.Dataset], out: pathlib.Path, seed: int, is_quick: bool
) -> CCPModel:
    """Trains, and leaves `projections.jsonl` and its arrays in `out`."""
    training, validation, measured = parts
    backbone, interval, evaluations = resnet20_v2, INTERVAL, EVALUATIONS
    if is_quick:
        backbone, interval, evaluations = small_cnn, 5, 6
    embedder = build_embedder(backbone(training.images.shape[1:]), embedding_dim=2)
    model = CCPModel(embedder, num_classes=10, proxies_per_class=4)
    steps = interval * evaluations
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, steps, alpha=0.02)
    model.compile(keras.optimizers.Adam(schedule), losses.ContrastiveLoss(0.0, 0.6))
    callback = CCPCallback(
        training, validation, pool_size=16, max_projections=len(PAPER) - 1, seed=seed
    )
    batches = balanced_batches(
        training, classes_per_batch=10, samples_per_class=2, seed=seed, augment=shifted
    )
    model.fit(
        batches,
        steps_per_epoch=interval,
        epochs=evaluations,
        verbose=2,
        callbacks=[callback, ProjectionLog(out, samples=measured, save_arrays=True)],
    )
    return model


def numbers(projection: Projection) -> dict[str, float]:
    """What the table has of a problem; spreads are the extreme ones of the classes."""
    samples = projection.embeddings, projection.labels
    row = {"map_at_r": projection.map_at_r, **measure(*samples, projection.proxies)}
    row["largest_proxy_spread"] = proxy_spreads(*samples, projection.proxies).max()
    if projection.next_proxies is not None:
        spreads = proxy_spreads(*samples, projection.next_proxies)
        row["smallest_next_spread"] = spreads.min()
    return row


def print_table(rows: list[dict[str, float]]) -> None:
    columns = f"{'MAP@R':>9}{'radius':>9}{'distance':>9}"
    print(f"\n{'':9}{'measured':>27}{'the paper':>27}   spread of the proxies,")
    print(f"{'problem':9}{columns}{columns}   largest, of the next smallest")
    names = ("map_at_r", "mean_covering_radius", "mean_inter_class_distance")
    for number, (row, paper) in enumerate(zip(rows, PAPER, strict=False), start=1):
        figures = "".join(f"{value:9.2f}" for value in (*map(row.get, names), *paper))
        after = row.get("smallest_next_spread")
        after = "" if after is None else f", {after:.2f}"
        print(f"{number:<9}{figures}   {row['largest_proxy_spread']:.3f}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, help=".npz of images and labels")
    parser.add_argument("--out", type=pathlib.Path, default="runs/mnist_figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a taste, under 40 s")
    arguments = parser.parse_args()
    out, seed = arguments.out, arguments.seed
    start, cpu_start = time.time(), time.process_time()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    keras.utils.set_random_seed(seed)

    parts = load(arguments.data, seed)
    print("training, validation, measured:", *parts, sep="\n")
    model = train(parts, out, seed, arguments.quick)
    projections = []
    for kept in load_projections(out):
        # MAP@R of the measured digits for that of those that decide.
        found = retrieval.evaluate(kept.embeddings, kept.labels)
        projections.append(kept._replace(map_at_r=found["map_at_r"]))
    figure = plots.projection_figure(projections, class_names=parts[2].class_names)
    figure.savefig(out / "projections.png")
    results = {
        "problems": [numbers(projection) for projection in projections],
        "map_at_r": model.evaluate(parts[2])["map_at_r"],
        "seconds": round(time.time() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu_start, 1),
        "seed": seed,
    }
    (out / "results.json").write_text(json.dumps(results, indent=2))
    print_table(results["problems"])
    print(
        f"\nMAP@R of the model that is kept {results['map_at_r']:.4f}, "
        f"{results['seconds']:.0f} s. Written to {out}: projections.png, results.json, "
        "projections.jsonl"
    )


if __name__ == "__main__":
    main()

"""Draws what CCP does to proxies: the paper's proof of concept, on MNIST.

A ResNet20V2 learns 2-D embeddings of the ten digits against four proxies each. At the
end of the first problem the four have collapsed to one point; each switch spreads them
again over the digits that they did not cover, and the next problem pulls these in.

All ten classes train, as in the paper, so this is no test of unseen classes. What is
drawn and measured are other images of the ten digits: one tenth of them, which are
neither trained on nor used to decide when to switch; another tenth decides that. The
paper does not say which images its figure shows, nor its loss, learning rate, batch and
number of steps: those here are ours.
"""

import argparse
import dataclasses
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
from keras_ccp.monitor.projection_log import ProjectionLog, load_projections
from keras_ccp.monitor.projections import Projection, measure, proxy_spreads

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
SWITCHES = len(PAPER) - 1


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


def make_model(backbone: keras.Model, steps: int) -> CCPModel:
    model = CCPModel(
        build_embedder(backbone, embedding_dim=2),
        num_classes=10,
        proxies_per_class=4,
        proximal_weight=2e-4,
    )
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, steps, alpha=0.02)
    model.compile(keras.optimizers.Adam(schedule), losses.ContrastiveLoss(0.0, 0.6))
    return model


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
    model: CCPModel,
    parts: list[datasets.Dataset],
    out: pathlib.Path,
    seed: int,
    interval: int,
    evaluations: int,
) -> None:
    """Trains, and leaves `projections.jsonl` and its arrays in `out`."""
    training, validation, measured = parts
    callback = CCPCallback(
        pool=training,
        validation=validation,
        pool_size=16,
        patience=3,
        max_projections=SWITCHES,
        seed=seed,
    )
    model.fit(
        balanced_batches(
            training,
            classes_per_batch=10,
            samples_per_class=2,
            seed=seed,
            augment=shifted,
        ),
        steps_per_epoch=interval,
        epochs=evaluations,
        verbose=2,
        callbacks=[callback, ProjectionLog(out, samples=measured, save_arrays=True)],
    )


def measured_projections(out: pathlib.Path) -> list[Projection]:
    """The projections, with MAP@R of the measured digits for that of the others."""
    return [
        dataclasses.replace(
            kept, map_at_r=retrieval.evaluate(kept.embeddings, kept.labels)["map_at_r"]
        )
        for kept in load_projections(out)
    ]


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
    for number, row in enumerate(rows):
        names = ("map_at_r", "mean_covering_radius", "mean_inter_class_distance")
        paper = PAPER[number] if number < len(PAPER) else ()
        figures = "".join(f"{value:9.2f}" for value in (*map(row.get, names), *paper))
        after = row.get("smallest_next_spread")
        after = "" if after is None else f", {after:.2f}"
        print(f"{number + 1:<9}{figures}   {row['largest_proxy_spread']:.3f}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=pathlib.Path, help=".npz of images and labels")
    parser.add_argument("--out", type=pathlib.Path, default="runs/mnist_figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="a taste: a small network, a few steps"
    )
    arguments = parser.parse_args()
    start, cpu_start = time.time(), time.process_time()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    keras.utils.set_random_seed(arguments.seed)

    parts = load(arguments.data, arguments.seed)
    for name, part in zip(("training", "validation", "measured"), parts, strict=True):
        print(f"{name:11}{part}")
    backbone, interval, evaluations = resnet20_v2, INTERVAL, EVALUATIONS
    if arguments.quick:
        backbone, interval, evaluations = small_cnn, 5, 6
    model = make_model(backbone(parts[0].images.shape[1:]), interval * evaluations)
    train(model, parts, arguments.out, arguments.seed, interval, evaluations)

    projections = measured_projections(arguments.out)
    figure = plots.projection_figure(projections, class_names=parts[2].class_names)
    figure.savefig(arguments.out / "projections.png")
    rows = [numbers(projection) for projection in projections]
    results = {
        "problems": rows,
        "map_at_r": model.evaluate(parts[2])["map_at_r"],
        "seconds": round(time.time() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu_start, 1),
        "seed": arguments.seed,
    }
    (arguments.out / "results.json").write_text(json.dumps(results, indent=2))
    print_table(rows)
    print(
        f"\nMAP@R of the model that is kept {results['map_at_r']:.4f}, "
        f"{results['seconds']:.0f} s. Written to {arguments.out}: projections.png, "
        "results.json, projections.jsonl"
    )


if __name__ == "__main__":
    main()

"""Trains an embedding with CCP on half of the emoji and searches the other half.

Each of 461 emoji was drawn by six vendors. The network learns from 230 of them what
makes six drawings the same emoji, and is scored on the 231 it never saw.
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
from keras_ccp.backbones import small_cnn
from keras_ccp.pipeline import small_image_augmentation

METRICS = {"precision_at_1": "P@1", "precision_at_r": "P@R", "map_at_r": "MAP@R"}
STEPS = 4000
INTERVAL = 100  # steps from one evaluation to the next


def load(seed: int) -> tuple[datasets.Dataset, datasets.Dataset, datasets.Dataset]:
    """Training, validation and unseen classes.

    The 231 unseen classes are the same for every seed. Of the others 16 are held out
    to decide when to project; which, is up to the seed.
    """
    seen, unseen = datasets.emoji().split_classes(230, seed=0)
    training, validation = seen.split_classes(214, seed=seed)
    # Each class turned by a quarter is one more class: what separates classes that were
    # never seen is learned from the number of classes, and 214 are few.
    turned = np.rot90(training.images, axes=(1, 2))
    training = datasets.Dataset(
        np.concatenate([training.images, turned]),
        np.concatenate([training.labels, training.labels + training.num_classes]),
        [*training.class_names, *(f"{name} turned" for name in training.class_names)],
    )
    return training, validation, unseen


def make_model(num_classes: int, steps: int, proxies_per_class: int = 4) -> CCPModel:
    embedder = build_embedder(small_cnn(), embedding_dim=64, pooling="flatten")
    model = CCPModel(embedder, num_classes, proxies_per_class, in_batch_weight=1.0)
    schedule = keras.optimizers.schedules.CosineDecay(3e-3, steps, alpha=0.02)
    model.compile(keras.optimizers.Adam(schedule), losses.MultiSimilarityLoss())
    return model


def train(
    model: CCPModel,
    training: datasets.Dataset,
    validation: datasets.Dataset,
    steps: int,
    seed: int,
    max_projections: int | None = None,
    verbose: int = 2,
) -> CCPCallback:
    callback = CCPCallback(
        training,
        validation,
        pool_size=6,
        patience=4,
        max_projections=max_projections,
        # The learning rate falls to almost nothing, which does more for the last
        # weights than the best of 40 evaluations on 96 images is worth; so nothing is
        # taken back, neither at a projection nor at the end.
        restore_best=False,
        restore_on_projection=False,
        seed=seed,
    )
    augment = small_image_augmentation(grayscale=0.3, invert=0.3)
    batches = balanced_batches(
        training, classes_per_batch=16, samples_per_class=4, seed=seed, augment=augment
    )
    model.fit(
        batches,
        steps_per_epoch=INTERVAL,
        epochs=steps // INTERVAL,
        verbose=verbose,
        callbacks=[callback],
    )
    return callback


def score(embeddings: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """P@1, P@R and MAP@R of images that are searched among themselves."""
    found = retrieval.evaluate(embeddings, labels)
    return {metric: found[metric] for metric in METRICS}


def raw_pixels(images: np.ndarray) -> np.ndarray:
    """Embeddings without a network: pixels less their mean, compared by cosine."""
    pixels = images.reshape(len(images), -1).astype("float32")
    pixels -= pixels.mean(axis=1, keepdims=True)
    return pixels / np.linalg.norm(pixels, axis=1, keepdims=True)


def draw_neighbors(
    test: datasets.Dataset, embeddings: np.ndarray, seed: int
) -> np.ndarray:
    """Sixteen random queries of unseen classes and what is found for them."""
    _, found = retrieval.search(embeddings, embeddings, k=5, exclude_self=True)
    queries = np.random.default_rng(seed).choice(len(test), 16, replace=False)
    found = found[queries]
    is_right = test.labels[found] == test.labels[queries, None]
    return plots.neighbor_gallery(test.images[queries], test.images[found], is_right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default="runs/emoji")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a taste, under 40 s")
    parser.add_argument("--no-projections", action="store_true", help="one problem")
    arguments = parser.parse_args()
    out, seed = arguments.out, arguments.seed
    start = time.time()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    keras.utils.set_random_seed(seed)

    training, validation, test = load(seed)
    print(f"training:   {training}\nvalidation: {validation}\nunseen:     {test}")
    results = {"raw_pixels": score(raw_pixels(test.images), test.labels)}
    steps = 300 if arguments.quick else STEPS
    model = make_model(training.num_classes, steps)
    results["untrained"] = score(model.predict(test.images, verbose=0), test.labels)
    limit = 0 if arguments.no_projections else None
    callback = train(model, training, validation, steps, seed, limit)
    embeddings = model.predict(test.images, verbose=0)
    results["trained"] = score(embeddings, test.labels)

    out.mkdir(parents=True, exist_ok=True)
    picture = tf.io.encode_png(draw_neighbors(test, embeddings, seed))
    tf.io.write_file(str(out / "neighbours.png"), picture)
    model.export(out / "embedder", verbose=False)
    np.savez_compressed(out / "test_set.npz", images=test.images, labels=test.labels)
    rows = list(results.items())
    results["seconds"] = round(time.time() - start, 1)
    results["num_projections"] = callback.num_projections
    results["seed"] = seed
    (out / "results.json").write_text(json.dumps(results, indent=2))

    print(
        f"\n{'unseen classes, %':<20}{''.join(map('{:>8}'.format, METRICS.values()))}"
    )
    for name, found in rows:
        figures = "".join(f"{100 * found[metric]:8.1f}" for metric in METRICS)
        print(f"{name.replace('_', ' '):<20}{figures}")
    print(
        f"\n{results['num_projections']} projections, {results['seconds']} s. Written "
        f"to {out}: neighbours.png, embedder/, results.json, test_set.npz"
    )


if __name__ == "__main__":
    main()

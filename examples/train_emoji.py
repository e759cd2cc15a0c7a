"""Trains with small batches on half of the emoji and searches the other half.

Each of 461 emoji was drawn by six vendors. The network learns from 230 of them what
makes six drawings the same emoji, and is scored on the 231 it never saw. A batch has 16
images, which make few pairs among themselves: three models, of the same network, data
and steps, show what proxies add, and what projections do.
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
STEPS = 3000
INTERVAL = 100  # steps from one evaluation to the next
# Proxies of each class, and how often they are chosen anew at most.
METHODS = {"pairs": (0, 0), "proxies that stay": (4, 0), "CCP": (4, None)}


def load(seed: int) -> tuple[datasets.Dataset, datasets.Dataset, datasets.Dataset]:
    """Training, validation and unseen classes.

    The 231 unseen classes are the same for every seed. Of the others 32 are held out
    to pick the best weights and to decide when to project; which, is up to the seed.
    """
    seen, unseen = datasets.emoji().split_classes(230, seed=0)
    training, validation = seen.split_classes(198, seed=seed)
    return training, validation, unseen


def train(
    method: str,
    training: datasets.Dataset,
    validation: datasets.Dataset,
    steps: int,
    seed: int,
    verbose: int = 2,
) -> tuple[CCPModel, CCPCallback]:
    keras.utils.set_random_seed(seed)
    proxies_per_class, max_projections = METHODS[method]
    embedder = build_embedder(small_cnn(), embedding_dim=64, pooling="flatten")
    model = CCPModel(embedder, training.num_classes, proxies_per_class)
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, steps, alpha=0.02)
    model.compile(keras.optimizers.Adam(schedule), losses.MultiSimilarityLoss())
    callback = CCPCallback(
        training,
        validation,
        pool_size=6,
        patience=4,
        max_projections=max_projections,
        seed=seed,
    )
    batches = balanced_batches(
        training,
        classes_per_batch=4,
        samples_per_class=4,
        seed=seed,
        augment=small_image_augmentation(flip=True),
    )
    model.fit(
        batches,
        steps_per_epoch=INTERVAL,
        epochs=steps // INTERVAL,
        verbose=verbose,
        callbacks=[callback],
    )
    return model, callback


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
    parser.add_argument("--out", type=pathlib.Path, help="default: runs/emoji")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a taste: CCP alone")
    arguments = parser.parse_args()
    name = "emoji-quick" if arguments.quick else "emoji"
    out, seed = arguments.out or pathlib.Path("runs", name), arguments.seed
    steps, methods = STEPS, list(METHODS)
    if arguments.quick:
        steps, methods = 800, ["CCP"]
    start = time.time()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    training, validation, test = load(seed)
    print(f"training:   {training}\nvalidation: {validation}\nunseen:     {test}")
    results = {"raw pixels": score(raw_pixels(test.images), test.labels)}
    for method in methods:
        print(f"\n{method}, batches of 16, {steps} steps")
        model, callback = train(method, training, validation, steps, seed)
        embeddings = model.predict(test.images, verbose=0)
        results[method] = score(embeddings, test.labels)

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
        print(f"{name:<20}{figures}")
    print(
        f"\nCCP made {results['num_projections']} projections. {results['seconds']} s. "
        f"Written to {out}: neighbours.png, embedder/, results.json, test_set.npz"
    )


if __name__ == "__main__":
    main()

"""Trains one model for each line of a file of settings, and writes one line of scores.

What was tried to make CCP pay more: other proxies at a projection, their own rate,
other times of a projection, and what becomes of weights and rate there. Settings are
chosen by `val`; `test` is written beside it and decides nothing.

    python recipes.py settings.jsonl scores.jsonl --data ~/data

A setting is a JSON object with the keys of `DEFAULTS`.
"""

import argparse
import json
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
)
from keras_ccp.backbones import efficientnet_lite0, small_cnn
from keras_ccp.callback import draw_pool
from keras_ccp.k_center import k_center_greedy
from keras_ccp.model import reset_slots
from keras_ccp.pipeline import small_image_augmentation

DEFAULTS = {
    "data": "emoji",  # or "omniglot", "grocery"
    "loss": "contrastive",
    "largs": {},  # arguments of the loss
    "P": 2,  # classes in a batch
    "K": 4,  # images of each
    "k": 4,  # proxies of a class, 0 for pairs
    "pool": None,
    "steps": 2000,
    "interval": 100,  # steps from one evaluation to the next
    "lr": 1e-3,
    "cosine": True,
    "norm": "lipschitz",
    "wd": 0.0,
    "mult": 1.0,  # of the proxies' rate
    "inb": 0.0,  # weight of in-batch pairs
    "lam": 2e-4,
    "maxp": None,  # projections at most
    "restore": True,
    "patience": 4,
    "every": None,  # projects after so many evaluations, whatever MAP@R does
    "select": "kcenter",  # or "mean", "kmeans", "random", "center+kcenter"
    "partial": 1.0,  # of the way from the old proxies to the new ones
    "accept": False,  # goes back to the run's best where a problem stayed below it
    "lr_decay": 1.0,  # of the rate at each projection
    "seed": 0,
    "fold": 0,
}


class Recipe(CCPCallback):
    """CCPCallback with other proxies, at other times."""

    def __init__(self, pool, validation, setting, rate_factor):
        self.setting, self.rate_factor = setting, rate_factor
        self.history, self.measured = [], []
        super().__init__(
            pool,
            validation,
            pool_size=setting["pool"] or (6 if setting["data"] == "emoji" else 12),
            patience=setting["patience"],
            stop_patience=10**6,
            max_projections=setting["maxp"],
            restore_on_projection=setting["restore"],
            seed=setting["seed"],
        )

    def on_epoch_end(self, epoch, logs=None):
        map_at_r = self.evaluate()["map_at_r"]
        self.history.append(map_at_r)
        self._record(map_at_r)
        limit, every = self.max_projections, self.setting["every"]
        if not self._has_proxies or (limit or 10**6) <= self.num_projections:
            return
        is_due = (epoch + 1) % every == 0 if every else self.wait >= self.patience
        if limit == 0 or not is_due:
            return
        best, of_run = self._best_of_problem, self._best_of_run
        if best.embedder_weights is None:
            return
        if self.setting["accept"] and best.map_at_r < of_run.map_at_r:
            self._best_of_problem = of_run
        self.project()
        self.rate_factor.assign(self.rate_factor * self.setting["lr_decay"])

    def _choose_proxies(self, covered):
        model, select = self.model, self.setting["select"]
        rng = np.random.default_rng([self._seed, self.num_projections])
        labels, count = self.pool.labels, model.num_classes
        rows, mask = draw_pool(labels, count, self.pool_size, rng)
        drawn = np.sort(rows[mask])
        embeddings = model.predict(self.pool.batches(drawn), verbose=0)
        places = np.searchsorted(drawn, np.where(mask, rows, drawn[0]))
        pool, k = embeddings[places], model.proxies_per_class
        means = np.stack(
            [own[known].mean(0) for own, known in zip(pool, mask, strict=True)]
        )
        old = np.asarray(model.normalize(model.proxies))
        new = pool[:, :k]
        if select.endswith("kcenter"):
            picks = k_center_greedy(pool, covered, k, mask)
            new = np.take_along_axis(pool, picks[..., None], axis=1)
        if select == "center+kcenter":
            new[:, 0] = means
        if select == "mean":
            new = np.repeat(means[:, None], k, axis=1)
        if select == "kmeans":
            new = np.stack(
                [kmeans(x[m], k, rng) for x, m in zip(pool, mask, strict=True)]
            )
        if self.history:
            new = old + self.setting["partial"] * (new - old)
        model.proxies.assign(new.astype("float32"))
        reset_slots(model.optimizer, model.proxies)
        others = ~np.eye(count, dtype=bool)
        self.measured.append(
            {
                "evaluation": len(self.history),
                "old_to_mean": distance(old.mean(1), means),
                "new_to_mean": distance(new.mean(1), means),
                "spread_of_classes": distance(pool, means[:, None])[mask].mean(),
                "spread_of_proxies": distance(new, new.mean(1)[:, None]).mean(),
                "between_classes": distance(means[:, None], means)[others].mean(),
            }
        )
        for name in ("old_to_mean", "new_to_mean"):
            self.measured[-1][name] = self.measured[-1][name].mean()
        self.measured[-1] = {k: float(v) for k, v in self.measured[-1].items()}
        return True


def distance(a, b):
    return np.linalg.norm(a - b, axis=-1)


def kmeans(x, k, rng, rounds=10):
    centers = x[rng.choice(len(x), k, replace=len(x) < k)].copy()
    for _ in range(rounds):
        nearest = distance(x[:, None], centers).argmin(1)
        for number in np.unique(nearest):
            centers[number] = x[nearest == number].mean(0)
    return centers


def load(name: str, root: pathlib.Path) -> list[datasets.Dataset]:
    """Training and test classes, arrays that fit the network."""
    if name == "emoji":
        return list(datasets.emoji().split_classes(230, seed=0))
    if name == "omniglot":
        return list(datasets.npz(root / "omniglot_small_28.npz").split_classes(0.5))
    parts = datasets.npz(root / "grocery_jpg128.npz").split_classes(0.5)
    return [
        datasets.Dataset(
            np.stack([small_photo(encoded) for encoded in part.images]),
            part.labels,
            part.class_names,
        )
        for part in parts
    ]


def small_photo(encoded):
    image = tf.io.decode_jpeg(encoded, channels=3)
    image = tf.image.resize(image, (104, 104), antialias=True)
    return np.clip(np.round(image), 0, 255).astype("uint8")


def central(data):
    images = data.images[:, 4:100, 4:100]
    return datasets.Dataset(images, data.labels, data.class_names)


def crop_96(images, seed):
    seeds = tf.random.experimental.stateless_split(seed, 2)
    corners = tf.random.stateless_uniform((len(images), 2), seeds[0], 0, 9, tf.int32)
    images = tf.map_fn(
        lambda pair: tf.slice(pair[0], (pair[1][0], pair[1][1], 0), (96, 96, 3)),
        (images, corners),
        fn_output_signature=images.dtype,
    )
    is_mirrored = tf.random.stateless_uniform((len(images), 1, 1, 1), seeds[1]) < 0.5
    return tf.where(is_mirrored, images[:, :, ::-1], images)


def run(setting: dict, root: pathlib.Path) -> dict:
    """Trains one model and scores it."""
    setting = {**DEFAULTS, **setting}
    keras.backend.clear_session()
    keras.utils.set_random_seed(setting["seed"])
    seen, unseen = load(setting["data"], root)
    ids = datasets.mlrc_folds(seen.num_classes, 4)[setting["fold"]]
    training, validation = map(seen.select_classes, ids)
    pool = training
    if setting["data"] == "grocery":
        pool, validation, unseen = map(central, (training, validation, unseen))
        backbone, head = efficientnet_lite0((96, 96, 3), weights="imagenet"), (128,)
        augment = crop_96
    else:
        backbone, head = small_cnn(training.images.shape[1:]), (64, "flatten")
        augment = small_image_augmentation(flip=setting["data"] == "emoji")
    model = CCPModel(
        build_embedder(backbone, *head, normalization=setting["norm"]),
        training.num_classes,
        setting["k"],
        setting["lam"],
        setting["inb"],
        setting["norm"],
        proxy_learning_rate_multiplier=setting["mult"],
        weight_decay=setting["wd"],
    )
    factor, steps = tf.Variable(1.0, trainable=False), setting["steps"]
    cosine = keras.optimizers.schedules.CosineDecay(setting["lr"], steps, alpha=0.02)

    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return factor * (cosine(step) if setting["cosine"] else setting["lr"])

    loss = losses.get(setting["loss"], **setting["largs"])
    model.compile(keras.optimizers.Adam(Schedule()), loss)
    callback, start = Recipe(pool, validation, setting, factor), time.time()
    sizes = setting["P"], setting["K"]
    batches = balanced_batches(training, *sizes, setting["seed"], augment=augment)
    interval = setting["interval"]
    model.fit(
        batches,
        steps_per_epoch=interval,
        epochs=steps // interval,
        verbose=0,
        callbacks=[callback],
    )
    scores = model.evaluate(unseen)
    return {
        "setting": setting,
        "val": max(callback.history),
        "test": scores["map_at_r"],
        "p1": scores["precision_at_1"],
        "history": callback.history,
        "projections": callback.num_projections,
        "measured": callback.measured,
        "seconds": round(time.time() - start),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=pathlib.Path)
    parser.add_argument("scores", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path())
    options = parser.parse_args()
    for line in options.settings.read_text().splitlines():
        result = run(json.loads(line), options.data)
        with options.scores.open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

"""CCPCallback: MAP@R on held-out classes decides when the next problem begins."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_ccp import retrieval
from keras_ccp.distribute import has_workers
from keras_ccp.k_center import k_center_greedy
from keras_ccp.model import CCPModel, reset_slots
from keras_ccp.pipeline import EvaluationData

logger = logging.getLogger("keras_ccp")


class CCPCallback(keras.callbacks.Callback):
    """Stops each proxy problem by MAP@R and begins the next one.

    At the start of the training the proxies become K-Center picks of the pool. At
    the end of each epoch the validation images are embedded and `val_map_at_r`,
    `val_precision_at_1`, `val_precision_at_r` and `projection` (the number of
    projections so far) are written into the logs. After `patience` epochs without
    improvement the problem is over and `project()` begins the next one. At the end
    of the training the best weights of the whole run are restored. One Keras epoch
    is one evaluation interval: choose it by `steps_per_epoch`.

    A model without proxies is evaluated and restored in the same way, with no
    projections: the pairwise baseline. Each `fit` starts afresh; beside a `Backup` a
    killed one goes on. Keras' `BackupAndRestore` forgets the best weights and the
    waiting: a run it resumes projects at other times.

    A callback of the same `fit` that has a method `on_projection(best, is_last)` is
    told when a problem has ended: its best weights (`BestWeights`), and whether the
    training ends with it. Where it does not, the model has the proxies of the next
    problem by then, and `model.num_projections` counts the projection.
    `at_best(model, best)` goes back for the length of a `with` block.

    Source: Algorithm 1 of "Deep Metric Learning with Chance Constraints"
    (https://arxiv.org/abs/2209.09060).

    ```python
    training, validation = dataset.split_classes(0.75)
    model.fit(batches, steps_per_epoch=25, epochs=1000,
              callbacks=[CCPCallback(training, validation, seed=0)])
    ```

    Args:
        pool: images of all training classes, from which proxies are chosen: a
            `keras_ccp.datasets.Dataset`, `(images, labels)` arrays or a finite
            batched `tf.data.Dataset` of them in an order that does not change.
        validation: images of other classes, in one of the same forms.
        pool_size: int, images drawn from each class at a projection. Defaults to 12.
        patience: int, evaluations without improvement that end a problem.
            Defaults to 3.
        min_delta: float, MAP@R must rise by more than this to count. Defaults
            to 1e-5.
        stop_patience: int, evaluations without improvement of the run's best that
            end the training. Defaults to 60.
        max_projections: int, projections to make at most, or `None` for no limit.
            Training goes on after the last. Defaults to `None`.
        restore_best: bool, end with the best weights of the run. Defaults to
            `True`.
        restore_on_projection: bool, go on from the best weights of the ended problem
            instead of the current ones. Defaults to `True`, the paper's way;
            `False` is that of its published code.
        seed: int, decides which images are drawn, or `None` for a random one (for 0
            where several workers train, all of which have to choose the same).

    Attributes:
        num_projections: int, projections so far in this `fit`.
        wait: int, evaluations since the problem's last improvement.

    Raises:
        ValueError: if data are empty or badly labelled.
    """

    def __init__(
        self,
        pool: Any,
        validation: Any,
        pool_size: int = 12,
        patience: int = 3,
        min_delta: float = 1e-5,
        stop_patience: int = 60,
        max_projections: int | None = None,
        restore_best: bool = True,
        restore_on_projection: bool = True,
        seed: int | None = None,
    ):
        super().__init__()
        self.pool = EvaluationData(pool, "pool")
        self.validation = EvaluationData(validation, "validation")
        if self.validation.shares_images(self.pool):
            logger.warning(
                "`validation` and `pool` share images: what was trained on does not "
                "tell when to stop. Hold classes out by `Dataset.split_classes(0.75)`"
            )
        self.pool_size = pool_size
        self.patience = patience
        self.min_delta = min_delta
        self.stop_patience = stop_patience
        self.max_projections = max_projections
        self.restore_best = restore_best
        self.restore_on_projection = restore_on_projection
        self.seed = seed
        self._reset()

    def _reset(self):
        self.wait = self._wait_of_run = 0
        self._best_of_problem = self._best_of_run = BestWeights()
        self._seed = self.seed
        if self.seed is None:
            self._seed = np.random.SeedSequence().entropy

    @property
    def num_projections(self) -> int:
        """Projections so far in this `fit`."""
        return int(self.model.num_projections.numpy())

    # ==== Algorithm 1: a sequence of proxy problems ====

    def on_train_begin(self, logs=None):
        self._reset()
        if self.seed is None and has_workers(self.model.distribute_strategy):
            self._seed = 0  # so that all of them choose the same proxies
        self._check_data()
        self.model.num_projections.assign(0)
        self.model.drop_snapshot()
        # So that there is something to go back to if the first steps diverge.
        self._best_of_run = BestWeights.of(self.model)
        # Nothing is covered yet. As in the published code the first pick is the image
        # farthest from the origin.
        dim = self.model.embedder.output_shape[-1]
        origin = np.zeros((self.model.num_classes, 1, dim), "float32")
        if not self._is_finite() or (
            self._has_proxies and not self._choose_proxies(covered=origin)
        ):
            raise ValueError(
                "Weights and embeddings must be finite at the start of the training. "
                "Received: NaN or infinity\nBuild or load the model again"
            )

    def on_epoch_end(self, epoch, logs=None):
        metrics = self.evaluate() if self._is_finite() else None
        if metrics is None:
            self._break_off("weights or embeddings are no longer finite")
            return
        logs = {} if logs is None else logs
        for name in ("map_at_r", "precision_at_1", "precision_at_r"):
            logs[f"val_{name}"] = metrics[name]
        logs["projection"] = self.num_projections
        self._record(metrics["map_at_r"])
        limit = self.max_projections
        may_project = limit is None or self.num_projections < limit
        if self._wait_of_run >= self.stop_patience:
            self._stop(f"no improvement in {self.stop_patience} evaluations")
        elif self.wait >= self.patience and may_project and self._has_proxies:
            self.project()

    def on_train_end(self, logs=None):
        self._tell(self._best_of_problem, is_last=True)
        if self.restore_best:
            self._best_of_run.restore(self.model)

    def evaluate(self) -> dict | None:
        """Embeds the validation images and measures retrieval among them.

        Returns:
            dict of `retrieval.evaluate`, or `None` where embeddings are not finite.
        """
        embeddings = self.model.embed(self.validation)
        if not np.isfinite(embeddings).all():
            return None
        return retrieval.evaluate(embeddings, self.validation.labels)

    def _record(self, map_at_r):
        """Keeps the weights where they are the best, else counts the waiting."""
        improves_problem = map_at_r > self._best_of_problem.map_at_r + self.min_delta
        improves_run = map_at_r > self._best_of_run.map_at_r + self.min_delta
        self.wait = 0 if improves_problem else self.wait + 1
        self._wait_of_run = 0 if improves_run else self._wait_of_run + 1
        # The best of the run is never below that of the problem, so what improves
        # the run improves the problem.
        if improves_problem:
            self._best_of_problem = BestWeights.of(self.model, map_at_r)
        if improves_run:
            self._best_of_run = self._best_of_problem

    def project(self) -> None:
        """Ends the current problem and begins the next one.

        The best weights of the problem are restored (with `restore_on_projection`) and
        become the snapshot, and its best proxies give way to pool images that K-Center
        chooses to cover what they do not. A model without proxies has no projections.
        """
        best = self._best_of_problem
        if not self.restore_on_projection:
            current = BestWeights.of(self.model)
        best.restore(self.model)
        self.model.take_snapshot()
        converged = self.model.proxy_embeddings()
        if not self.restore_on_projection:
            current.restore(self.model)
        if not self._choose_proxies(covered=converged):
            self._break_off("the embeddings of `pool` are no longer finite")
            return
        self.model.num_projections.assign_add(1)
        self.wait = 0
        self._best_of_problem = BestWeights()
        logger.info(
            "projection %d: new proxies (the last problem reached MAP@R %.4f)",
            self.num_projections,
            best.map_at_r,
        )
        self._tell(best, is_last=False)

    # ==== Algorithm 2: the next proxies ====

    def _choose_proxies(self, covered):
        """Embeds freshly drawn images and takes those that cover what is not covered.

        Says whether the embeddings are finite; if not, nothing is changed.
        """
        model = self.model
        # Each problem has a generator of its own, so that a run which is resumed
        # draws what it would have drawn.
        rng = np.random.default_rng([self._seed, self.num_projections])
        rows, mask = draw_pool(self.pool.labels, model.num_classes, self.pool_size, rng)
        drawn = np.sort(rows[mask])
        embeddings = model.predict(self.pool.batches(drawn), verbose=0)
        if not np.isfinite(embeddings).all():
            return False
        # What has no image is masked, and only needs to be finite.
        places = np.searchsorted(drawn, np.where(mask, rows, drawn[0]))
        picks = k_center_greedy(
            embeddings[places], covered, model.proxies_per_class, mask
        )
        places = np.take_along_axis(places, picks, axis=1)
        if model.samples is None:
            model.proxies.assign(embeddings[places])
            reset_slots(model.optimizer, model.proxies)
        else:
            read, places = np.unique(drawn[places], return_inverse=True)
            images = np.concatenate(list(self.pool.batches(read).as_numpy_iterator()))
            model.samples.assign(images[places.reshape(picks.shape)])
        return True

    # ==== Parts ====

    @property
    def _has_proxies(self):
        return self.model.proxies_per_class > 0

    def _check_data(self):
        for data in (self.pool, self.validation):
            self.model.check_images(data)
        classes = np.unique(self.pool.labels)
        num_classes = self.model.num_classes
        if self._has_proxies and not np.array_equal(classes, np.arange(num_classes)):
            raise ValueError(
                f"`pool` must have images of each class from 0 to {num_classes - 1}. "
                f"Received: {len(classes)} classes from {classes[0]} to {classes[-1]}\n"
                "Pass the images that are trained on, with the labels of the training"
            )

    def _is_finite(self):
        # Not the embeddings alone: ReLU turns the NaN of broken weights into zeros.
        return all(np.isfinite(weight).all() for weight in self.model.get_weights())

    def _tell(self, best, is_last):
        """Calls the callbacks that listen, if the problem was evaluated at all."""
        if best.embedder_weights is not None:
            for callback in self.model.fit_callbacks:
                if hasattr(callback, "on_projection"):
                    callback.on_projection(best, is_last)

    def _stop(self, reason):
        logger.warning("training stopped: %s", reason)
        self.model.stop_training = True

    def _break_off(self, reason):
        self._stop(reason)
        self._best_of_run.restore(self.model)

    # ==== State beside the model's ====

    def get_state(self) -> dict[str, Any]:
        """What `Backup` keeps of this callback: arrays, numbers and strings by name."""
        return {
            "wait": self.wait,
            "wait_of_run": self._wait_of_run,
            # As a string, since one that was drawn has 128 bits.
            "seed": str(self._seed),
            "best_of_problem": self._best_of_problem.get_state(),
            "best_of_run": self._best_of_run.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from what `get_state` gave, in place of what `fit` began with.

        Args:
            state: its numbers and strings also as arrays.
        """
        self.wait = int(state["wait"])
        self._wait_of_run = int(state["wait_of_run"])
        self._seed = int(str(state["seed"]))
        self._best_of_problem = BestWeights.from_state(state["best_of_problem"])
        self._best_of_run = BestWeights.from_state(state["best_of_run"])


def draw_pool(
    labels: np.ndarray, num_classes: int, pool_size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draws `pool_size` images of each class without repetition, or all of fewer.

    Gives `(num_classes, pool_size)` rows of the `(n,)` labels, and a mask that is
    `False` where a class has no further image.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    sizes = np.bincount(labels, minlength=num_classes)
    starts = np.cumsum(sizes) - sizes
    positions = np.arange(pool_size)
    mask = positions < sizes[:, None]
    return order[np.where(mask, starts[:, None] + positions, 0)], mask


@dataclasses.dataclass
class BestWeights:
    """Highest MAP@R of a problem or of the run, and the weights that gave it.

    Args:
        map_at_r: float, lower than any without weights.
        embedder_weights: arrays of the embedder, or `None` for nothing kept.
        proxies: array of the proxies or samples, or `None` without them.
    """

    map_at_r: float = -np.inf
    embedder_weights: list[np.ndarray] | None = None
    proxies: np.ndarray | None = None

    @classmethod
    def of(cls, model: CCPModel, map_at_r: float = -np.inf) -> "BestWeights":
        """Keeps the weights as they are now."""
        proxies = _proxies(model)
        proxies = None if proxies is None else proxies.numpy()
        return cls(map_at_r, model.embedder.get_weights(), proxies)

    def restore(self, model: CCPModel) -> None:
        """Gives the weights back, if there are any."""
        values = self.embedder_weights or []
        # As `set_weights`, without its checks of hundreds of shapes.
        for weight, value in zip(model.embedder.weights, values, strict=False):
            weight.value.assign(value, read_value=False)
        if self.proxies is not None:
            _proxies(model).assign(self.proxies)

    def get_state(self) -> dict[str, Any]:
        """The fields that are not `None`, by name, and the weights by position."""
        weights = {str(i): w for i, w in enumerate(self.embedder_weights or [])}
        state = {"map_at_r": self.map_at_r, "embedder_weights": weights or None}
        state["proxies"] = self.proxies
        return {name: value for name, value in state.items() if value is not None}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "BestWeights":
        """What `get_state` was called on."""
        weights = state.get("embedder_weights")
        weights = None if weights is None else list(weights.values())
        return cls(float(state["map_at_r"]), weights, state.get("proxies"))


def _proxies(model):
    return model.proxies if model.samples is None else model.samples


@contextlib.contextmanager
def at_best(model: CCPModel, best: BestWeights) -> Iterator[None]:
    """Gives a model other weights and proxies for the length of a `with` block.

    Args:
        model: model the weights were taken from.
        best: weights to have inside of the block.
    """
    current = BestWeights.of(model)
    best.restore(model)
    try:
        yield
    finally:
        current.restore(model)


class WarmUp(keras.callbacks.Callback):
    """Trains the embedding head (and the proxies) alone for the first epochs.

    A head with random weights would send random gradients into a pretrained backbone.
    While it warms up, every layer of the embedder but the last one with weights is
    frozen, and runs in inference mode: batch-norm statistics stay as they are. The
    published runs of ProxyAnchor, ProxyNCA++ and SoftTriple warm up for one epoch;
    those of CCP do not.

    Args:
        epochs: int, epochs in which the head is trained alone. Defaults to 1.
    """

    def __init__(self, epochs: int = 1):
        super().__init__()
        self.epochs = epochs

    def on_epoch_begin(self, epoch, logs=None):
        self.model.train_head_alone(epoch < self.epochs)

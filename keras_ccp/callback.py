"""CCPCallback: MAP@R on held-out classes decides when the next problem begins."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_ccp import retrieval
from keras_ccp.checks import check_int, check_number
from keras_ccp.distribute import has_workers
from keras_ccp.k_center import k_center_greedy
from keras_ccp.model import (
    CCPModel,
    check_evaluation_images,
    check_has_pairs,
    reset_slots,
    warn_of_shared_images,
)
from keras_ccp.pipeline import EvaluationData


@dataclasses.dataclass
class BestWeights:
    """Highest MAP@R of a problem or of the run, and the weights that gave it.

    Args:
        map_at_r: float, lower than any without weights.
        embedder_weights: arrays of the embedder, or `None` for nothing kept.
        references: arrays of the reference bank, or `None` without one.
    """

    map_at_r: float = -np.inf
    embedder_weights: list[np.ndarray] | None = None
    references: list[np.ndarray] | None = None

    @classmethod
    def of(cls, model: CCPModel, map_at_r: float = -np.inf) -> "BestWeights":
        """Keeps the weights as they are now.

        Args:
            model: model whose embedder and references are kept.
            map_at_r: float, what the weights reach.
        """
        bank = model.reference_bank
        references = None if bank is None else bank.get_weights()
        return cls(map_at_r, model.embedder.get_weights(), references)

    def restore(self, model: CCPModel) -> None:
        """Gives the weights back, if there are any.

        Args:
            model: model the weights were taken from.
        """
        if self.embedder_weights is not None:
            # As `set_weights`, without its checks of hundreds of shapes.
            weights = model.embedder.weights
            for weight, value in zip(weights, self.embedder_weights, strict=True):
                weight.value.assign(value, read_value=False)
        if self.references is not None:
            model.reference_bank.set_weights(self.references)

    def get_state(self) -> dict[str, Any]:
        """The fields, lists as dicts by position and without those that are `None`."""
        state = {"map_at_r": self.map_at_r}
        for field in ("embedder_weights", "references"):
            if (weights := getattr(self, field)) is not None:
                state[field] = {str(i): weight for i, weight in enumerate(weights)}
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "BestWeights":
        """What `get_state` was called on.

        Args:
            state: what `get_state` returned, `map_at_r` also as an array.
        """
        weights = [
            list(state[field].values()) if field in state else None
            for field in ("embedder_weights", "references")
        ]
        return cls(float(state["map_at_r"]), *weights)


logger = logging.getLogger("keras_ccp")


class Pool:
    """Draws images of each class and chooses new proxies among them.

    Args:
        data: images of all training classes.
        pool_size: int, images to draw of each class; a smaller class gives all.
        seed: int, decides which images are drawn, or `None` for a random one.
    """

    def __init__(self, data: EvaluationData, pool_size: int, seed: int | None):
        self.data = data
        self.pool_size = pool_size
        self.has_seed = seed is not None
        self.seed = np.random.SeedSequence().entropy if seed is None else int(seed)

    def check(self, num_classes: int, proxies_per_class: int) -> None:
        """Raises if the pool cannot give proxies to each class.

        Args:
            num_classes: int, number of training classes.
            proxies_per_class: int, proxies to be chosen of each class.

        Raises:
            ValueError: if a class is missing or not one of the training classes.
        """
        labels = self.data.labels
        if labels.max() >= num_classes:
            raise ValueError(
                f"`pool` must have labels from 0 to {num_classes - 1} "
                f"(num_classes={num_classes}). Received: label {labels.max()}"
            )
        sizes = np.bincount(labels, minlength=num_classes)
        missing = np.flatnonzero(sizes == 0)
        if missing.size:
            raise ValueError(
                f"`pool` must have images of each of the model's {num_classes} "
                f"classes. Received: none of {missing.size} classes, "
                f"the first is class {missing[0]}"
            )
        wanted = max(self.pool_size, proxies_per_class)
        small = int((sizes < wanted).sum())
        if small:
            logger.info(
                "%d of %d pool classes have fewer than %d images: all of them are "
                "candidates, and proxies repeat where there are more proxies",
                small,
                num_classes,
                wanted,
            )

    def choose(
        self, model: CCPModel, covered: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Embeds freshly drawn images and picks among them by greedy K-Center.

        Args:
            model: model whose embedder is used as it is now.
            covered: `(num_classes, m, dim)` points that are covered already.

        Returns:
            `(num_classes, proxies_per_class)` rows of the pool that were picked and
            their `(num_classes, proxies_per_class, dim)` embeddings, or `None` if an
            embedding is not finite.

        Raises:
            ValueError: if several processes would draw with seeds of their own.
        """
        if not self.has_seed and has_workers(model.distribute_strategy):
            raise ValueError(
                "`seed` must be an integer where several workers train, so that all "
                "of them choose the same proxies. Received: seed=None"
            )
        # Each problem has a generator of its own, so that a run which is resumed
        # draws what it would have drawn.
        rng = np.random.default_rng([self.seed, int(model.num_projections.numpy())])
        rows, mask = draw_pool(self.data.labels, model.num_classes, self.pool_size, rng)
        drawn = np.sort(rows[mask])
        embeddings = model.predict(self.data.batches(drawn), verbose=0)
        if not np.isfinite(embeddings).all():
            return None
        # What has no image is masked, and only needs to be finite.
        places = np.searchsorted(drawn, np.where(mask, rows, drawn[0]))
        candidates = embeddings[places]
        picks = k_center_greedy(candidates, covered, model.proxies_per_class, mask)
        places = np.take_along_axis(places, picks, axis=1)
        return drawn[places], embeddings[places]

    def images(self, rows: np.ndarray) -> np.ndarray:
        """Reads some images of the pool.

        Args:
            rows: `(num_classes, k)` rows of the pool.

        Returns:
            `(num_classes, k, height, width, channels)` images.
        """
        read, positions = np.unique(rows, return_inverse=True)
        images = np.concatenate(list(self.data.batches(read).as_numpy_iterator()))
        return images[positions.reshape(rows.shape)]


def draw_pool(
    labels: np.ndarray, num_classes: int, pool_size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draws images of each class without repetition.

    Args:
        labels: `(n,)` int class of each image, every class present.
        num_classes: int, number of classes.
        pool_size: int, images to draw of each class; a smaller class gives all.
        rng: source of randomness.

    Returns:
        `rows`, `(num_classes, pool_size)` int indices into `labels`, and `mask` of
        the same shape, `False` where a class has no further image.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    sizes = np.bincount(labels, minlength=num_classes)
    starts = np.cumsum(sizes) - sizes
    positions = np.arange(pool_size)
    mask = positions < sizes[:, None]
    rows = order[np.where(mask, starts[:, None] + positions, 0)]
    return rows, mask


class ProblemEvents(keras.callbacks.Callback):
    """A callback that tells the others when a proxy problem has ended.

    Each callback of the `fit` that has the method is called as
    `on_projection(best, is_last)`: with the best weights and proxies of the problem
    (`BestWeights`), and whether the training ends with it. Where it does not, the model
    has the proxies of the next problem by then, and `model.num_projections` counts the
    switch. `at_best(model, best)` goes back for the length of a `with` block.
    """

    _listeners: list[keras.callbacks.Callback] = []

    def set_callbacks(self, callbacks: list[keras.callbacks.Callback]) -> None:
        """Takes those that listen; `CCPModel.fit` calls it.

        Args:
            callbacks: all callbacks of the `fit`.
        """
        self._listeners = [c for c in callbacks if hasattr(c, "on_projection")]

    def tell_problem_end(self, best: BestWeights, is_last: bool) -> None:
        """Calls the callbacks that listen, if the problem was evaluated at all.

        Args:
            best: the best weights of the problem.
            is_last: bool, whether no problem follows.
        """
        if best.embedder_weights is not None:
            for listener in self._listeners:
                listener.on_projection(best, is_last)


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
    frozen, batch-norm statistics included. The published runs of ProxyAnchor,
    ProxyNCA++ and SoftTriple warm up for one epoch; those of CCP do not.

    Args:
        epochs: int, epochs in which the head is trained alone. Defaults to 1.

    Raises:
        TypeError: if `epochs` is not an integer.
        ValueError: if `epochs` is below 1.
    """

    def __init__(self, epochs: int = 1):
        super().__init__()
        check_int("epochs", epochs, minimum=1)
        self.epochs = epochs
        self._frozen: list[keras.layers.Layer] = []

    def on_epoch_begin(self, epoch, logs=None):
        if epoch >= self.epochs:
            self.thaw()
        elif not self._frozen:
            self._freeze()

    def on_train_end(self, logs=None):
        self.thaw()

    def _freeze(self) -> None:
        if not isinstance(self.model, CCPModel):
            raise TypeError(
                "WarmUp needs a `CCPModel`. "
                f"Received: type(model)={type(self.model).__name__}"
            )
        trained = [
            layer for layer in self.model.embedder.layers if layer.trainable_weights
        ]
        self._frozen = trained[:-1]
        self._set_trainable(False)

    def thaw(self) -> None:
        """Ends the warm-up; `CCPModel.fit` calls it also where it is interrupted."""
        if self._frozen:
            self._set_trainable(True)
            self._frozen = []

    def _set_trainable(self, trainable: bool) -> None:
        for layer in self._frozen:
            layer.trainable = trainable
        # What is trainable was baked into the step when it was traced.
        self.model.make_train_function(force=True)


class CCPCallback(ProblemEvents):
    """Stops each proxy problem by MAP@R and begins the next one.

    At the start of the training the proxies become K-Center picks of the pool. At
    the end of each epoch the validation images are embedded and `val_map_at_r`,
    `val_precision_at_1`, `val_precision_at_r` and `projection` (the number of
    switches so far) are written into the logs. After `patience` epochs without
    improvement the problem is over and `project()` begins the next one. At the end
    of the training the best weights of the whole run are restored. One Keras epoch
    is one evaluation interval: choose it by `steps_per_epoch`.

    A model without proxies is evaluated and restored in the same way, with no
    switches: the pairwise baseline. Each `fit` starts afresh; beside a `Backup` a
    killed one goes on. Keras' `BackupAndRestore` forgets the best weights and the
    waiting: a run it resumes switches at other times. Other callbacks are told when a
    problem has ended: see `ProblemEvents`, and `ProjectionLog` for the numbers.

    Args:
        pool: images of all training classes, from which proxies are chosen: a
            `keras_ccp.datasets.Dataset`, `(images, labels)` arrays or a finite
            batched `tf.data.Dataset` of them in an order that does not change.
        validation: images of other classes, in one of the same forms.
        pool_size: int, images drawn from each class at a switch. Defaults to 12.
        patience: int, evaluations without improvement that end a problem.
            Defaults to 3.
        min_delta: float, MAP@R must rise by more than this to count. Defaults
            to 1e-5.
        stop_patience: int, evaluations without improvement of the run's best that
            end the training. Defaults to 60.
        max_projections: int, switches to make at most, or `None` for no limit.
            Training goes on after the last. Defaults to `None`.
        restore_best: bool, end with the best weights of the run. Defaults to
            `True`.
        restore_on_projection: bool, go on from the best weights of the ended problem
            instead of the current ones. Defaults to `True`, the paper's way;
            `False` is that of its published code.
        seed: int, decides which images are drawn, or `None` for a random one.

    Raises:
        TypeError: if data have a form that is not listed.
        ValueError: if data are empty or badly labelled, no validation class has
            two images, or a number is out of range.
    """

    # CCPModel.fit runs this callback before those that read its logs.
    runs_first = True

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
        check_int("pool_size", pool_size, minimum=1)
        check_int("patience", patience, minimum=1)
        check_int("stop_patience", stop_patience, minimum=1)
        check_int("max_projections", max_projections or 0, minimum=0)
        check_int("seed", seed or 0, minimum=0)
        check_number("min_delta", min_delta, minimum=0)
        self.pool = Pool(EvaluationData(pool, "pool"), pool_size, seed)
        self.validation = EvaluationData(validation, "validation")
        warn_of_shared_images(self.validation, self.pool.data)
        check_has_pairs(self.validation)
        self.patience = patience
        self.min_delta = min_delta
        self.stop_patience = stop_patience
        self.max_projections = max_projections
        self.restore_best = restore_best
        self.restore_on_projection = restore_on_projection
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self._best_of_problem = BestWeights()
        self._best_of_run = BestWeights()
        self._wait_of_run = 0

    @property
    def num_projections(self) -> int:
        """Switches so far in this `fit`."""
        return int(self.model.num_projections.numpy())

    # ==== State beside the model's ====

    def get_state(self) -> dict[str, Any]:
        """What `Backup` keeps of this callback, by name."""
        return {
            "wait": self.wait,
            "wait_of_run": self._wait_of_run,
            # As a string, since one that was drawn has 128 bits.
            "pool_seed": str(self.pool.seed),
            "best_of_problem": self._best_of_problem.get_state(),
            "best_of_run": self._best_of_run.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a state, in place of what `fit` began with.

        Args:
            state: what `get_state` returned, its numbers and strings also as arrays.
        """
        self.wait = int(state["wait"])
        self._wait_of_run = int(state["wait_of_run"])
        self.pool.seed = int(str(state["pool_seed"]))
        self._best_of_problem = BestWeights.from_state(state["best_of_problem"])
        self._best_of_run = BestWeights.from_state(state["best_of_run"])

    # ==== Keras events ====

    def on_train_begin(self, logs=None):
        self._reset()
        self._check_model()
        self.model.num_projections.assign(0)
        self.model.snapshot.drop()
        # So that there is something to go back to if the first steps diverge.
        self._best_of_run = BestWeights.of(self.model)
        if self._switches:
            self._choose_first_references()

    def on_epoch_end(self, epoch, logs=None):
        metrics = self.evaluate() if self._is_finite() else None
        if metrics is None:
            self._stop("weights or embeddings are no longer finite")
            self._best_of_run.restore(self.model)
            return
        logs = {} if logs is None else logs
        for name in ("map_at_r", "precision_at_1", "precision_at_r"):
            logs[f"val_{name}"] = metrics[name]
        logs["projection"] = self.num_projections
        self._record(metrics["map_at_r"])
        if self._wait_of_run >= self.stop_patience:
            self._stop(f"no improvement in {self.stop_patience} evaluations")
        elif self._switches and self.wait >= self.patience and self._may_switch:
            self.project()

    def on_train_end(self, logs=None):
        self.tell_problem_end(self._best_of_problem, is_last=True)
        if self.restore_best:
            self._best_of_run.restore(self.model)

    # ==== The parts of an evaluation ====

    def evaluate(self) -> dict | None:
        """Embeds the validation images and measures retrieval among them.

        Returns:
            dict of `retrieval.evaluate`, or `None` where embeddings are not finite.
        """
        embeddings = self._embed(self.validation)
        if not np.isfinite(embeddings).all():
            return None
        return retrieval.evaluate(embeddings, self.validation.labels)

    def project(self) -> None:
        """Ends the current problem and begins the next one.

        The best weights of the problem are restored (with `restore_on_projection`) and
        frozen, and its best proxies give way to pool images that K-Center chooses
        to cover what they do not.

        Raises:
            ValueError: if the model has no proxies.
        """
        if not self._switches:
            raise ValueError(
                "`project` needs a model with proxies. Received: proxies_per_class=0"
            )
        best = self._best_of_problem
        if not self.restore_on_projection:
            current = self.model.embedder.get_weights()
        best.restore(self.model)
        self.model.take_snapshot()
        converged = self.model.proxy_embeddings()
        if not self.restore_on_projection:
            self.model.embedder.set_weights(current)
        if not self._choose_references(covered=converged):
            self._stop("the embeddings of `pool` are no longer finite")
            self._best_of_run.restore(self.model)
            return
        self.model.num_projections.assign_add(1)
        self.wait = 0
        self._best_of_problem = BestWeights()
        logger.info(
            "projection %d: new proxies (the last problem reached MAP@R %.4f)",
            self.num_projections,
            best.map_at_r,
        )
        self.tell_problem_end(best, is_last=False)

    @property
    def _switches(self) -> bool:
        return self.model.reference_bank is not None

    @property
    def _may_switch(self) -> bool:
        limit = self.max_projections
        return limit is None or self.num_projections < limit

    def _check_model(self) -> None:
        if not isinstance(self.model, CCPModel):
            raise TypeError(
                "CCPCallback needs a `CCPModel`. "
                f"Received: type(model)={type(self.model).__name__}"
            )
        for data in (self.pool.data, self.validation):
            check_evaluation_images(data, self.model.image_spec)
        if not self._is_finite():
            raise ValueError(
                "The model's weights must be finite at the start of the training. "
                "Received: NaN or infinity; build or load the model anew"
            )

    def _is_finite(self) -> bool:
        # Not the embeddings alone: ReLU turns the NaN of broken weights into zeros.
        return all(np.isfinite(weight).all() for weight in self.model.get_weights())

    def _choose_first_references(self) -> None:
        num_classes = self.model.num_classes
        self.pool.check(num_classes, self.model.proxies_per_class)
        # Nothing is covered yet. As in the published code the first pick is the
        # image farthest from the origin.
        dim = self.model.embedder.output_shape[-1]
        origin = np.zeros((num_classes, 1, dim), "float32")
        if not self._choose_references(covered=origin):
            raise ValueError(
                "`pool` must have finite embeddings under the starting weights. "
                "Received: NaN or infinity; look at the images and the embedder"
            )

    def _choose_references(self, covered: np.ndarray) -> bool:
        """Chooses and assigns new references; says whether embeddings are finite."""
        chosen = self.pool.choose(self.model, covered)
        if chosen is None:
            return False
        rows, embeddings = chosen
        if self.model.sample_bank is not None:
            self.model.sample_bank.assign(self.pool.images(rows))
            return True
        self.model.proxy_bank.assign(embeddings)
        if self.model.optimizer is not None:
            reset_slots(self.model.optimizer, self.model.proxy_bank.proxies)
        return True

    def _embed(self, data: EvaluationData, rows: np.ndarray | None = None):
        return self.model.predict(data.batches(rows), verbose=0)

    def _record(self, map_at_r: float) -> None:
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

    def _stop(self, reason: str) -> None:
        logger.warning("training stopped: %s", reason)
        self.model.stop_training = True

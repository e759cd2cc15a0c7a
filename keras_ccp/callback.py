"""CCPCallback: MAP@R on held-out classes decides when the next problem begins."""

import logging
from typing import Any

import numpy as np

from keras_ccp import retrieval
from keras_ccp.arguments import check_int, check_number
from keras_ccp.best_weights import BestWeights
from keras_ccp.image_checks import (
    check_evaluation_images,
    check_has_pairs,
    warn_of_shared_images,
)
from keras_ccp.model import CCPModel
from keras_ccp.pipeline import EvaluationData
from keras_ccp.pool import Pool
from keras_ccp.problem_events import ProblemEvents
from keras_ccp.projections import reference_embeddings
from keras_ccp.proxies import reset_slots

logger = logging.getLogger("keras_ccp")


class CCPCallback(ProblemEvents):
    """Stops each proxy problem by MAP@R and begins the next one.

    At the start of the training the proxies become K-Center picks of the pool. At
    the end of each epoch the validation images are embedded and `val_map_at_r`,
    `val_precision_at_1`, `val_precision_at_r` and `projection` (the number of
    switches so far) are written into the logs. After `patience` epochs without
    improvement the problem is over and `switch()` begins the next one. At the end
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
        restore_on_switch: bool, go on from the best weights of the ended problem
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
        restore_on_switch: bool = True,
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
        self.restore_on_switch = restore_on_switch
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
            self.switch()

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

    def switch(self) -> None:
        """Ends the current problem and begins the next one.

        The best weights of the problem are restored (with `restore_on_switch`) and
        frozen, and its best proxies give way to pool images that K-Center chooses
        to cover what they do not.

        Raises:
            ValueError: if the model has no proxies.
        """
        if not self._switches:
            raise ValueError(
                "`switch` needs a model with proxies. Received: proxies_per_class=0"
            )
        best = self._best_of_problem
        if not self.restore_on_switch:
            current = self.model.embedder.get_weights()
        best.restore(self.model)
        self.model.take_snapshot()
        converged = reference_embeddings(self.model)
        if not self.restore_on_switch:
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

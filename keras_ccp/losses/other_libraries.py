"""Losses of tensorflow-similarity and tensorflow-addons as pair losses."""

import functools
import importlib
import importlib.util
import inspect
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_ccp.checks import require
from keras_ccp.distribute import gather_batch
from keras_ccp.losses.pair_loss import PairLoss
from keras_ccp.losses.pairs import class_masks, pairwise_distances

# ==== tensorflow-similarity ====


def from_similarity(loss: keras.losses.Loss) -> PairLoss:
    """Makes a pair loss of a loss of tensorflow-similarity (0.17.1).

    ```python
    theirs = tfsim.losses.CircleLoss(reduction="sum_over_batch_size")
    loss = keras_ccp.losses.from_similarity(theirs)
    ```

    Args:
        loss: `MultiSimilarityLoss`, `TripletLoss`, `CircleLoss`, `PNLoss` or
            `SoftNearestNeighborLoss`, made with `reduction="sum_over_batch_size"`:
            Keras 3 refuses that library's default.

    Raises:
        ImportError: If tensorflow-similarity is not installed.
        TypeError: If `loss` is none of these.
    """
    return SimilarityLoss(loss)


@keras.saving.register_keras_serializable(package="keras_ccp")
class SimilarityLoss(PairLoss):
    """A loss of tensorflow-similarity, for pairs with references of any kind.

    The library's losses call a function of queries and keys with the batch on both
    sides; here the keys are the references. The function is the library's own, and
    so is what an anchor without a positive or a negative costs. In one thing it is
    better off: `SoftNearestNeighborLoss` of far points or of one sample is finite.
    The cosine distance expects embeddings of length 1.

    Time and memory grow with the number of references. For `PNLoss`, which also needs
    the distances among the references, and `SoftNearestNeighborLoss`, which is
    written for square matrices, they grow with its square.

    Args:
        loss: The library's loss; see `from_similarity`. Its `reduction` is not used.
        reduction, name: As for `PairLoss`.
    """

    def __init__(
        self,
        loss: keras.losses.Loss,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
    ):
        library = require("tensorflow_similarity.losses", "interop")
        if not isinstance(loss, library.MetricLoss) or not (
            {"key_embeddings", "remove_diagonal"}
            <= set(inspect.signature(loss.fn).parameters)
        ):
            raise TypeError(
                "`loss` must be a MultiSimilarityLoss, TripletLoss, CircleLoss, PNLoss "
                "or SoftNearestNeighborLoss of tensorflow_similarity.losses. Received: "
                f'loss={loss!r}\nMake it with reduction="sum_over_batch_size"'
            )
        super().__init__(_similarity, reduction, name or loss.name, loss=loss)

    def get_config(self) -> dict[str, Any]:
        loss = _describe(self.loss)
        loss["config"]["distance"] = _describe(self.loss.distance)
        return {**super().get_config(), "loss": loss}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SimilarityLoss":
        require("tensorflow_similarity.losses", "interop")  # registers the classes
        distance = _revive(config["loss"]["config"]["distance"])
        return cls(**{**config, "loss": _revive(config["loss"], distance=distance)})


# Keras 3 does not pass a loss through AutoGraph, which these rely on: they branch on
# tensors with a Python `if`.
_to_graph = functools.cache(tf.autograph.to_graph)


def _similarity(labels, x, reference_labels, r, exclude_self, loss):
    # The function's own reshaping of labels (n,) is a branch that XLA refuses.
    queries = labels[:, tf.newaxis], tf.cast(x, tf.float32)
    keys = reference_labels[:, tf.newaxis], tf.cast(r, tf.float32)
    arguments = {**loss._fn_kwargs, "remove_diagonal": exclude_self}
    to_rows = _TO_ROWS.get(loss.fn.__name__, _rows)
    return tf.reshape(to_rows(_to_graph(loss.fn), arguments, queries, keys), [-1])


def _rows(function, arguments, queries, keys):
    return function(*queries, *keys, **arguments)


def _pn_rows(function, arguments, queries, keys):
    """Rows of `pn_loss`, which also needs the distance of positive and negative."""
    # It looks it up in its own matrix, where it takes row i for key i. So the keys have
    # to be the first queries.
    count = tf.shape(queries[0])[0]
    if arguments["remove_diagonal"]:  # the batch begins the keys
        keys_first, rows = (queries, [key[count:] for key in keys]), slice(count)
    else:
        keys_first, rows = (keys, queries), slice(tf.shape(keys[0])[0], None)
    both = (tf.concat(parts, axis=0) for parts in zip(*keys_first, strict=True))
    return function(*both, *keys, **arguments)[rows]


def _soft_nn_rows(function, arguments, queries, keys):
    """Rows of `soft_nn_loss`, which divides sums over a square without its diagonal."""
    # Unless the diagonal holds the pairs to leave out, as many keys as queries are put
    # in front, and it lies in there; queries without a meaning complete the square.
    # The quotient does not change with a constant added to the distances of a row.
    # Measured from the nearest key, they do not all underflow to 0 / 0.
    distances = nearest = arguments["distance"](queries[1], keys[1])
    # exp(-80) is above 0 in float32, and lost in a sum with exp(0).
    far = 80.0 * arguments["temperature"]
    count = before = tf.shape(distances)[0]
    if arguments["remove_diagonal"]:
        nearest = tf.linalg.set_diag(nearest, tf.fill([before], float("inf")))
        before = 0
    nearest = tf.stop_gradient(tf.reduce_min(nearest, axis=1, keepdims=True))
    distances -= tf.where(tf.math.is_finite(nearest), nearest, 0.0)
    rows = [0, before + tf.shape(distances)[1] + 1 - count]
    square = tf.pad(distances, [rows, [before, 1]], constant_values=far)
    labels = tf.pad(queries[0], [rows, [0, 0]], constant_values=-1)
    key_labels = tf.pad(keys[0], [[before, 1], [0, 0]], constant_values=-1)
    arguments = {**arguments, "distance": lambda *_: square}
    return function(labels, queries[1], key_labels, keys[1], **arguments)[:count]


_TO_ROWS = {"pn_loss": _pn_rows, "soft_nn_loss": _soft_nn_rows}


def _describe(target):
    """What it takes to make an object again: its distances have no `from_config`."""
    name = keras.saving.get_registered_name(type(target))
    return {"registered_name": name, "config": target.get_config()}


def _revive(description, **replacements):
    cls = keras.saving.get_registered_object(description["registered_name"])
    return cls(**{**description["config"], **replacements})


# ==== tensorflow-addons ====

_MODULES = {  # the module of `<name>_loss`
    "contrastive": "contrastive",
    "lifted_struct": "lifted",
    "npairs": "npairs",
    "triplet_hard": "triplet",
    "triplet_semihard": "triplet",
}


def from_addons(function: str | Callable[..., tf.Tensor], **arguments: Any) -> PairLoss:
    """Makes a pair loss of a loss function of tensorflow-addons (0.23.0).

    It works on Keras 3, where `import tensorflow_addons` does not.

    ```python
    loss = keras_ccp.losses.from_addons("triplet_semihard", margin=0.2)
    ```

    Args:
        function: `"contrastive"`, `"lifted_struct"`, `"npairs"`, `"triplet_hard"` or
            `"triplet_semihard"`, or another `function(labels, embeddings,
            **arguments)` -> scalar or `(batch,)`.
        **arguments: Further arguments of the function, as `margin`.

    Raises:
        ImportError: If tensorflow-addons is not installed.
        ValueError: If no function has that name.
        TypeError: If the function does not take `arguments`.
    """
    return AddonsLoss(function, **arguments)


@keras.saving.register_keras_serializable(package="keras_ccp")
class AddonsLoss(PairLoss):
    """A loss function of tensorflow-addons, for pairs with references of any kind.

    `contrastive` is a function of one pair. The loss is its mean over all pairs of a
    sample and a reference.

    The others are functions of one batch. Against references that batch is made of
    the samples of all replicas and, as further rows, the references; the value of the
    whole is in every row. `npairs` gets the dot products of that batch with itself.
    It has no means to leave a pair out, so those of a sample with itself
    stay in as positives. Time and memory grow with the square of samples plus
    references for `npairs` and `triplet_hard`, with the cube for `triplet_semihard`
    and `lifted_struct`, which also differ from the library in one case: without a
    positive or without a negative pair they are 0 instead of NaN or a value without
    meaning.

    Args:
        function: As for `from_addons`.
        reduction, name: As for `PairLoss`.
        **arguments: As for `from_addons`.
    """

    def __init__(
        self,
        function: str | Callable[..., tf.Tensor],
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
        **arguments: Any,
    ):
        is_name = isinstance(function, str)
        if is_name and function not in _MODULES:
            raise ValueError(
                f"`function` must be a function or one of {', '.join(_MODULES)}. "
                f"Received: function={function!r}"
            )
        inspect.signature(_compute(function)).bind(None, None, **arguments)
        name = name or (function if is_name else getattr(function, "__name__", None))
        super().__init__(_addons, reduction, name, function=function, **arguments)


def _compute(function):
    return _load_function(function) if isinstance(function, str) else function


def _addons(labels, x, reference_labels, r, exclude_self, function, **arguments):
    compute = functools.partial(_compute(function), **arguments)
    # The functions multiply by float32 masks.
    x, r = tf.cast(x, tf.float32), tf.cast(r, tf.float32)
    if function == "contrastive":
        positive, negative = class_masks(labels, reference_labels, exclude_self)
        values = compute(tf.cast(positive, tf.int32), pairwise_distances(x, r))
        mask = tf.cast(positive | negative, tf.float32)
        counts = tf.reduce_sum(mask, axis=1)
        return tf.reduce_sum(mask * values, axis=1) / tf.maximum(counts, 1.0)
    batch_labels = _one_batch(labels, reference_labels, exclude_self)
    batch = _one_batch(x, r, exclude_self)
    if function == "npairs":
        batch = tf.matmul(batch, batch, transpose_b=True)
    masks = class_masks(batch_labels, batch_labels, exclude_self=True)
    value = tf.cond(
        tf.reduce_all([tf.reduce_any(mask) for mask in masks])
        | (function not in ("lifted_struct", "triplet_semihard")),
        lambda: tf.reduce_mean(compute(batch_labels, batch)),
        lambda: tf.zeros([]),  # those two divide by the number of positive pairs
    )
    return tf.fill(tf.shape(labels), value)


def _one_batch(rows, references, exclude_self):
    """The samples of all replicas once, and the references."""
    # References that are the batch itself already hold those of all replicas, and the
    # rows of this one come first.
    if exclude_self:
        return tf.concat([rows, references[tf.shape(rows)[0] :]], axis=0)
    return tf.concat([gather_batch(rows), references], axis=0)


@functools.cache
def _load_function(name):
    """The function `<name>_loss` of the library, without the rest of it."""
    # The library was written for Keras 2. What its losses lack on Keras 3 is one
    # module, `keras.src.engine`, that they name in type hints. What else fails is
    # imported by the `__init__` of its packages: empty packages take their place. Both
    # would mislead others who look for the library or the version of Keras, so
    # `sys.modules` is afterwards what it was.
    spec = importlib.util.find_spec("tensorflow_addons")
    if spec is None:
        require("tensorflow_addons", "interop")
    kept = _pop_modules()
    try:
        folder = spec.submodule_search_locations[0]
        for module, place in (("", folder), (".losses", f"{folder}/losses")):
            package = types.ModuleType(f"tensorflow_addons{module}")
            package.__path__ = [place]
            sys.modules[package.__name__] = package
        engine = types.ModuleType("keras.src.engine")
        engine.keras_tensor = types.SimpleNamespace(KerasTensor=keras.KerasTensor)
        sys.modules[engine.__name__] = engine
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package = "tensorflow_addons.losses"
            module = importlib.import_module(f"{package}.{_MODULES[name]}")
        return getattr(module, f"{name}_loss")
    finally:
        _pop_modules()
        sys.modules.update(kept)


def _pop_modules():
    hidden = "tensorflow_addons", "tensorflow_addons.", "keras.src.engine"
    names = [
        name for name in sys.modules if name in hidden or name.startswith(hidden[1])
    ]
    return {name: sys.modules.pop(name) for name in names}

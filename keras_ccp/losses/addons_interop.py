"""Losses of tensorflow-addons as pair losses, on Keras 3."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_ccp.distribute import gather_batch
from keras_ccp.losses.pair_loss import PairLoss
from keras_ccp.losses.pairwise import class_masks, pairwise_distances

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

    Args:
        function: `"contrastive"`, `"lifted_struct"`, `"npairs"`, `"triplet_hard"` or
            `"triplet_semihard"`, the library's function of that name, or another
            `function(labels, embeddings, **arguments)` -> scalar or `(batch,)`.
        **arguments: Further arguments of the function, as `margin`.

    Returns:
        `AddonsLoss`.

    Raises:
        ImportError: If tensorflow-addons is not installed.
        TypeError: If `function` is not a function, or does not take `arguments`.
        ValueError: If no function has that name.
    """
    return AddonsLoss(function, arguments)


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
        function: Name or function; see `from_addons`.
        arguments: Further arguments of the function. Defaults to none.
        reduction: How Keras reduces the rows. Defaults to their mean.
        name: Name of the loss. Defaults to that of the function.

    Raises:
        ImportError: If tensorflow-addons is not installed.
        TypeError: If `function` is not a function, or does not take `arguments`.
        ValueError: If no function has that name.
    """

    def __init__(
        self,
        function: str | Callable[..., tf.Tensor],
        arguments: dict[str, Any] | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = None,
    ):
        function = _library_name(function) or function
        _check_function(function)
        is_named = isinstance(function, str)
        compute = _load_function(function) if is_named else function
        arguments = arguments or {}
        _check_arguments(compute, arguments)
        name = name or (function if is_named else getattr(function, "__name__", None))
        super().__init__(reduction=reduction, name=name)
        self.function = function
        self.arguments = arguments
        self._compute = functools.partial(compute, **arguments)

    def pairs(
        self,
        labels: tf.Tensor,
        embeddings: tf.Tensor,
        reference_labels: tf.Tensor,
        reference_embeddings: tf.Tensor,
        exclude_self: bool = False,
    ) -> tf.Tensor:
        labels = tf.cast(tf.reshape(labels, [-1]), tf.int32)
        reference_labels = tf.cast(tf.reshape(reference_labels, [-1]), tf.int32)
        # The functions multiply by float32 masks.
        embeddings = tf.cast(embeddings, tf.float32)
        references = tf.cast(reference_embeddings, tf.float32)
        if self.function == "contrastive":
            return _mean_over_references(
                self._compute,
                labels,
                embeddings,
                reference_labels,
                references,
                exclude_self,
            )
        value = _BATCH_FORMS.get(self.function, _of_embeddings)(
            self._compute,
            _one_batch(labels, reference_labels, exclude_self),
            _one_batch(embeddings, references, exclude_self),
        )
        return tf.repeat(tf.reduce_mean(value), tf.size(labels))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "function": keras.saving.serialize_keras_object(self.function),
            "arguments": keras.saving.serialize_keras_object(self.arguments),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AddonsLoss":
        read = {
            argument: keras.saving.deserialize_keras_object(config[argument])
            for argument in ("function", "arguments")
        }
        return cls(**{**config, **read})


# ==== What the functions are given ====


def _mean_over_references(
    compute, labels, embeddings, reference_labels, references, exclude_self
):
    """Mean of a function of pairs over the references of each sample."""
    pos_mask, neg_mask = class_masks(labels, reference_labels, exclude_self)
    distances = pairwise_distances(embeddings, references)
    values = compute(tf.cast(pos_mask, tf.int32), distances)
    mask = tf.logical_or(pos_mask, neg_mask)
    sums = tf.reduce_sum(tf.where(mask, values, 0.0), axis=1)
    counts = tf.reduce_sum(tf.cast(mask, tf.float32), axis=1)
    return sums / tf.maximum(counts, 1.0)


def _one_batch(rows, references, exclude_self):
    """The samples of all replicas once, and the references.

    References that are the batch itself already hold those of all replicas, and the
    rows of this one come first.
    """
    if exclude_self:
        return tf.concat([rows, references[tf.shape(rows)[0] :]], axis=0)
    return tf.concat([gather_batch(rows), references], axis=0)


def _of_embeddings(compute, labels, embeddings):
    return compute(labels, embeddings)


def _of_embeddings_with_triplets(compute, labels, embeddings):
    """A function that divides by the number of positive pairs, else 0."""
    pos_mask, neg_mask = class_masks(labels, labels, exclude_self=True)
    return tf.cond(
        tf.reduce_any(pos_mask) & tf.reduce_any(neg_mask),
        lambda: compute(labels, embeddings),
        lambda: tf.zeros([]),
    )


def _of_similarities(compute, labels, embeddings):
    return compute(labels, tf.matmul(embeddings, embeddings, transpose_b=True))


_BATCH_FORMS = {
    "lifted_struct": _of_embeddings_with_triplets,
    "npairs": _of_similarities,
    "triplet_semihard": _of_embeddings_with_triplets,
}


# ==== Loading them on Keras 3 ====


@functools.cache
def _load_function(name):
    """The function `<name>_loss` of the library, without the rest of it."""
    spec = importlib.util.find_spec("tensorflow_addons")
    if spec is None:
        raise ImportError(
            "Losses of tensorflow-addons need that package, which there is for Python "
            'up to 3.11: pip install -e ".[addons]"'
        )
    with _bypassed_packages(spec.submodule_search_locations[0]):
        module = importlib.import_module(f"tensorflow_addons.losses.{_MODULES[name]}")
    return getattr(module, f"{name}_loss")


@contextlib.contextmanager
def _bypassed_packages(folder: str) -> Iterator[None]:
    """Lets modules of the losses be imported, and leaves no trace of it.

    The library was written for Keras 2. What its losses lack on Keras 3 is one module,
    `keras.src.engine`, that they name in type hints. What else fails is imported by the
    `__init__` of its packages: empty packages take their place. Both would
    mislead others who look for the library or the version of Keras, so `sys.modules`
    is afterwards what it was.
    """
    engine = types.ModuleType("keras.src.engine")
    engine.keras_tensor = types.SimpleNamespace(KerasTensor=keras.KerasTensor)
    package = types.ModuleType("tensorflow_addons")
    package.__path__ = [folder]
    losses = types.ModuleType("tensorflow_addons.losses")
    losses.__path__ = [f"{folder}/losses"]
    kept = _pop_modules()
    sys.modules.update({m.__name__: m for m in (engine, package, losses)})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _pop_modules()
        sys.modules.update(kept)


def _pop_modules():
    names = [
        name
        for name in sys.modules
        if name.split(".")[0] == "tensorflow_addons" or name == "keras.src.engine"
    ]
    return {name: sys.modules.pop(name) for name in names}


# ==== Arguments ====


def _library_name(function):
    """The name that stands for a function of the library, `None` for others."""
    name = getattr(function, "__name__", "").removesuffix("_loss")
    module = str(getattr(function, "__module__", ""))
    return (
        name if module.startswith("tensorflow_addons.") and name in _MODULES else None
    )


def _check_function(function):
    names = ", ".join(f'"{name}"' for name in _MODULES)
    if isinstance(function, str) and function not in _MODULES:
        raise ValueError(
            f"`function` must be one of {names}. Received: function={function!r}"
        )
    if not isinstance(function, str) and not callable(function):
        raise TypeError(
            f"`function` must be a function or one of {names}. "
            f"Received: function={function!r}"
        )


def _check_arguments(compute, arguments):
    try:
        inspect.signature(compute).bind("labels", "embeddings", **arguments)
    except TypeError as error:
        raise TypeError(
            f"`arguments` must be arguments of the function: {error}. "
            f"Received: arguments={arguments!r}"
        ) from None

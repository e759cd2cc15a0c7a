"""Cross-batch memory ("XBM"): any pair loss against the embeddings of past batches."""

import functools
from typing import Any

import keras
import tensorflow as tf

from keras_ccp.checks import check_int
from keras_ccp.distribute import gather_batch, gather_rows
from keras_ccp.losses.pair_loss import PairLoss, as_side

_TOO_SMALL = (
    "`size` counts embeddings and must be at least the batch size, over all replicas. "
    "Received a larger batch"
)


@keras.saving.register_keras_serializable(package="keras_ccp")
class EmbeddingMemory(keras.layers.Layer):
    """The newest embeddings and labels, the newest first.

    Holds the weights of `CrossBatchMemory`, since Keras tracks those of layers and not
    those of losses. They are equal on all replicas.

    Args:
        size: Int, number of embeddings kept.
        embedding_dim: Int, width of an embedding.
        **kwargs: `name` and the other arguments of a Keras layer.
    """

    def __init__(self, size: int, embedding_dim: int, **kwargs: Any):
        # Never trained, and float32 whatever the dtype policy.
        super().__init__(**{"dtype": "float32", "trainable": False, **kwargs})
        self.size, self.embedding_dim = size, embedding_dim
        add = functools.partial(
            self.add_weight, initializer="zeros", trainable=False, autocast=False
        )
        self.embeddings = add((size, embedding_dim), dtype="float32", name="embeddings")
        self.labels = add((size,), dtype="int64", name="labels")
        self.num_rows = add((), dtype="int32", name="num_rows")
        self.num_steps = add((), dtype="int32", name="num_steps")
        self.built = True

    def references(
        self, labels: tf.Tensor, embeddings: tf.Tensor, with_past: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Labels and embeddings of the batch, then of the newest rows before it."""
        labels, embeddings = gather_batch(labels), gather_batch(embeddings)
        num_past = tf.minimum(self.num_rows, self.size - tf.shape(labels)[0])
        num_past = tf.where(with_past, num_past, 0)
        return (
            tf.concat([labels, self.labels[:num_past]], axis=0),
            tf.concat([embeddings, self.embeddings[:num_past]], axis=0),
        )

    def push(self, labels: tf.Tensor, embeddings: tf.Tensor) -> None:
        """Takes in a batch; as many of the oldest rows drop out."""
        labels, embeddings = gather_rows(labels), gather_rows(embeddings)
        num_new = tf.shape(labels)[0]
        tf.debugging.assert_less_equal(num_new, self.size, message=_TOO_SMALL)
        # Every replica assigns the same rows, so its copies stay equal to the others'.
        for memory, rows in ((self.labels, labels), (self.embeddings, embeddings)):
            rows = tf.concat([rows, memory], axis=0)[: self.size]
            memory.assign(tf.ensure_shape(rows, memory.shape))
        self.num_rows.assign(tf.minimum(self.num_rows + num_new, self.size))
        self.num_steps.assign_add(1)

    def get_config(self) -> dict[str, Any]:
        sizes = {"size": self.size, "embedding_dim": self.embedding_dim}
        return {**super().get_config(), **sizes}


@keras.saving.register_keras_serializable(package="keras_ccp")
class CrossBatchMemory(PairLoss):
    """A pair loss, also against the embeddings of past batches ("XBM").

    With the memory `M` of the newest `size` embeddings, those of the batch included:

    `loss = loss(batch, batch) + loss(batch, M)`

    without pairs of a sample with itself, also with its own copy in the memory. The
    memory fills from the first step on; its term counts once `start_step` steps have
    passed. Gradients flow through the batch only, not into the memory. Against other
    references (`pairs`: proxies, samples) this is the wrapped loss.

    The memory is a layer, `memory`, made by the first call or by `build`. Keras saves
    it with the model that this loss is compiled into; to load weights into a new
    model, `build` the loss before. One object serves one model. In a model other than
    `CCPModel`, `evaluate` and `validation_data` push their batches into the memory as
    well, since Keras does not tell a loss whether it trains.

    Source: "Cross-Batch Memory for Embedding Learning" (Wang et al., CVPR 2020,
    https://arxiv.org/abs/1912.06798).

    ```python
    loss = keras_ccp.losses.CrossBatchMemory("contrastive", size=800)
    ```

    Args:
        loss: A `PairLoss`, or what `losses.get` makes one of: a name or a function.
        size: Int, number of embeddings kept, at least the size of a batch.
        start_step: Int, number of steps with the loss of the batch alone. The source
            takes 1000. Defaults to `0`.
        reduction, name: As for `PairLoss`.

    Raises:
        ValueError: If `loss` is a memory itself, or an argument is out of range.
    """

    def __init__(
        self,
        loss: PairLoss | str,
        size: int,
        start_step: int = 0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "cross_batch_memory",
    ):
        from keras_ccp.losses import get  # which imports this module

        check_int("size", size, minimum=1)
        check_int("start_step", start_step, minimum=0)
        loss = get(loss)
        if isinstance(loss, CrossBatchMemory):
            raise ValueError(
                f"`loss` must be a loss without a memory. Received: loss={loss!r}\n"
                "The inner one would take in each batch twice: give the one memory the "
                "larger size"
            )
        arguments = {"loss": loss, "size": size, "start_step": start_step}
        super().__init__(_wrapped, reduction, name, **arguments)
        self.memory = None
        self.built = False

    def build(self, embedding_dim: int, of: EmbeddingMemory | None = None) -> None:
        """Makes the empty memory, unless there is one.

        Args:
            embedding_dim: Width of an embedding.
            of: Memory of the model that compiles the loss, `None` for none so far.

        Raises:
            ValueError: If the memory holds embeddings of another width or model.
        """
        if self.memory is None:
            self.memory = EmbeddingMemory(self.size, embedding_dim, name="memory")
            self.built = True
        elif self.memory.embedding_dim != embedding_dim or (
            self.memory is not of and self.memory.num_steps.numpy()
        ):
            raise ValueError(
                "`loss` holds the embeddings of another model, of width "
                f"{self.memory.embedding_dim}. Received: embedding_dim={embedding_dim}"
                "\nMake a new CrossBatchMemory for each model"
            )

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Loss of the pairs inside one batch and with the memory, which it updates."""
        labels, embeddings = as_side("y_true", y_true, y_pred)
        batch_size, embedding_dim = embeddings.shape
        if batch_size is not None and batch_size > self.size:
            raise ValueError(f"{_TOO_SMALL}: size={self.size}, {batch_size} rows")
        if self.memory is None or self.memory.embedding_dim != embedding_dim:
            self.build(embedding_dim, of=self.memory)
        rows = self.loss.call(labels, embeddings)
        copies = tf.cast(tf.stop_gradient(embeddings), tf.float32)
        # Not by tf.cond, in which replicas cannot exchange what the loss counts. Until
        # then the term costs as little as that of the batch.
        counts = self.memory.num_steps >= self.start_step
        references = self.memory.references(labels, copies, with_past=counts)
        memory_rows = self.loss.pairs(labels, embeddings, *references, True)
        rows += tf.where(counts, memory_rows, tf.zeros_like(memory_rows))
        self.memory.push(labels, copies)
        return rows

    def get_build_config(self):
        # Keras makes the memory by it before it loads the weights of a saved model.
        return {"embedding_dim": self.memory.embedding_dim} if self.built else None

    def build_from_config(self, config):
        self.build(**config)


def _wrapped(labels, x, reference_labels, r, exclude_self, loss, size, start_step):
    return loss.pairs(labels, x, reference_labels, r, exclude_self)

"""Cross-batch memory ("XBM"): any pair loss against the embeddings of past batches."""

from typing import Any

import keras
import tensorflow as tf

from keras_ccp.checks import check_int
from keras_ccp.distribute import gather_batch, gather_rows
from keras_ccp.losses.pair_loss import PairLoss, check_mean

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
        size: int, number of embeddings kept.
        embedding_dim: int, width of an embedding.
        **kwargs: `name` and the other arguments of a Keras layer.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is below 1.
    """

    def __init__(self, size: int, embedding_dim: int, **kwargs: Any):
        check_int("size", size, minimum=1)
        check_int("embedding_dim", embedding_dim, minimum=1)
        # Never trained, and float32 whatever the dtype policy.
        super().__init__(**{"dtype": "float32", "trainable": False, **kwargs})
        self.size = int(size)
        self.embedding_dim = int(embedding_dim)
        self.embeddings = self._add("embeddings", (self.size, self.embedding_dim))
        self.labels = self._add("labels", (self.size,), "int32")
        self.num_rows = self._add("num_rows", (), "int32")
        self.num_steps = self._add("num_steps", (), "int32")
        self.built = True

    def _add(self, name, shape, dtype="float32"):
        return self.add_weight(
            name=name,
            shape=shape,
            dtype=dtype,
            initializer="zeros",
            trainable=False,
            autocast=False,
        )

    def references(
        self, labels: tf.Tensor, embeddings: tf.Tensor, with_past: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """What a batch is compared with: itself, then the newest rows before it.

        Args:
            labels: `(batch,)` int32 tensor.
            embeddings: `(batch, embedding_dim)` float32 tensor.
            with_past: Scalar bool tensor, whether to add the rows before it.

        Returns:
            `(n,)` labels and `(n, embedding_dim)` embeddings, `n <= size`. Row `i` is
            row `i` of the batch. Rows that were never filled are left out.
        """
        labels, embeddings = gather_batch(labels), gather_batch(embeddings)
        num_past = tf.minimum(self.num_rows, self.size - tf.shape(labels)[0])
        num_past = tf.where(with_past, num_past, 0)
        return (
            tf.concat([labels, self.labels[:num_past]], axis=0),
            tf.concat([embeddings, self.embeddings[:num_past]], axis=0),
        )

    def push(self, labels: tf.Tensor, embeddings: tf.Tensor) -> None:
        """Takes in a batch; as many of the oldest rows drop out.

        Args:
            labels: `(batch,)` int32 tensor.
            embeddings: `(batch, embedding_dim)` float32 tensor.

        Raises:
            tf.errors.InvalidArgumentError: if the batch of all replicas has more than
                `size` rows.
        """
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
        config = super().get_config()
        config.update(size=self.size, embedding_dim=self.embedding_dim)
        return config


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

    Args:
        loss: A `PairLoss`, or what `losses.get` makes one of: a name or a function.
        size: Int, number of embeddings kept, at least the size of a batch.
        start_step: Int, number of steps with the loss of the batch alone. The source
            takes 1000. Defaults to `0`.
        reduction: How Keras reduces the rows. Defaults to their mean.
        name: Name of the loss. Defaults to `"cross_batch_memory"`.

    Raises:
        TypeError: If `loss` is no pair loss or a number is not an integer.
        ValueError: If `loss` is no name of a loss, is a memory itself or has another
            reduction than the mean, `size` is below 1 or `start_step` is negative.
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

        super().__init__(reduction=reduction, name=name)
        check_int("size", size, minimum=1)
        check_int("start_step", start_step, minimum=0)
        self.loss = get(loss)
        if isinstance(self.loss, CrossBatchMemory):
            raise ValueError(
                "`loss` must be a loss without a memory: the inner one would take in "
                "the batches of the outer one again. Give the one memory the larger "
                f"size. Received: loss={loss!r}"
            )
        check_mean(self.loss)  # its own is the one that Keras looks at
        self.size = int(size)
        self.start_step = int(start_step)
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
        if self.memory is not of and self.memory and self.memory.num_steps.numpy():
            raise ValueError(
                "`loss` must be a new CrossBatchMemory for each model: this one holds "
                "the embeddings of another. Received: a memory after "
                f"{self.memory.num_steps.numpy()} steps"
            )
        if self.memory is None:
            self.memory = EmbeddingMemory(self.size, embedding_dim, name="memory")
            self.built = True
        if self.memory.embedding_dim != embedding_dim:
            raise ValueError(
                "`embedding_dim` must be that of the memory, "
                f"{self.memory.embedding_dim}; make a new CrossBatchMemory for another "
                f"model. Received: embedding_dim={embedding_dim}"
            )

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Loss of the pairs inside one batch and with the memory, which it updates.

        Args:
            y_true: `(batch,)` or `(batch, 1)` tensor of class labels.
            y_pred: `(batch, dim)` float tensor of embeddings.

        Returns:
            `(batch,)` tensor; its mean is the loss.

        Raises:
            ValueError: If the batch is larger than the memory or has another width.
        """
        labels = tf.reshape(tf.cast(y_true, tf.int32), [-1])
        y_pred = tf.convert_to_tensor(y_pred)
        batch_size, embedding_dim = y_pred.shape
        if batch_size is not None and batch_size > self.size:
            raise ValueError(f"{_TOO_SMALL}: size={self.size}, {batch_size} rows")
        if self.memory is None or self.memory.embedding_dim != embedding_dim:
            self.build(embedding_dim, of=self.memory)
        rows = self.loss.call(labels, y_pred)
        copies = tf.cast(tf.stop_gradient(y_pred), tf.float32)
        # Not by tf.cond, in which replicas cannot exchange what the loss counts. Until
        # then the term costs as little as that of the batch.
        counts = self.memory.num_steps >= self.start_step
        references = self.memory.references(labels, copies, with_past=counts)
        memory_rows = self.loss.pairs(labels, y_pred, *references, exclude_self=True)
        rows += tf.where(counts, memory_rows, tf.zeros_like(memory_rows))
        self.memory.push(labels, copies)
        return rows

    def pairs(
        self,
        labels: tf.Tensor,
        embeddings: tf.Tensor,
        reference_labels: tf.Tensor,
        reference_embeddings: tf.Tensor,
        exclude_self: bool = False,
    ) -> tf.Tensor:
        return self.loss.pairs(
            labels,
            embeddings,
            reference_labels,
            reference_embeddings,
            exclude_self=exclude_self,
        )

    def get_build_config(self):
        # Keras makes the memory by it before it loads the weights of a saved model.
        return {"embedding_dim": self.memory.embedding_dim} if self.built else None

    def build_from_config(self, config):
        self.build(**config)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "loss": keras.saving.serialize_keras_object(self.loss),
            "size": self.size,
            "start_step": self.start_step,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CrossBatchMemory":
        loss = keras.saving.deserialize_keras_object(config["loss"])
        return cls(**{**config, "loss": loss})

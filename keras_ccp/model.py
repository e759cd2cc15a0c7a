"""CCPModel: an embedder trained against class proxies and a frozen copy of itself."""

import os

import keras
import tensorflow as tf

from keras_ccp import distribute, losses
from keras_ccp.arguments import check_int, check_number, refuse_sample_weight
from keras_ccp.embedder import check_embedder
from keras_ccp.fit_checks import refuse_compile_arguments
from keras_ccp.layers import normalization_layer
from keras_ccp.optimization import add_weight_decay, fuse_adam, scale_update
from keras_ccp.proxies import ProxyBank
from keras_ccp.samples import SampleBank
from keras_ccp.snapshot import Snapshot
from keras_ccp.trainer import Trainer


@keras.saving.register_keras_serializable(package="keras_ccp")
class CCPModel(Trainer):
    r"""Trains an embedder by one problem of chance constrained programming.

    One step minimises, over the embedder's weights and the proxies,

    `pair_loss(batch, all proxies) + in_batch_weight * pair_loss(batch, batch)
    + (proximal_weight / 2) * sum ||weight - frozen copy||^2`

    on normalised embeddings and proxies. `CCPCallback` makes a sequence of such
    problems of it; without it this is plain proxy-based metric learning and, with
    `proxies_per_class=0`, plain pairwise metric learning. The published lambda
    multiplies `weight - frozen copy` in the gradient; hence the half.
    Source: "Deep Metric Learning with Chance Constraints",
    https://arxiv.org/abs/2209.09060.

    Called on images, the model gives normalised embeddings. `fit` logs `loss`,
    `pair_loss` (proxies and in-batch) and `proximal_loss`. `evaluate` and the
    `validation_data` of `fit` report retrieval metrics, on classes of any kind.

    Args:
        embedder: built `keras.Model`, images -> `(batch, embedding_dim)`, as
            `build_embedder` makes it. Weights that are trainable now are the ones
            of which a frozen copy is kept.
        num_classes: int, number of training classes; labels are 0..num_classes-1.
        proxies_per_class: int, proxies of each class, 0 for none. Defaults to 1.
        proximal_weight: float, lambda. Defaults to 2e-4.
        in_batch_weight: float, weight of the pairs inside the batch. Defaults
            to 0. Without proxies it is not used: the weight is then 1.
        normalization: `"lipschitz"`, `"l2"` or `None`, for embeddings and proxies.
            Defaults to `"lipschitz"`.
        references: what stands for a class: `"proxies"`, learned points, or
            `"samples"`, images that are embedded afresh at every step, as many as
            there would be proxies. Defaults to `"proxies"`.
        proxy_learning_rate_multiplier: float, proxies move by this multiple of what
            the optimizer would move them by. Defaults to 1.
        weight_decay: float, L2: this multiple of each weight is added to its gradient,
            as the published runs do it. An optimizer's own `weight_decay` in Keras
            leaves the gradient alone. Defaults to 0.
        **kwargs: `name` and the other arguments of `keras.Model`.

    Raises:
        TypeError: if `embedder` is not a Functional or Sequential model.
        ValueError: if an argument is out of range, or the embedder not built.
    """

    # ==== State ====

    def __init__(
        self,
        embedder: keras.Model,
        num_classes: int,
        proxies_per_class: int = 1,
        proximal_weight: float = 2e-4,
        in_batch_weight: float = 0.0,
        normalization: str | None = "lipschitz",
        references: str = "proxies",
        proxy_learning_rate_multiplier: float = 1.0,
        weight_decay: float = 0.0,
        **kwargs,
    ):
        check_embedder(embedder)
        check_int("num_classes", num_classes, minimum=1)
        check_int("proxies_per_class", proxies_per_class, minimum=0)
        check_number("proximal_weight", proximal_weight, minimum=0)
        check_number("in_batch_weight", in_batch_weight, minimum=0)
        multiplier = proxy_learning_rate_multiplier
        check_number("proxy_learning_rate_multiplier", multiplier, minimum=0)
        check_number("weight_decay", weight_decay, minimum=0)
        if references not in ("proxies", "samples"):
            raise ValueError(
                '`references` must be "proxies" or "samples". '
                f"Received: references={references!r}"
            )
        super().__init__(**kwargs)
        self.embedder = embedder
        self.num_classes = num_classes
        self.proxies_per_class = proxies_per_class
        self.proximal_weight = proximal_weight
        self.in_batch_weight = in_batch_weight
        self.normalization = normalization
        self.normalize = normalization_layer(normalization, name="normalize")
        self.references = references
        self.proxy_learning_rate_multiplier = proxy_learning_rate_multiplier
        self.weight_decay = weight_decay
        self.proxy_bank = self.sample_bank = self.memory = None
        sizes = num_classes, proxies_per_class
        if proxies_per_class and references == "proxies":
            self.proxy_bank = ProxyBank(*sizes, embedder.output_shape[-1], name="bank")
        elif proxies_per_class:
            self.sample_bank = SampleBank(
                *sizes, self.image_shape, embedder.inputs[0].dtype, name="bank"
            )
        self.snapshot = Snapshot(embedder, proximal_weight, name="snapshot")
        self.num_projections = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False
        )
        self._pair_loss_tracker = keras.metrics.Mean(name="pair_loss")
        self._proximal_loss_tracker = keras.metrics.Mean(name="proximal_loss")
        self.built = True

    @property
    def frozen_weights(self) -> list[keras.Variable]:
        """Copy of the embedder's trainable weights, as of the last snapshot."""
        return list(self.snapshot.frozen_weights)

    def take_snapshot(self) -> None:
        """Freezes a copy of the embedder's weights and switches lambda on."""
        self.snapshot.take()

    def proximal_loss(self) -> tf.Tensor:
        """Distance of the embedder to its frozen copy.

        Returns:
            Scalar (lambda / 2) * sum ||weight - frozen||^2, 0 before a snapshot.
        """
        return self.snapshot.proximal_loss()

    # ==== One step ====

    def call(self, images, training=None):
        return self.normalize(self.embedder(images, training=training))

    @property
    def reference_bank(self) -> ProxyBank | SampleBank | None:
        """What stands for the classes, `None` with `proxies_per_class=0`."""
        return self.proxy_bank or self.sample_bank

    def _pair_loss(self, labels: tf.Tensor, embeddings: tf.Tensor) -> tf.Tensor:
        if self.reference_bank is None:
            return tf.reduce_mean(self.loss.call(labels, embeddings))
        rows = self.loss.pairs(
            labels, embeddings, *self._references(labels, embeddings)
        )
        if self.in_batch_weight:
            rows += self.in_batch_weight * self.loss.call(labels, embeddings)
        return tf.reduce_mean(rows)

    def _references(self, labels, embeddings):
        """Labels and embeddings of what a batch is compared with."""
        bank = self.reference_bank
        if self.sample_bank is not None:
            return bank.labels, self(bank.rows(), training=True)
        if self.loss.ignores_length:
            return bank.labels, bank.rows()
        # XLA knows only tensors of one size.
        reach = float("inf") if self.jit_compile else self.loss.reach
        return losses.within_reach(
            reach, labels, embeddings, bank.labels, bank.rows(), self.normalize
        )

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        """This replica's share of the loss; the shares add up to the whole.

        Args:
            x: not used.
            y: `(batch,)` or `(batch, 1)` integer labels.
            y_pred: `(batch, embedding_dim)` normalised embeddings.
            sample_weight: must be `None`.
            training: not used.
        """
        refuse_sample_weight(sample_weight)
        labels = tf.reshape(tf.cast(y, "int32"), (-1,))
        pair_loss = self._pair_loss(labels, y_pred)
        proximal_loss = self.proximal_loss()
        self._pair_loss_tracker.update_state(pair_loss)
        self._proximal_loss_tracker.update_state(proximal_loss)
        loss = pair_loss + tf.cast(tf.add_n([proximal_loss, *self.losses]), "float32")
        self._loss_tracker.update_state(loss)
        return loss / distribute.num_replicas()

    def train_step(self, data):
        images, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            embeddings = self(images, training=True)
            loss = self.compute_loss(images, labels, embeddings, sample_weight)
            scaled_loss = self.optimizer.scale_loss(loss)
        weights = self.trainable_weights
        gradients = tape.gradient(scaled_loss, weights)
        gradients = add_weight_decay(
            gradients, weights, self.weight_decay, self.optimizer
        )
        with scale_update(self.proxy_bank, self.proxy_learning_rate_multiplier):
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return self.compute_metrics(images, labels, embeddings)

    # ==== Compile, config and export ====

    def compile(
        self,
        optimizer: keras.optimizers.Optimizer | str = "rmsprop",
        loss: losses.PairLoss | str | None = None,
        **kwargs,
    ) -> None:
        """Configures training.

        Args:
            optimizer: Keras optimizer or its name. Defaults to `"rmsprop"`.
            loss: pair loss, its name, or an object with the same `pairs` method.
            **kwargs: as for `keras.Model.compile`.

        Raises:
            TypeError: if `loss` has no `pairs`, or it takes other arguments.
            ValueError: if `loss.pairs` does not give one value an anchor, of which the
                mean is taken, or an argument has no meaning here, such as `metrics`.
        """
        loss = losses.get(loss)
        losses.check_rows(loss, self.embedder.output_shape[-1])
        refuse_compile_arguments(kwargs)
        kept = self.memory
        if self.memory is not None:
            # Of another loss; Keras would go on to save it.
            self._layers.remove(self.memory)
        self.memory = None
        if isinstance(loss, losses.CrossBatchMemory):
            if self.reference_bank is not None and not self.in_batch_weight:
                raise ValueError(
                    "`loss` must not be a CrossBatchMemory where pairs inside the "
                    "batch, whose memory it is, do not count: give the model "
                    "proxies_per_class=0, or in_batch_weight above 0. "
                    f"Received: in_batch_weight={self.in_batch_weight}"
                )
            loss.build(self.embedder.output_shape[-1], of=kept)
            self.memory = loss.memory
        super().compile(optimizer=optimizer, loss=loss, **kwargs)
        self.optimizer.build(self.trainable_variables)
        fuse_adam(self.optimizer)

    def compile_from_config(self, config):
        config = keras.saving.deserialize_keras_object(config)
        self.compile(**{k: v for k, v in config.items() if v is not None})

    def check_start(self) -> None:
        if self.sample_bank is not None:
            self.sample_bank.check_filled()

    @property
    def image_shape(self) -> tuple:
        """Shape of one image, `None` where it is free."""
        return self.embedder.input_shape[1:]

    @property
    def label_bound(self) -> int | None:
        """Number that labels stay below, `None` without proxies."""
        return None if self.reference_bank is None else self.num_classes

    def export(self, filepath: str | os.PathLike, **kwargs) -> None:
        """Writes the embedder, without proxies, for serving.

        Args:
            filepath: directory of the SavedModel: images -> normalised embeddings.
            **kwargs: further arguments of `keras.Model.export`.
        """
        given = self.embedder.inputs[0]
        images = keras.Input(batch_shape=given.shape, dtype=given.dtype)
        embeddings = self.normalize(self.embedder(images))
        keras.Model(images, embeddings).export(filepath, **kwargs)

    def get_config(self) -> dict:
        config = super().get_config()
        config.update(
            embedder=keras.saving.serialize_keras_object(self.embedder),
            num_classes=self.num_classes,
            proxies_per_class=self.proxies_per_class,
            proximal_weight=self.proximal_weight,
            in_batch_weight=self.in_batch_weight,
            normalization=self.normalization,
            references=self.references,
            proxy_learning_rate_multiplier=self.proxy_learning_rate_multiplier,
            weight_decay=self.weight_decay,
        )
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        embedder = keras.saving.deserialize_keras_object(
            config["embedder"], custom_objects=custom_objects
        )
        return cls(**{**config, "embedder": embedder})

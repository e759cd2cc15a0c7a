import keras
import numpy as np
import pytest

from keras_ccp import CCPModel, WarmUp, build_embedder


def make_model():
    backbone = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.Conv2D(4, 3),
        ]
    )
    model = CCPModel(build_embedder(backbone, embedding_dim=3), 4, 1)
    # Adam keeps moments of all weights, so that a later phase must not surprise it.
    model.compile(keras.optimizers.Adam(1e-2), "contrastive", jit_compile=False)
    return model


class Weights(keras.callbacks.Callback):
    """Remembers the weights after each epoch."""

    def __init__(self):
        super().__init__()
        self.history = []

    def on_epoch_end(self, epoch, logs=None):
        embedder = self.model.embedder
        head = embedder.get_layer("embedding").get_weights()
        rest = embedder.layers[1].get_weights()
        self.history.append((head, rest, self.model.proxy_bank.get_weights()))


def changed(before, after):
    return [bool((a != b).any()) for a, b in zip(before, after, strict=True)]


def test_trains_the_head_and_the_proxies_alone_first():
    model, weights = make_model(), Weights()
    start = model.embedder.layers[1].get_weights()
    images = np.random.default_rng(0).normal(size=(16, 8, 8, 3)).astype("float32")
    labels = np.arange(16) % 4
    model.fit(images, labels, epochs=3, verbose=0, callbacks=[WarmUp(2), weights])
    (head1, rest1, proxies1), (head2, rest2, proxies2), (head3, rest3, _) = (
        weights.history
    )
    # Batch-norm statistics stay too, as frozen layers run in inference mode.
    assert changed(start, rest1) == changed(rest1, rest2) == [False] * len(start)
    assert changed(head1, head2) == changed(proxies1, proxies2) == [True]
    # All but the first bias, which batch normalisation takes away again: it moves by
    # rounding alone.
    assert sum(changed(rest2, rest3)) >= len(start) - 1
    assert changed(head2, head3) == [True]
    assert all(layer.trainable for layer in model.embedder.layers)


def test_each_fit_warms_up_anew_and_ends_unfrozen():
    model = make_model()
    images = np.zeros((4, 8, 8, 3), "float32")
    model.fit(images, np.arange(4), verbose=0, callbacks=[WarmUp(5)])
    assert all(layer.trainable for layer in model.embedder.layers)


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


def test_an_interrupted_warm_up_leaves_nothing_frozen():
    model = make_model()
    data = np.zeros((4, 8, 8, 3), "float32"), np.arange(4)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data, verbose=0, callbacks=[WarmUp(1), Interrupt()])
    assert all(layer.trainable for layer in model.embedder.layers)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="epochs=0"):
        WarmUp(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="type\\(model\\)=Sequential"):
        model.fit(np.zeros((2, 2)), np.zeros(2), verbose=0, callbacks=[WarmUp()])

"""WarmUp: the embedding head is trained alone before the rest of the network."""

import keras

from keras_ccp.arguments import check_int
from keras_ccp.model import CCPModel


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

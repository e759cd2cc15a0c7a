"""What `compile` refuses beside the loss."""

import keras
import pytest

from keras_ccp import CCPModel


@pytest.fixture
def model():
    embedder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    return CCPModel(embedder, num_classes=3)


@pytest.mark.parametrize(
    ("argument", "value", "way_out"),
    [
        ("metrics", ["accuracy"], "CCPCallback report"),
        ("metrics", "accuracy", "CCPCallback report"),
        ("weighted_metrics", ["accuracy"], "CCPCallback report"),
        ("loss_weights", 2.0, "one loss"),
    ],
)
def test_compile_refuses_what_has_no_meaning(model, argument, value, way_out):
    message = f"`{argument}` is not supported.*{way_out}.*Received: {argument}="
    with pytest.raises(ValueError, match=message):
        model.compile("sgd", "triplet", **{argument: value})


def test_compile_takes_what_is_left_empty(model):
    model.compile("sgd", "triplet", metrics=None, weighted_metrics=[], run_eagerly=True)
    assert model.run_eagerly


def test_compile_refuses_functions_that_fit_would_fail_on(model):
    with pytest.raises(TypeError, match="must take the arguments of PairLoss.pairs"):
        model.compile("sgd", lambda y_true, y_pred: y_pred)

"""Images of one side of the split, and how they are named."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keras_ccp.app.doctor.image_facts import ImageFacts
from keras_ccp.datasets import Dataset


class Part(NamedTuple):
    """Images of one side of the split.

    Args:
        name: `"training"`, or `"query"` or `"gallery"` of the test.
        dataset: the images.
        facts: what is known of each.
        root: folder that paths are shown relative to.
    """

    name: str
    dataset: Dataset
    facts: ImageFacts
    root: Path

    @property
    def is_test(self) -> bool:
        """Whether it is not trained on."""
        return self.name != "training"

    @property
    def is_readable(self) -> np.ndarray:
        """`(n,)` booleans: the image can be read."""
        mask = np.ones(len(self.dataset), bool)
        mask[list(self.facts.failures)] = False
        return mask

    def class_of(self, row: int) -> str:
        """Name of the class of an image.

        Args:
            row: of the image.
        """
        return self.dataset.class_names[self.dataset.labels[row]]

    def place(self, row: int) -> str:
        """Where an image is: its path, or its number within its class.

        Args:
            row: of the image.
        """
        image = self.dataset.images[row]
        if isinstance(image, str):
            is_below = Path(image).is_relative_to(self.root)
            return os.path.relpath(image, self.root) if is_below else image
        labels = self.dataset.labels
        number = int((labels[:row] == labels[row]).sum())
        return f"image {number} (from 0) of class {self.class_of(row)!r}"

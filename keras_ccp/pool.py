"""Pool: the images from which the next proxies are chosen."""

import logging

import numpy as np

from keras_ccp.distribute import has_workers
from keras_ccp.k_center import k_center_greedy
from keras_ccp.model import CCPModel
from keras_ccp.pipeline import EvaluationData

logger = logging.getLogger("keras_ccp")


class Pool:
    """Draws images of each class and chooses new proxies among them.

    Args:
        data: images of all training classes.
        pool_size: int, images to draw of each class; a smaller class gives all.
        seed: int, decides which images are drawn, or `None` for a random one.
    """

    def __init__(self, data: EvaluationData, pool_size: int, seed: int | None):
        self.data = data
        self.pool_size = pool_size
        self.has_seed = seed is not None
        self.seed = np.random.SeedSequence().entropy if seed is None else int(seed)

    def check(self, num_classes: int, proxies_per_class: int) -> None:
        """Raises if the pool cannot give proxies to each class.

        Args:
            num_classes: int, number of training classes.
            proxies_per_class: int, proxies to be chosen of each class.

        Raises:
            ValueError: if a class is missing or not one of the training classes.
        """
        labels = self.data.labels
        if labels.max() >= num_classes:
            raise ValueError(
                f"`pool` must have labels from 0 to {num_classes - 1} "
                f"(num_classes={num_classes}). Received: label {labels.max()}"
            )
        sizes = np.bincount(labels, minlength=num_classes)
        missing = np.flatnonzero(sizes == 0)
        if missing.size:
            raise ValueError(
                f"`pool` must have images of each of the model's {num_classes} "
                f"classes. Received: none of {missing.size} classes, "
                f"the first is class {missing[0]}"
            )
        wanted = max(self.pool_size, proxies_per_class)
        small = int((sizes < wanted).sum())
        if small:
            logger.info(
                "%d of %d pool classes have fewer than %d images: all of them are "
                "candidates, and proxies repeat where there are more proxies",
                small,
                num_classes,
                wanted,
            )

    def choose(
        self, model: CCPModel, covered: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Embeds freshly drawn images and picks among them by greedy K-Center.

        Args:
            model: model whose embedder is used as it is now.
            covered: `(num_classes, m, dim)` points that are covered already.

        Returns:
            `(num_classes, proxies_per_class)` rows of the pool that were picked and
            their `(num_classes, proxies_per_class, dim)` embeddings, or `None` if an
            embedding is not finite.

        Raises:
            ValueError: if several processes would draw with seeds of their own.
        """
        if not self.has_seed and has_workers(model.distribute_strategy):
            raise ValueError(
                "`seed` must be an integer where several workers train, so that all "
                "of them choose the same proxies. Received: seed=None"
            )
        # Each problem has a generator of its own, so that a run which is resumed
        # draws what it would have drawn.
        rng = np.random.default_rng([self.seed, int(model.num_projections.numpy())])
        rows, mask = draw_pool(self.data.labels, model.num_classes, self.pool_size, rng)
        drawn = np.sort(rows[mask])
        embeddings = model.predict(self.data.batches(drawn), verbose=0)
        if not np.isfinite(embeddings).all():
            return None
        # What has no image is masked, and only needs to be finite.
        places = np.searchsorted(drawn, np.where(mask, rows, drawn[0]))
        candidates = embeddings[places]
        picks = k_center_greedy(candidates, covered, model.proxies_per_class, mask)
        places = np.take_along_axis(places, picks, axis=1)
        return drawn[places], embeddings[places]

    def images(self, rows: np.ndarray) -> np.ndarray:
        """Reads some images of the pool.

        Args:
            rows: `(num_classes, k)` rows of the pool.

        Returns:
            `(num_classes, k, height, width, channels)` images.
        """
        read, positions = np.unique(rows, return_inverse=True)
        images = np.concatenate(list(self.data.batches(read).as_numpy_iterator()))
        return images[positions.reshape(rows.shape)]


def draw_pool(
    labels: np.ndarray, num_classes: int, pool_size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draws images of each class without repetition.

    Args:
        labels: `(n,)` int class of each image, every class present.
        num_classes: int, number of classes.
        pool_size: int, images to draw of each class; a smaller class gives all.
        rng: source of randomness.

    Returns:
        `rows`, `(num_classes, pool_size)` int indices into `labels`, and `mask` of
        the same shape, `False` where a class has no further image.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    sizes = np.bincount(labels, minlength=num_classes)
    starts = np.cumsum(sizes) - sizes
    positions = np.arange(pool_size)
    mask = positions < sizes[:, None]
    rows = order[np.where(mask, starts[:, None] + positions, 0)]
    return rows, mask

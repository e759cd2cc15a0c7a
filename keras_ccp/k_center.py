"""Greedy K-Center, batched over classes: how the next proxies are chosen."""

import numpy as np

from keras_ccp.checks import as_floats, check_finite, check_int

# Float64 differences held at once: few enough to stay in cache.
BLOCK_VALUES = 2**17


def squared_distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Squared L2 distances along the last axis, from float64 differences."""
    difference = first.astype(np.float64) - second
    return np.einsum("...d,...d->...", difference, difference)


def exponents(values: np.ndarray, axis: int | tuple | None = None) -> np.ndarray:
    """Powers of two for `np.ldexp(values, -exponents)`, which keeps squares in range.

    It is exact, and leaves no absolute value above 1. The axes are kept.
    """
    largest = values.max(axis=axis, keepdims=True)
    return np.frexp(np.maximum(largest, -values.min(axis=axis, keepdims=True)))[1]


def k_center_greedy(
    candidates: np.ndarray,
    covered: np.ndarray,
    num_centers: int,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """Picks, for every class, the candidates that cover it best.

    Repeats `num_centers` times in each class: take the candidate `x` that maximises
    `min_{c in covered} ||x - c||^2`; it joins the covered points. Ties go to the lowest
    index. The picks are those of exact (float64, direct differences) distances. A row
    is not picked twice while the class has an unused one, even when rows are equal in
    value; once a class has used all of its candidates, its picks repeat in their order.

    Source: Algorithm 2 of arXiv 2209.09060.

    Args:
        candidates: `(num_classes, pool_size, dim)` floats, the points to choose from.
        covered: `(num_classes, num_covered, dim)` floats, the points that are covered
            already. `num_covered` may be 0: the first candidate is then the first pick.
        num_centers: int, picks per class, at least 1.
        mask: `(num_classes, pool_size)` booleans, `False` for padding that must not be
            picked and may hold anything, NaN too. Defaults to `None`: every candidate
            is real.

    Returns:
        `(num_classes, num_centers)` int64 array of indices into axis 1 of `candidates`.

    Raises:
        ValueError: for shapes that do not go together, real candidates or covered
            points that are not finite, or a class without a single real candidate.

    Example:

        >>> candidates = np.array([[[8.0], [4.0], [9.0], [-1.0]]])
        >>> k_center_greedy(candidates, np.zeros((1, 1, 1)), num_centers=3)
        array([[2, 1, 0]])
    """
    candidates = as_floats("candidates", candidates)
    covered = as_floats("covered", covered)
    check_int("num_centers", num_centers, minimum=1)
    mask = np.ones(candidates.shape[:2], bool) if mask is None else np.asarray(mask)
    _check_shapes(candidates, covered, mask)
    if not mask.all():
        # Padding becomes a copy of a real candidate, which changes nothing.
        first = candidates[np.arange(len(mask)), mask.argmax(axis=1)]
        candidates = np.where(mask[:, :, None], candidates, first[:, None])
    check_finite("candidates", candidates, "classes")
    check_finite("covered", covered, "classes")

    picks = np.empty((len(candidates), num_centers), np.int64)
    step = max(1, BLOCK_VALUES // candidates[0].size)
    for start in range(0, len(candidates), step):
        part = slice(start, start + step)
        picks[part] = _pick(candidates[part], covered[part], num_centers, mask[part])
    return picks


def _check_shapes(candidates, covered, mask):
    shapes = candidates.shape, covered.shape, mask.shape
    if (
        [len(shape) for shape in shapes] != [3, 3, 2]
        or mask.shape != candidates.shape[:2]
        or covered.shape[::2] != candidates.shape[::2]
        or mask.dtype != bool
        or not (candidates.size and mask.any(axis=1).all())
    ):
        raise ValueError(
            "`candidates` (classes, b, dim), `covered` (classes, m, dim) and boolean "
            "`mask` (classes, b) must go together, with a real candidate in every "
            f"class. Received: shapes {shapes}, a mask of {mask.dtype}\n"
            "Leave out classes without an image"
        )


def _pick(candidates, covered, num_centers, mask):
    num_classes = len(candidates)
    points = np.concatenate([candidates, covered], axis=1).astype(np.float64)
    points = np.ldexp(points, -exponents(points, axis=(1, 2)))
    candidates, covered = np.split(points, [candidates.shape[1]], axis=1)
    nearest = np.where(mask, np.inf, -np.inf)
    for center in np.moveaxis(covered, 1, 0):
        np.minimum(nearest, squared_distances(candidates, center[:, None]), out=nearest)
    every, num_real = np.arange(num_classes), mask.sum(axis=1)
    picks = np.empty((num_classes, num_centers), np.int64)
    for turn in range(num_centers):
        # Where all candidates are used, the picks start again from the first.
        picks[:, turn] = np.where(
            turn < num_real, nearest.argmax(axis=1), picks[every, turn % num_real]
        )
        center = candidates[every, picks[:, turn]]
        distances = squared_distances(candidates, center[:, None])
        np.minimum(nearest, distances, out=nearest)
        nearest[every, picks[:, turn]] = -np.inf
    return picks

"""Shortlist: the best scores of some queries, gathered from parts of the gallery."""

import numpy as np

LARGEST_GROUP = 64
# Candidates beyond 2 k that are still listed.
_EXTRA = 32
# Where the groups that are reached hold more than one score in so many, it is quicker
# to look at all scores.
_DENSE = 16
# Sorts last, and reads as a score of NaN.
_NO_KEY = np.int64(2**63 - 1)
# Below every score but that of padding.
_LOWEST = np.float32(-1e38)


class Shortlist:
    """All that may be truly among the `wanted` highest scores of some queries.

    If the k-th highest score of a query is at least `s`, then so is, up to one `error`,
    the true one, and what scores less than `s - 2 * error` is truly lower than that.
    This bar rises with each part of the gallery.

    Args:
        wanted: int, k.
        num_gallery: int, rows of the whole gallery.
        error: `(num_queries,)` how far a score of each query may be off.

    Attributes:
        wanted: int, k.
    """

    def __init__(self, wanted: int, num_gallery: int, error: np.ndarray):
        self.wanted = wanted
        # Few groups are quickly sorted out, small ones quickly searched.
        self._group = np.sqrt(num_gallery / wanted)
        self._limit = 2 * wanted + _EXTRA
        self._margin = 2.0 * error
        self._bar = np.full(len(error), _LOWEST)
        self._crowded = np.zeros(len(error), bool)
        nothing = np.empty(0, np.int64)
        self._parts = [(nothing, nothing, np.empty(0, np.float32))]
        self._unsorted = 0

    def add(self, scores: np.ndarray, members: np.ndarray) -> None:
        """Takes the scores of all queries with a part of the gallery.

        A query's scores are looked at by the maxima of groups. The k-th highest maximum
        is a good `s`, since k different scores reach it.

        Args:
            scores: `(num_queries, count)` float32, or with more rows that do not
                count. `count` is a multiple of `LARGEST_GROUP`. A transposed array is
                read along its memory as well.
            members: `(count,)` ints, the gallery rows.
        """
        in_rows = scores.flags.c_contiguous
        steps = (scores.shape[1], 1) if in_rows else (1, len(scores))
        flat = scores.ravel(order="K")
        reached = self._reached_groups(scores, in_rows)
        group = scores.shape[1] // reached.shape[1]
        query, place = np.nonzero(reached)
        if len(query) * group > scores.size / _DENSE:
            bar = np.full((len(scores), 1), np.inf, np.float32)
            bar[: len(self._bar), 0] = self._bar
            found = np.flatnonzero((scores >= bar).ravel(order="K"))
            values = flat[found]
            query, place = np.divmod(found, max(steps))
            if not in_rows:
                query, place = place, query
        else:
            places = place[:, None] + reached.shape[1] * np.arange(group)
            values = flat.take(query[:, None] * steps[0] + places * steps[1])
            inside = values >= self._bar[query, None]
            query = np.repeat(query, np.count_nonzero(inside, axis=1))
            place, values = places[inside], values[inside]
        self._parts.append((query, members[place], values))
        self._unsorted += len(query)
        # Now and then, so that what was listed under a low bar does not pile up.
        if self._unsorted > len(self._bar) * self._limit:
            self._merge()

    def _reached_groups(self, scores, in_rows):
        """Whether the highest of each group of scores reaches the bar, now raised.

        A group is strided: neighbouring rows, often of one class, fall in different
        groups, and the maximum runs along contiguous memory.
        """
        count = scores.shape[1]
        group = min(self._group, count / (2 * self.wanted), LARGEST_GROUP)
        group = 1 << max(0, int(group).bit_length() - 1)  # a power of two
        stride = count // group
        if in_rows:
            maxima = scores.reshape(-1, group, stride).max(axis=1)
        else:
            maxima = scores.T.reshape(group, stride, -1).max(axis=0)
            maxima = np.ascontiguousarray(maxima.T)
        maxima = maxima[: len(self._bar)]
        reached = maxima >= self._bar[:, None]
        number = np.count_nonzero(reached, axis=1)
        many = np.flatnonzero(number > self.wanted)
        if many.size:
            of_many = maxima[many]
            kth = stride - self.wanted
            self._raise_bar(many, np.partition(of_many, kth, axis=1)[:, kth])
            reached[many] = of_many >= self._bar[many, None]
            number[many] = np.count_nonzero(reached[many], axis=1)
        crowded = number > self._limit
        if crowded.any():
            self._give_up(crowded)
            reached[crowded] = False
        return reached

    def finish(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ends the list.

        Returns:
            `(num_queries,)` booleans: the query has so many that they are not listed.
            Of the others, `(others, width)` scores, highest first, and gallery rows;
            `width >= wanted`, and what a row has not is NaN and index -1.
        """
        query, members, values, place = self._merge()
        keys = np.full((len(self._bar), place.max(initial=-1) + 1), _NO_KEY)
        keys[query, place] = _pack(values, members)
        keys = keys[~self._crowded]
        keys.sort(axis=1)
        return self._crowded, *_unpack(keys)

    def _raise_bar(self, queries, scores):
        """Lifts the bar of some queries to what a k-th highest score allows."""
        bar = (scores - self._margin[queries]).astype(np.float32)
        bar = np.nextafter(bar, np.float32(-np.inf))
        self._bar[queries] = np.maximum(self._bar[queries], bar)

    def _give_up(self, crowded):
        self._crowded |= crowded
        self._bar[crowded] = np.inf

    def _merge(self):
        """Joins the parts, without what is below the bar by now.

        Returns:
            Queries, gallery rows and scores, sorted by query, and the place of each
            among those of its query.
        """
        parts = tuple(map(np.concatenate, zip(*self._parts, strict=True)))
        parts = self._keep(parts, parts[2] >= self._bar[parts[0]])
        parts = self._keep(parts, np.argsort(parts[0], kind="stable"))
        number, place = self._numbered(parts[0])
        if number.max() > self.wanted:
            dense = np.full((len(number), number.max()), _LOWEST)
            dense[parts[0], place] = parts[2]
            # A partition, which should be quicker, is many times slower where most
            # values are the filling.
            dense.sort(axis=1)
            self._raise_bar(slice(None), dense[:, -self.wanted])
            parts = self._keep(parts, parts[2] >= self._bar[parts[0]])
            number, place = self._numbered(parts[0])
        if number.max() > self._limit:
            self._give_up(number > self._limit)
            parts = self._keep(parts, ~self._crowded[parts[0]])
            number, place = self._numbered(parts[0])
        self._parts, self._unsorted = [parts], 0
        return *parts, place

    def _keep(self, parts, which):
        return tuple(part[which] for part in parts)

    def _numbered(self, query):
        """How often each query occurs, and how often before each place."""
        number = np.bincount(query, minlength=len(self._bar))
        return number, np.arange(len(query)) - (np.cumsum(number) - number)[query]


def _pack(scores, indices):
    """Keys that sort by score, highest first: numpy sorts int64 many times faster
    than it sorts one array by another."""
    bits = scores.view(np.int32)
    # Negative floats are ordered backwards if read as integers.
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (~ascending).astype(np.int64) << 32 | indices


def _unpack(keys):
    ascending = ~(keys >> 32).astype(np.int32)
    bits = ascending ^ ((ascending >> 31) & 0x7FFFFFFF)
    indices = np.where(keys == _NO_KEY, -1, keys & 0xFFFFFFFF)
    return bits.view(np.float32), indices

"""Shortlist: the best scores of some queries, gathered from parts of the gallery."""

import numpy as np

LARGEST_GROUP = 64
# Candidates beyond 2 k that are still listed.
_EXTRA = 32
# Where the groups that are reached hold more than one score in so many, it is quicker
# to look at all scores.
_DENSE = 16
# Maxima of smaller groups take longer than to compare all scores with a bar that an
# earlier part has set.
_SMALLEST_GROUP = 16
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
        self._has_bar = False
        self._crowded = np.zeros(len(error), bool)
        # Sorted; what a row has not is _NO_KEY.
        self._keys = np.empty((len(error), 0), np.int64)
        # Queries, ascending, and keys that are not sorted in yet.
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
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
        flat = scores.ravel(order="K")
        in_rows = scores.flags.c_contiguous
        steps = (scores.shape[1], 1) if in_rows else (1, len(scores))
        group = self._group_size(scores.shape[1])
        at_once = self._has_bar and group < _SMALLEST_GROUP
        if at_once:
            reached = self._reaching(scores)
            # Unless this part is so much nearer that the bar has to rise first.
            at_once = np.count_nonzero(reached) <= len(self._bar) * self._limit
        if not at_once:
            query, place, stride = self._reached_groups(scores, group)
            if len(query) * group > scores.size / _DENSE:
                at_once, reached = True, self._reaching(scores)
        if at_once:
            query, place = _true_places(reached)
            many = np.bincount(query, minlength=len(self._bar)) > self._limit
            if many.any():
                self._thin_out(scores, reached, np.flatnonzero(many))
                query, place = _true_places(reached)
            values = flat.take(query * steps[0] + place * steps[1])
        else:
            places = place[:, None] + stride * np.arange(group)
            values = flat.take(query[:, None] * steps[0] + places * steps[1])
            inside = values >= self._bar[query, None]
            query = np.repeat(query, np.count_nonzero(inside, axis=1))
            place, values = places[inside], values[inside]
        self._has_bar = True
        self._parts.append((query, _pack(values, members[place])))
        self._unsorted += len(query)
        # Now and then, so that what was listed under a low bar does not pile up.
        if self._unsorted > len(self._bar) * self._limit:
            self._merge()

    def _group_size(self, count):
        group = min(self._group, count / (2 * self.wanted), LARGEST_GROUP)
        return 1 << max(0, int(group).bit_length() - 1)  # a power of two

    def _reaching(self, scores):
        """Whether each score reaches the bar of its query."""
        bar = np.full((len(scores), 1), np.inf, np.float32)
        bar[: len(self._bar), 0] = self._bar
        return scores >= bar

    def _thin_out(self, scores, reached, queries):
        """Raises the bar of queries that many scores reach, or gives them up."""
        of_them = scores[queries]
        kth = scores.shape[1] - self.wanted
        self._raise_bar(queries, np.partition(of_them, kth, axis=1)[:, kth])
        of_them = of_them >= self._bar[queries, None]
        too_many = np.count_nonzero(of_them, axis=1) > self._limit
        of_them[too_many] = False
        reached[queries] = of_them
        crowded = np.zeros(len(self._bar), bool)
        crowded[queries[too_many]] = True
        self._give_up(crowded)

    def _reached_groups(self, scores, group):
        """Groups of scores whose highest reaches the bar, now raised.

        A group is strided: neighbouring rows, often of one class, fall in different
        groups, and the maximum runs along contiguous memory.

        Returns:
            Queries, ascending, and numbers of their groups; and how many groups each
            query has, which is also the step from one score of a group to the next.
        """
        stride = scores.shape[1] // group
        if scores.flags.c_contiguous:
            maxima = scores.reshape(-1, group, stride).max(axis=1)
        else:
            maxima = scores.T.reshape(group, stride, -1).max(axis=0).T
        maxima = maxima[: len(self._bar)]
        reached = maxima >= self._bar[:, None]
        many = np.flatnonzero(np.count_nonzero(reached, axis=1) > self.wanted)
        if many.size:
            self._thin_out(maxima, reached, many)
        return *_true_places(reached), stride

    def finish(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ends the list.

        Returns:
            `(num_queries,)` booleans: the query has so many that they are not listed.
            Of the others, `(others, width)` scores, highest first, and gallery rows;
            `width >= wanted`, and what a row has not is NaN and index -1.
        """
        self._merge()
        return self._crowded, *_unpack(self._keys[~self._crowded])

    def _raise_bar(self, queries, scores):
        """Lifts the bar of some queries to what a k-th highest score allows."""
        bar = (scores - self._margin[queries]).astype(np.float32)
        bar = np.nextafter(bar, np.float32(-np.inf))
        # Not np.maximum: NaN where there are fewer scores.
        self._bar[queries] = np.fmax(self._bar[queries], bar)

    def _give_up(self, crowded):
        self._crowded |= crowded
        self._bar[crowded] = np.inf

    def _merge(self):
        """Sorts the parts into the keys, without what is below the bar by now."""
        last = self._last_keys()
        reach = [key <= last[query] for query, key in self._parts]
        parts = [
            (query[inside], key[inside])
            for (query, key), inside in zip(self._parts, reach, strict=True)
        ]
        counts = [np.bincount(query, minlength=len(last)) for query, _ in parts]
        width = self._keys.shape[1]
        end = np.full(len(last), width)
        keys = np.full((len(last), sum(counts, end).max()), _NO_KEY)
        keys[:, :width] = self._keys
        for (query, key), count in zip(parts, counts, strict=True):
            first = end - (np.cumsum(count) - count)
            keys[query, np.arange(len(query)) + first[query]] = key
            end += count
        keys.sort(axis=1)
        if keys.shape[1] >= self.wanted:
            kth, _ = _unpack(keys[:, self.wanted - 1])
            self._raise_bar(slice(None), kth)
        number = np.count_nonzero(keys <= self._last_keys()[:, None], axis=1)
        if number.max() > self._limit:
            self._give_up(number > self._limit)
            number[self._crowded] = 0
        keys = keys[:, : number.max()]
        keys[np.arange(keys.shape[1]) >= number[:, None]] = _NO_KEY
        self._keys, self._parts, self._unsorted = keys, [], 0

    def _last_keys(self):
        """The last key of each query that still reaches the bar."""
        # A trifle below it, since keys tell 0 from -0.
        return _pack(np.nextafter(self._bar, np.float32(-np.inf)), 2**32 - 1)


def _true_places(which):
    """Rows, ascending, and columns of what is true; np.nonzero takes much longer."""
    if not which.flags.c_contiguous:
        column, row = _true_places(which.T)
        # numpy sorts 16 bits in linear time.
        key = row.astype(np.uint16) if len(which) < 2**16 else row
        order = np.argsort(key, kind="stable")
        return row[order], column[order]
    found = np.flatnonzero(which)
    rows, columns = which.shape
    ends = np.searchsorted(found, np.arange(rows + 1) * columns)
    row = np.repeat(np.arange(rows), np.diff(ends))
    return row, found - row * columns


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

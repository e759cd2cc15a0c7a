"""Pictures: sizes and frames by arithmetic, and what a figure holds."""

import sys

import numpy as np
import pytest
import threadpoolctl  # of scikit-learn

from keras_ccp.monitor.figures import neighbor_gallery, projection_figure, search_figure
from keras_ccp.monitor.projection_log import Projection, measure

DISTANCE = "mean_inter_class_distance"
GREY, GREEN, RED = (90, 90, 90), (34, 160, 60), (214, 40, 40)


def test_frames_tell_right_from_wrong():
    queries = np.full((3, 4, 4, 3), 10, "uint8")
    neighbors = np.full((3, 2, 4, 4, 3), 20, "uint8")
    is_right = np.array([[True, False], [False, True], [True, True]])
    picture = neighbor_gallery(queries, neighbors, is_right, columns=2, scale=1)
    # A tile is 4 + 2 * 2 of frame + 2 * 1 of white = 10 wide; a row is a query, a
    # gap of 6, two neighbours and a gap of 8: 10 + 6 + 20 + 8 = 44. Two rows across
    # and two down, the fourth of which is blank.
    assert picture.shape == (20, 88, 3) and picture.dtype == np.uint8
    frame, inside = 2, 5  # second pixel of the frame, and the picture
    for row, (top, left) in enumerate([(0, 0), (0, 44), (10, 0)]):
        assert tuple(picture[top + frame, left + inside]) == GREY
        assert tuple(picture[top + inside, left + inside]) == (10, 10, 10)
        for k in range(2):
            x = left + 16 + 10 * k
            expected = GREEN if is_right[row, k] else RED
            assert tuple(picture[top + frame, x + inside]) == expected
            assert tuple(picture[top + inside, x + inside]) == (20, 20, 20)
    assert (picture[10:, 44:] == 255).all()
    # Each pixel becomes a square.
    images = np.arange(12, dtype="uint8").reshape(1, 2, 2, 3)
    small, large = (neighbor_gallery(images, [images], [[1]], 1, s) for s in (1, 3))
    np.testing.assert_array_equal(small[3:5, 3:5], images[0])
    np.testing.assert_array_equal(large, small.repeat(3, axis=0).repeat(3, axis=1))


# ==== projection_figure ====


def projection(dim=2, num_classes=3, is_last=False, seed=0):
    """Eight samples a class, two proxies each, all in the unit ball."""
    rng = np.random.default_rng(seed)
    labels = np.arange(8 * num_classes) % num_classes
    embeddings = rng.uniform(-0.5, 0.5, (len(labels), dim)).astype("float32")
    proxies = rng.uniform(-0.5, 0.5, (num_classes, 2, dim)).astype("float32")
    after = None if is_last else proxies + 0.1
    return Projection(embeddings, labels, proxies, after, 0.875)


def drawn(panel):
    """Places and markers' numbers of corners of what is scattered on a panel."""
    return [
        (np.asarray(points.get_offsets()), len(points.get_paths()[0].vertices))
        for points in panel.collections
    ]


def test_panel_holds_samples_squares_and_circles():
    first, last = projection(), projection(is_last=True, seed=1)
    figure = projection_figure([first, last], class_names=["a", "b", "c"])
    assert figure.dpi == 150
    panels = figure.axes
    samples, squares, circles = drawn(panels[0])
    np.testing.assert_array_equal(samples[0], first.embeddings)
    np.testing.assert_array_equal(squares[0], first.proxies.reshape(-1, 2))
    np.testing.assert_array_equal(circles[0], first.next_proxies.reshape(-1, 2))
    # A square has four corners and the closing point, a circle many.
    assert squares[1] == 5 < circles[1] == samples[1]
    assert len(drawn(panels[1])) == 2
    # Squares lie above, and a class has one colour.
    order = [points.get_zorder() for points in panels[0].collections]
    assert order[1] > order[2] > order[0]
    dots, squares, _ = (points.get_facecolors() for points in panels[0].collections)
    np.testing.assert_array_equal(dots[:3, :3], squares[::2, :3])
    assert len(np.unique(dots, axis=0)) == 3
    assert [text.get_text() for text in panels[0].texts] == ["a", "b", "c"]
    # One scale, which holds everything.
    assert panels[0].get_xlim() == panels[1].get_xlim() == panels[0].get_ylim()
    assert np.abs(first.next_proxies).max() < panels[0].get_xlim()[1]


def test_titles_give_the_numbers():
    first = projection()
    figure = projection_figure([first, first], titles=["before", "after"])
    numbers = measure(first.embeddings, first.labels, first.proxies)
    radius, distance = numbers["mean_covering_radius"], numbers[DISTANCE]
    expected = f"after\nMAP@R 0.88   radius {radius:.2f}   distance {distance:.2f}"
    assert figure.axes[1].get_title() == expected
    assert projection_figure([first]).axes[0].get_title().startswith("problem 1\n")
    with pytest.raises(ValueError, match="at least one. Received: none"):
        projection_figure([])
    with pytest.raises(ValueError):
        projection_figure([first], titles=["a", "b"])


@pytest.mark.parametrize(("columns", "width"), [(1, 1), (3, 3), (9, 7)])
def test_titles_do_not_overlap(columns, width):
    figure = projection_figure([projection()] * 7, columns=columns)
    figure.draw_without_rendering()
    # The last row is filled up with panels that are not seen.
    seen = [panel.axison for panel in figure.axes]
    assert seen == [True] * 7 + [False] * (-7 % width)
    parts = [part for panel in figure.axes[:7] for part in (panel, panel.title)]
    boxes = [part.get_window_extent() for part in (*parts, figure.legends[0])]
    for i, box in enumerate(boxes):
        assert box.count_overlaps(boxes[:i] + boxes[i + 1 :]) == 0
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


def test_more_dimensions_by_t_sne():
    first = projection(dim=5)
    # Far from the others: t-SNE must keep the class of proxies together with it.
    first.embeddings[first.labels == 2] += 50
    first.proxies[2] += 50
    first.next_proxies[2] += 50
    # With so few points its threads would only wait for one another.
    with threadpoolctl.threadpool_limits(1):
        one, two = (projection_figure([first]).axes[0] for _ in range(2))
    (samples, _), (squares, _), (circles, _) = drawn(one)
    assert samples.shape == (24, 2) and squares.shape == circles.shape == (6, 2)
    np.testing.assert_array_equal(samples, drawn(two)[0][0])
    center = samples[first.labels == 2].mean(axis=0)
    other = samples[first.labels != 2].mean(axis=0)
    for places in (squares[4:], circles[4:]):
        near = np.linalg.norm(places - center, axis=1)
        assert (near < np.linalg.norm(places - other, axis=1)).all()
    # The numbers are those of the five dimensions.
    numbers = measure(first.embeddings, first.labels, first.proxies)
    assert f"radius {numbers['mean_covering_radius']:.2f}" in one.get_title()


# ==== search_figure ====


def test_search_draws_each_trial():
    figure = search_figure(
        [1e-4, 1e-3, 1e-2, 1e-1], [1, 2, 4, 3], [0.5, 0.7, 0.6, 0.9],
        is_pruned=[False, False, False, True],
        own=(1e-4, 1),
    )  # fmt: skip
    axes = figure.axes[0]
    assert axes.get_xscale() == "log"
    discs, crosses, best, own = (c.get_offsets().tolist() for c in axes.collections)
    # From the worst to the best of those that were not cut short.
    assert discs == [[1e-4, 1], [1e-2, 4], [1e-3, 2]]
    assert axes.collections[0].get_array().tolist() == [0.5, 0.6, 0.7]
    assert crosses == [[1e-1, 3]]
    assert best == [[1e-3, 2]] and own == [[1e-4, 1]]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["cut short", "best, MAP@R 0.7000", "the configuration's own"]


@pytest.mark.parametrize(
    ("missing", "draw"),
    [
        ("matplotlib", lambda: projection_figure([projection()])),
        ("matplotlib", lambda: search_figure([0.1], [1], [0.5])),
        ("sklearn", lambda: projection_figure([projection(3)])),
    ],
)
def test_missing_package_is_named_with_its_extra(missing, draw, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"keras-ccp\[plots\]"):
        draw()

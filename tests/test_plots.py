"""Pictures: sizes and frames by arithmetic."""

import numpy as np
import pytest

from keras_ccp.plots import neighbor_gallery

GREY, GREEN, RED = (90, 90, 90), (34, 160, 60), (214, 40, 40)


def test_frames_tell_right_from_wrong():
    queries = np.full((3, 4, 4, 3), 10, "uint8")
    neighbors = np.full((3, 2, 4, 4, 3), 20, "uint8")
    is_right = np.array([[True, False], [False, True], [True, True]])
    picture = neighbor_gallery(queries, neighbors, is_right, columns=2, scale=1)
    # A tile is 4 + 2 * 2 of frame + 2 * 1 of white = 10 wide; a row is a query, a
    # gap of 6, two neighbours and a gap of 8: 10 + 6 + 20 + 8 = 44. Two rows across
    # and two down, the fourth of which is blank.
    assert picture.shape == (20, 88, 3)
    assert picture.dtype == np.uint8
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


def test_scale_makes_squares_of_pixels():
    images = np.arange(12, dtype="uint8").reshape(1, 2, 2, 3)
    picture = neighbor_gallery(images, images[None], [[True]], columns=1, scale=3)
    start = 3 * 3  # white and frame, three pixels and two times three
    for y in range(2):
        for x in range(2):
            block = picture[start + 3 * y :, start + 3 * x :][:3, :3]
            assert (block == images[0, y, x]).all()


def test_shapes_must_fit():
    images = np.zeros((2, 4, 4, 3), "uint8")
    with pytest.raises(ValueError, match="`neighbors` must hold k images"):
        neighbor_gallery(images, images[:, None], [[True], [True], [False]])

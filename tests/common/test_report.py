"""Tables, intervals and plots of reports."""

import math

import pytest
from matplotlib.image import imread
from scipy import stats

from neobert_hf.common.report import Line, Panel, markdown_table, mean_interval, plot_lines


def test_table():
    assert markdown_table(["a", "b"], [[1, "x"], [2.5, "y"]]) == [
        "| a | b |",
        "| --- | --- |",
        "| 1 | x |",
        "| 2.5 | y |",
    ]


def test_interval_is_that_of_students_t():
    values = [1.0, 2.0, 4.0, 7.0]
    mean, low, high = mean_interval(values)
    expected = stats.t.interval(0.95, 3, loc=3.5, scale=stats.sem(values))
    assert mean == 3.5 and (low, high) == pytest.approx(expected, abs=1e-12)
    assert math.isnan(mean_interval([1.0])[1])


def test_panels_are_drawn_whole(tmp_path):
    lines = [Line([(1, 2), (2, 3)], "up", {"marker": "o"}), Line([], "nothing")]
    plot_lines(tmp_path / "plot.png", [Panel(lines, {"title": "one"}, lengths=[1, 2])] * 3, columns=2)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["plot.png"]
    # The place that no panel has taken is empty: without a frame it is white.
    picture = imread(tmp_path / "plot.png")
    height, width, _ = picture.shape
    assert (picture[height // 2 + 5 :, width // 2 + 5 :] == 1).all()
    assert not (picture[height // 2 + 5 :, : width // 2] == 1).all()

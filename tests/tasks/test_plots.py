"""What the reports of the tasks draw."""

import numpy as np
from matplotlib.image import imread

from neobert_hf.tasks.plots import means_by_length, plot_confusion


def test_a_confusion_is_in_the_row_of_the_right_class(tmp_path):
    """All of the first class are taken for the second: the dark cell is above, on the right."""
    counts = np.array([[0, 4], [0, 0]])
    assert plot_confusion(tmp_path / "plot.png", counts, ["a", "b"]) == ["![confusion matrix](plot.png)", ""]
    picture = imread(tmp_path / "plot.png")
    rows, columns = np.nonzero(picture[..., 2] - picture[..., 0] > 0.3)
    assert rows.mean() < picture.shape[0] / 2 and columns.mean() > picture.shape[1] / 2
    # Between two dollar signs matplotlib found a formula, and it ended the run if it was none.
    assert plot_confusion(tmp_path / "money.png", counts, ["under $5_$", "$10"])
    # More classes than could be read are not drawn.
    assert plot_confusion(tmp_path / "many.png", np.eye(61), list(map(str, range(61)))) == []
    assert not (tmp_path / "many.png").exists()


def test_means_by_length():
    lengths, values = [5, 1, 2, 2, 2, 9], [0.0, 1.0, 0.0, 1.0, 0.5, 1.0]
    assert means_by_length(lengths, values, groups=3) == [(1.75, 0.625), (7.0, 0.5)]
    assert means_by_length([3, 3], [0, 1]) == [(3.0, 0.5)] and means_by_length([], []) == []

import pytest

pytest.importorskip("plotly")

from sampled_sae.reporting.panels import log_ticks


@pytest.mark.parametrize(("low", "high"), [(0.21, 0.34), (0.9, 1.3), (3.0, 29.0), (1e-4, 9e-4)])
def test_an_axis_of_less_than_a_decade_has_ticks(low, high):
    ticks = log_ticks([low, high, 0.0])["tickvals"]
    assert len([tick for tick in ticks if low <= tick <= high]) >= 2


def test_longer_axes_are_plotlys():
    assert log_ticks([0.1, 1.0]) == log_ticks([]) == {"dtick": "D2"}

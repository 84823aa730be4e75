"""What engines count for operators: buckets that add up, and no name that is not known."""

import math

from hypothesis import given
from hypothesis import strategies as st

from proto.figures import FIGURES, HISTOGRAMS, Figures, Histogram, Spread, known

seconds = st.floats(0, 1000)


@given(st.sampled_from(sorted(HISTOGRAMS)), st.lists(seconds, max_size=30))
def test_every_observation_is_in_the_one_bucket_that_it_belongs_to(name: str, observed: list[float]) -> None:
    histogram = Histogram(name)
    for one in observed:
        histogram.add(one)
    spread = histogram.spread
    lower = -math.inf
    for upper, count in zip((*HISTOGRAMS[name][1], math.inf), spread.counts, strict=True):
        assert count == sum(lower < one <= upper for one in observed)
        lower = upper
    assert spread.total == sum(observed)
    assert histogram.count == len(observed)
    assert histogram.longest == max(observed, default=0)


def test_bounds_rise() -> None:
    assert all(list(bounds) == sorted(set(bounds)) for _, bounds in HISTOGRAMS.values())


def test_names_that_are_not_known_and_numbers_that_are_none_are_dropped() -> None:
    fine = Histogram("queue_seconds")
    fine.add(0.2)
    told = Figures(
        {"kv_pages": 3.0, "made_up": 1.0, "preemptions": math.nan},
        {"queue_seconds": fine.spread, "made_up": fine.spread, "first_token_seconds": Spread((1,), 0.1)},
    )
    assert known(told) == Figures({"kv_pages": 3.0}, {"queue_seconds": fine.spread})
    assert "kv_pages" in FIGURES

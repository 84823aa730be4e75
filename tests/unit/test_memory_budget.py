"""What the memory budget promises: a request is refused with the numbers if it cannot fit, and never for noise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.errors import InvalidRequest
from proto.ids import StageName
from stages.diffusion.budget import PIXELS, Amount, Budget, Measured, fit
from stages.diffusion.scheduler import Phase

MIB = 2**20
SHAPES = (Amount(1000), Amount(4000), Amount(4000, frames=5))


def measured(amount: Amount, decode: int, held: int = 0) -> Measured:
    return Measured(amount, {Phase.ENCODE: 0, Phase.DENOISE: 0, Phase.DECODE: decode}, held)


def budget(total: int, fixed: int = 2 * MIB, rate: int = 1000) -> Budget:
    lots = [measured(one, fixed + rate * one.area) for one in SHAPES[:2]]
    return Budget(StageName("painter"), "FluxPipeline", fit(lots), total, PIXELS)


def test_what_grows_with_area_and_frames_is_found_again() -> None:
    def real(amount: Amount) -> int:
        return 5 * MIB + 700 * amount.area + 50 * amount.total

    profile = fit([measured(one, real(one)) for one in SHAPES])
    large = Amount(1 << 20, frames=81)
    assert profile.need(large).calls[Phase.DECODE] == pytest.approx(real(large), rel=1e-6)


def test_a_still_picture_is_no_less_than_what_two_of_them_say() -> None:
    profile = fit([measured(one, 1000 * one.area) for one in SHAPES[:2]])
    assert profile.need(Amount(10**6)).peak == pytest.approx(10**9, rel=1e-6)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=3), st.lists(st.integers(0, 10**6), min_size=3, max_size=3))
def test_no_noise_makes_less_of_a_request_than_was_seen_or_of_a_larger_one(sizes: list[int], held: list[int]) -> None:
    lots = [measured(one, size, held[at]) for at, (one, size) in enumerate(zip(SHAPES, sizes, strict=False))]
    profile = fit(lots)
    for one in lots:
        assert profile.need(one.amount).peak >= one.peaks[Phase.DECODE] - 1
    for small, large in ((Amount(10), Amount(20)), (Amount(10), Amount(10, 2)), (Amount(4000, 5), Amount(10**7, 5))):
        assert profile.need(small).peak <= profile.need(large).peak
    assert profile.need(Amount(10**6)).peak >= 12 * 10**6


def test_a_request_beyond_the_budget_is_refused_with_what_it_asks_what_there_is_and_what_would_fit() -> None:
    with pytest.raises(InvalidRequest) as refused:
        budget(100 * MIB).need(Amount(1 << 20))
    text = refused.value.info.message
    assert refused.value.info.field == "width"
    assert "would take 1,002 MiB of memory for 1048576 pixels" in text
    assert "most of it to decode; its budget is 100 MiB" in text
    largest = int(text.split("ask for ")[1].split()[0])
    assert budget(100 * MIB).need(Amount(largest)).peak <= 100 * MIB
    with pytest.raises(InvalidRequest):
        budget(100 * MIB).need(Amount(largest + 1))


def test_a_budget_into_which_nothing_fits_says_so() -> None:
    with pytest.raises(InvalidRequest, match=r"nothing of that kind fits into it; raise engine.memory"):
        budget(1 * MIB).need(Amount(1))

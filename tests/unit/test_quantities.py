"""Money, spans and sizes are read as written and shown as read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucloud.domain.job import quantities as q


@pytest.mark.parametrize(
    ("text", "usd"),
    [
        ("20 USD", "20"),
        ("0.5 USD", "0.5"),
        ("20usd", "20"),
        ("$20", "20"),
        ("$ 0.05", "0.05"),
        (" 1000000 USD ", "1000000"),
        ("0 USD", "0"),
    ],
)
def test_money_is_read_exactly(text: str, usd: str) -> None:
    assert q.parse_usd(text) == Decimal(usd)


@pytest.mark.parametrize(
    "text", ["20", "", "USD", "-1 USD", "1e3 USD", "20 EUR", "$20 USD", "1,000 USD", "NaN USD", "٣ USD"]
)
def test_what_is_not_money_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ValueError, match=r'is not a sum of money: write it like "20 USD" or "0\.5 USD"'):
        q.parse_usd(text)


def test_a_sum_beyond_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match='"100000001 USD" is too much: the most is 100000000 USD'):
        q.parse_usd("100000001 USD")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12h", 43200),
        ("90 min", 5400),
        ("30s", 30),
        ("2d 3h", 183600),
        ("1h30m", 5400),
        ("1.5 hours", 5400),
        ("0.5 s", 0.5),
        ("1 Day", 86400),
    ],
)
def test_a_span_is_read(text: str, seconds: float) -> None:
    assert q.parse_span(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["12", "", "h", "3h 2d", "1h 1h", "1 fortnight", "-1h", "1h and 2m", "1h:30m", "1..5h"]
)
def test_what_is_not_a_span_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ValueError, match='is not a span of time: write it like "12h", "90 min", "30s" or "2d 3h"'):
        q.parse_span(text)


def test_a_span_beyond_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match='"367d" is too long: the longest span is 366d'):
        q.parse_span("367d")


@pytest.mark.parametrize(
    ("text", "size"), [("40 GiB", 40 * 2**30), ("512MiB", 2**29), ("1.5 KiB", 1536), ("80 GB", 80 * 10**9), ("7 B", 7)]
)
def test_a_size_is_read_in_bytes(text: str, size: int) -> None:
    assert q.parse_size(text) == size


@pytest.mark.parametrize("text", ["40", "", "GiB", "40 Gb", "40 PiB", "-1 GiB", "0.0000001 KiB", "1025 TiB"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^\"" + text):
        q.parse_size(text)


def test_gib_are_whole() -> None:
    assert q.parse_gib("1 TiB") == 1024
    with pytest.raises(ValueError, match='"80 GB" is not a whole number of GiB: write it like "40 GiB"'):
        q.parse_gib("80 GB")


@pytest.mark.parametrize(
    ("usd", "shown"),
    [
        ("20", "20.00 USD"),
        ("0.5", "0.50 USD"),
        ("0.0312", "0.0312 USD"),
        ("0.9999", "1.00 USD"),
        ("0.03125", "0.0312 USD"),
        ("0.001234567", "0.00123 USD"),
        ("0.0000004", "0.000000400 USD"),
        ("4E-7", "0.000000400 USD"),
        ("1234.567", "1234.57 USD"),
        ("1E+3", "1000.00 USD"),
        ("0", "0.00 USD"),
        ("-0.031", "-0.0310 USD"),
    ],
)
def test_money_is_shown_with_digits_enough_and_never_scientific(usd: str, shown: str) -> None:
    assert q.format_usd(Decimal(usd)) == shown


@pytest.mark.parametrize(
    ("usd", "shown"),
    [
        ("2.3501", "2.36 USD"),
        ("2.35", "2.35 USD"),
        ("0.03121", "0.0313 USD"),
        ("0.9991", "1.00 USD"),
        ("0", "0.00 USD"),
    ],
)
def test_a_sum_that_is_the_most_is_rounded_up(usd, shown):
    assert q.format_most(Decimal(usd)) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (4.2, "4.2 s"),
        (30, "30 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (725, "12 min 5 s"),
        (3599.6, "1 h"),
        (5520, "1 h 32 min"),
        (86399, "24 h"),
        (104940, "29 h 9 min"),
        (183600, "51 h"),
        (356400, "4 d 3 h"),
        (-30, "-30 s"),
    ],
)
def test_a_span_is_shown_in_two_units(seconds: float, shown: str) -> None:
    assert q.format_span(timedelta(seconds=seconds)) == shown


@pytest.mark.parametrize(
    ("seconds", "shown", "written"),
    [
        (48 * 3600, "48 h", "48h"),
        (48 * 3600 + 1440, "48.4 h", "48h 24min"),
        (30, "30 s", "1min"),
        (7201, "2 h", "2h 1min"),
        (90 * 60, "1 h 30 min", "1h 30min"),
    ],
)
def test_deadlines_are_shown_in_hours_and_written_in_whole_minutes(seconds: float, shown: str, written: str) -> None:
    span = timedelta(seconds=seconds)
    assert (q.format_hours(span), q.written_span(span)) == (shown, written)
    assert timedelta(0) <= q.parse_span(written) - span < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1 MiB"),
        (40 * 2**30, "40 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_a_size_is_shown_in_powers_of_1024(size: int, shown: str) -> None:
    assert q.format_size(size) == shown


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=366)))
def test_a_span_that_is_shown_can_be_read_back_to_within_half_its_smallest_unit(span: timedelta) -> None:
    assert abs(q.parse_span(q.format_span(span)) - span) <= max(span / 24, timedelta(seconds=0.05))


@given(st.decimals(min_value=0, max_value=1_000_000, places=9))
def test_money_that_is_shown_is_within_half_a_percent_and_a_cent(usd: Decimal) -> None:
    shown = q.parse_usd(q.format_usd(usd))
    assert abs(shown - usd) <= max(usd * Decimal("0.005"), Decimal(0))


@pytest.mark.parametrize(
    ("text", "count", "shown"),
    [
        ("7B", 7_000_000_000, "7.0B"),
        ("1.5e9", 1_500_000_000, "1.5B"),
        ("350 m", 350_000_000, "350M"),
        ("32k", 32_000, "32000"),
        ("1024", 1024, "1024"),
        ("999.6M", 999_600_000, "1.0B"),
        ("99.96B", 99_960_000_000, "100B"),
        ("1.4T", 1_400_000_000_000, "1.4T"),
    ],
)
def test_a_count_is_read_and_shown(text: str, count: int, shown: str) -> None:
    assert q.parse_count(text) == count
    assert q.format_count(count) == shown


@pytest.mark.parametrize("text", ["", "B", "-1", "7 billion", "1,000", "7BB", "7e9B", "1e999"])
def test_what_is_not_a_count_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ValueError, match=r'is not a number of things: write it like "7B", "350M" or "1024"'):
        q.parse_count(text)


@pytest.mark.parametrize("text", ["0", "0.5", "1.5", "1e19", "9e99"])
def test_a_count_is_whole_and_within_its_bounds(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole number from 1 to 10"):
        q.parse_count(text)


@given(st.sampled_from((q.parse_usd, q.parse_span, q.parse_size, q.parse_gib, q.parse_count)), st.text(max_size=30))
def test_no_text_brings_anything_but_a_value_error(parse: Callable[[str], object], text: str) -> None:
    with suppress(ValueError):
        assert parse(text) is not None


@pytest.mark.parametrize("parse", [q.parse_usd, q.parse_span, q.parse_size, q.parse_gib, q.parse_count])
def test_what_cannot_be_printed_is_not_repeated_in_a_message(parse):
    with pytest.raises(ValueError, match="is not") as caught:
        parse("\U0001019d\n")
    assert str(caught.value).isprintable()

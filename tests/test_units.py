"""Sizes: what is written is understood, and what is printed is in one system of units."""

from __future__ import annotations

import pytest

from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        ("0", 0),
        (4096, 4096),
        ("4096", 4096),
        ("4G", 4 * 10**9),
        ("4GB", 4 * 10**9),
        ("4 gb", 4 * 10**9),
        ("4Gb", 4 * 10**9),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        (" 500 MB ", 500 * 10**6),
        ("1.5MiB", 3 << 19),
        ("100k", 100_000),
        ("7B", 7),
    ],
)
def test_a_size_is_bytes_or_a_number_and_a_unit_in_any_case(size, nbytes):
    assert parse_bytes(size, "host_memory") == nbytes


NO_SIZES = ["10%", "-5", -5, 1.5, "1.5", True, "abc", "many", "GiB", "4 Gbit", "4_000", "1 2", "4GB!", "", [1], None]


@pytest.mark.parametrize("size", NO_SIZES)
def test_what_is_no_size_is_said_with_its_name_and_what_to_write(size):
    with pytest.raises(ConfigError, match=r"^host_memory=.* is not a valid size; .*'10GiB' or '500MB'$"):
        parse_bytes(size, "host_memory")


def test_bytes_are_printed_in_binary_units():
    assert [format_bytes(n) for n in (0, 1023, 1536, 10**9, 5 << 40)] == [
        "0 Bytes",
        "1023 Bytes",
        "1.5 KiB",
        "953.7 MiB",
        "5.0 TiB",
    ]

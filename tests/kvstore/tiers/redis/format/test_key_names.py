from __future__ import annotations

from kvstore.tiers.redis.format.key_names import page_pattern


def test_a_pattern_takes_no_byte_of_a_key_for_a_wildcard() -> None:
    assert page_pattern(b"a*[\\]?-^z") == b"kvstore:page:a\\*\\[\\\\\\]\\?\\-\\^z*"

"""A profile survives being written and read."""

from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nybble.devices import DeviceProfile, Provider, list_profiles
from nybble.devices.profile import parse_profile
from nybble.devices.profile_text import profile_toml

LINE = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1)
OPTIONS = st.dictionaries(LINE, LINE, max_size=3).map(MappingProxyType)
PROVIDERS = st.lists(
    st.builds(Provider, LINE.map(lambda text: f"{text}ExecutionProvider"), OPTIONS),
    min_size=1,
    max_size=3,
    unique_by=lambda provider: provider.name,
)


@given(
    st.builds(
        DeviceProfile,
        name=st.just("one"),
        description=LINE,
        memory_bytes=st.integers(2**30, 2**62),
        memory_kind=st.sampled_from(["host", "unified", "gpu"]),
        memory_budget=st.integers(2**20, 2**30),
        threads=st.integers(1, 1024),
        bandwidth=st.none() | st.integers(1, 10**6).map(lambda n: n * 1e9 / 1024),
        providers=PROVIDERS.map(tuple),
        page_size=st.sampled_from([16, 256]),
        kv_dtype=st.sampled_from(["f32", "f16", "int16", "int8"]),
        token_budget=st.integers(1, 2**20),
        context=st.integers(1, 2**24),
        speculation=st.sampled_from([None, "auto", "off", "ngram"]),
        target_token_ms=st.none() | st.integers(1, 1000).map(float),
        cached_bytes=st.none() | st.integers(1, 2**30),
    )
)
def test_any_profile_is_read_back_as_it_was(profile):
    found = parse_profile(profile_toml(profile), "one", "one.toml")
    assert vars(found) | {"bandwidth": None} == vars(profile) | {"bandwidth": None}
    assert found.bandwidth == (None if profile.bandwidth is None else pytest.approx(profile.bandwidth))


@pytest.mark.parametrize("profile", list_profiles(), ids=lambda profile: profile.name)
def test_our_own_profiles_too(profile):
    assert parse_profile(profile_toml(profile), profile.name, "") == profile

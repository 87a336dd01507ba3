import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nybble.devices import list_profiles, load_profile, resolve_device
from nybble.devices.profile import parse_profile
from nybble.errors import SettingError

GOOD = """
description = "A board"
memory_bytes = "4GiB"
memory_kind = "host"
memory_budget = 0.5
threads = 4
bandwidth = 17.1
integer_rate = 614
disk_bandwidth = 0.1
providers = ["CPUExecutionProvider"]
page_size = 16
kv_dtype = "f32"
token_budget = 256
context = 4096
"""


def provider(keys: str) -> str:
    return f'[{{ name = "XExecutionProvider", {keys} }}]'


def test_a_profile_in_full():
    profile = parse_profile(GOOD, "board", "board.toml")
    assert profile.name == "board"
    assert profile.memory_bytes == 4 * 2**30
    assert profile.memory_budget == 2 * 2**30
    assert profile.bandwidth == pytest.approx(17.1e9)
    assert profile.integer_rate == pytest.approx(614e9)
    assert profile.disk_bandwidth == pytest.approx(0.1e9)
    assert profile.provider_list == [("CPUExecutionProvider", {})]


def test_options_of_providers_become_the_text_that_onnx_runtime_takes():
    line = 'providers = [{ name = "CUDAExecutionProvider", options = { device_id = 1, use_tf32 = false } }]'
    text = GOOD.replace('providers = ["CPUExecutionProvider"]', line)
    options = {"device_id": "1", "use_tf32": "0"}
    assert parse_profile(text, "board", "board.toml").provider_list == [("CUDAExecutionProvider", options)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("threads = 4", "treads = 4", "unknown key 'treads'"),
        ("threads = 4", "", "threads is missing"),
        ("threads = 4", "threads = 0", "threads is 0; expected a whole number"),
        ("threads = 4", "threads = true", "threads is True; expected a whole number"),
        ("threads = 4", 'threads = "4"', "threads is '4'; expected a whole number"),
        ("threads = 4", "threads = ", "not TOML"),
        ("page_size = 16", "page_size = 24", "page_size is 24; expected a power of two"),
        ('kv_dtype = "f32"', 'kv_dtype = "f64"', "kv_dtype is 'f64'; expected f32 or f16 or int16 or int8"),
        ('kv_dtype = "f32"', "kv_dtype = [1]", "kv_dtype is [1]"),
        ('memory_bytes = "4GiB"', 'memory_bytes = "4 apples"', "memory_bytes is '4 apples'"),
        ("memory_budget = 0.5", "memory_budget = 1.5", "memory_budget is 1.5"),
        ("memory_budget = 0.5", 'memory_budget = "5GiB"', "more than memory_bytes"),
        ("bandwidth = 17.1", "bandwidth = -1", "bandwidth is -1"),
        ("bandwidth = 17.1", "bandwidth = nan", "bandwidth is nan"),
        ('["CPUExecutionProvider"]', "[]", "providers is []"),
        ('["CPUExecutionProvider"]', '["cpu"]', "ending in ExecutionProvider"),
        ('["CPUExecutionProvider"]', '[{ nam = "x" }]', "providers holds"),
        ('["CPUExecutionProvider"]', provider("options = 3"), "options of XExecutionProvider are 3"),
        (
            '["CPUExecutionProvider"]',
            provider("options = { a = [1] }"),
            "'a' is [1]; expected text",
        ),
        ('["CPUExecutionProvider"]', provider("options = { a = inf }"), "'a' is inf"),
        ('["CPUExecutionProvider"]', provider('options = { a = "x\\u0000" }'), "'a' is 'x\\x00'"),
        ('["CPUExecutionProvider"]', provider('options = { "" = 1 }'), "hold ''; expected an option's name"),
        (
            '["CPUExecutionProvider"]',
            '["XExecutionProvider", "XExecutionProvider"]',
            "holds XExecutionProvider twice",
        ),
        ('"A board"', '""', "description is ''"),
        ("context = 4096", "context = -1", "context is -1"),
    ],
)
def test_each_field_is_checked_and_the_error_names_file_and_key(old, new, message):
    assert old in GOOD
    with pytest.raises(SettingError) as caught:
        parse_profile(GOOD.replace(old, new), "board", "my/board.toml")
    text = str(caught.value)
    assert text.startswith("profile my/board.toml: ")
    assert message in text
    assert "\n" not in text


def test_bandwidth_may_be_left_out():
    profile = parse_profile(GOOD.replace("bandwidth = 17.1", ""), "board", "board.toml")
    assert profile.bandwidth is None
    assert profile.bandwidth_at(1e9) is None


def test_what_the_cache_keeps_makes_small_models_faster():
    assert parse_profile(GOOD, "board", "board.toml").bandwidth_at(100e6) == pytest.approx(17.1e9)
    profile = parse_profile(GOOD + 'cached_bytes = "25MB"\n', "board", "board.toml")
    assert profile.bandwidth_at(100e6) == pytest.approx(17.1e9 / 0.75)
    assert profile.bandwidth_at(1e12) == pytest.approx(17.1e9, rel=1e-4)


def test_a_target_for_the_time_between_tokens_may_be_given():
    assert parse_profile(GOOD, "board", "board.toml").target_token_ms is None
    assert parse_profile(GOOD + "target_token_ms = 80\n", "board", "board.toml").target_token_ms == 80.0
    with pytest.raises(SettingError, match="target_token_ms is 0; expected milliseconds above 0"):
        parse_profile(GOOD + "target_token_ms = 0\n", "board", "board.toml")


@given(
    st.dictionaries(
        st.sampled_from(["threads", "context", "memory_bytes", "providers", "page_size"]),
        st.integers() | st.text(max_size=5) | st.booleans() | st.lists(st.integers(), max_size=2),
    )
)
def test_no_value_gets_past_but_a_good_one(changes):
    lines = [line for line in GOOD.splitlines() if line.split(" ")[0] not in changes]
    text = "\n".join(lines + [f"{key} = {json.dumps(value)}" for key, value in changes.items()])
    with suppress(SettingError):
        profile = parse_profile(text, "board", "board.toml")
        assert profile.threads >= 1
        assert profile.context >= 1
        assert profile.memory_budget is not None
        assert profile.memory_budget >= 2**20


def test_the_profiles_that_come_with_nybble():
    profiles = {p.name: p for p in list_profiles()}
    assert set(profiles) == {
        "arm-phone-6gb",
        "gpu-8gb",
        "h200",
        "jetson-agx-orin",
        "jetson-orin-nano",
        "laptop-cpu",
        "mini-pc-n100",
        "raspberry-pi-5",
        "raspberry-pi-5-4gb",
        "raspberry-pi-zero-2w",
    }
    for profile in profiles.values():
        assert profile == load_profile(profile.name)
        on_gpu = profile.providers[0].name == "CUDAExecutionProvider"
        assert profile.page_size == (256 if on_gpu else 16)
        assert profile.kv_dtype in (("f16",) if on_gpu else ("f32", "int8"))
        assert profile.providers[-1].name == "CPUExecutionProvider"


def test_a_users_own_file(tmp_path):
    path = tmp_path / "board.toml"
    path.write_text(GOOD, encoding="utf-8")
    assert load_profile(str(path)) == parse_profile(GOOD, "board", "x")
    assert resolve_device(str(path)).name == "board"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b"# " + b"x" * 70000, "longer than"),
        (b"description = [[[[", "not TOML"),
        (b"a=" + b"[" * 5000, "not TOML"),
    ],
)
def test_a_file_that_is_no_profile(tmp_path, content, message):
    path = tmp_path / "board.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingError) as caught:
        load_profile(str(path))
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_folder_is_no_profile(tmp_path):
    with pytest.raises(SettingError, match="can't be read"):
        load_profile(f"{tmp_path}/")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        SettingError, match=r"'pi9' is unknown; expected one of auto, arm-phone-6gb, .*raspberry-pi-5"
    ):
        resolve_device("pi9")

"""Sampling settings: what is refused, and where unset ones come from."""

from typing import Any

import pytest

from nybble.errors import SettingError
from nybble.runtime.sampling_params import ResolvedSampling, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("logprobs", -1),
        ("stop", [""]),
        ("stop", [7]),
        ("stop_token_ids", ["2"]),
        ("stop_token_ids", "2"),
        ("stop_token_ids", [2, -1]),
        ("stop_token_ids", [True]),
    ],
)
def test_a_value_out_of_range_is_named_in_one_line(field: str, value: Any) -> None:
    with pytest.raises(SettingError, match=field) as caught:
        SamplingParams(**{field: value})
    assert "\n" not in str(caught.value)


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(SettingError, match="min_tokens is 5, more than max_tokens 4"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_one_stop_string_or_several() -> None:
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_unset_everything_is_greedy() -> None:
    assert SamplingParams().resolve({}) == ResolvedSampling()
    assert ResolvedSampling().temperature == 0


QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_the_models_own_settings_fill_what_is_unset() -> None:
    assert SamplingParams().resolve(QWEN3) == ResolvedSampling(0.6, 20, 0.95)
    assert SamplingParams(temperature=1.5, top_k=-1).resolve(QWEN3) == ResolvedSampling(1.5, 0, 0.95)
    assert SamplingParams(temperature=0).resolve(QWEN3).temperature == 0


@pytest.mark.parametrize("extra", [{"do_sample": False}, {}])
def test_without_do_sample_the_default_is_greedy(extra: dict[str, Any]) -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, **extra}
    assert SamplingParams().resolve(config) == ResolvedSampling(0, 0, 0.9, 0, 1.1)
    assert SamplingParams(temperature=1).resolve(config) == ResolvedSampling(1, 0, 0.9, 0, 1.1)


def test_do_sample_without_a_temperature_is_temperature_one() -> None:
    assert SamplingParams().resolve({"do_sample": True}).temperature == 1


def test_a_bad_value_in_the_models_file_names_the_file() -> None:
    with pytest.raises(SettingError, match=r"generation_config.json: top_p is 7"):
        SamplingParams().resolve({"do_sample": True, "top_p": 7})

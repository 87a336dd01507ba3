"""`nybble plan`: from a config alone, from an artifact, from a GGUF file."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nybble.cli.commands import cli
from nybble.devices import format_bytes
from nybble.errors import NybbleError, SettingError
from nybble.planning import open_planned, plan

DEVICE = "raspberry-pi-5"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)])


def as_json(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return dict(json.loads(result.stdout))


# SmolLM2-135M's.
CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder with a config.json and nothing else."""
    folder = tmp_path / "config only"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def test_a_mixture_of_experts_from_its_config_alone(tmp_path: Path) -> None:
    """Qwen3-30B-A3B's: 30.5 billion weights, of which a token reads a tenth."""
    settings = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    found = as_json(tmp_path, "--device", DEVICE, "--context", "4096", "--memory-budget", "64GB")
    assert 15.5e9 < found["plan"]["linears"] < 16.5e9
    assert found["plan"]["fits"]
    # A token reads 2.7 billion weights of linear layers and the head, 1.8 GB of the 17.1 that are read in a
    # second; all experts would be 16 GB.
    assert 3 < found["predicted"]["decode"] < 17.1 / 1.7
    # In less memory most experts are on the disk.
    small = (tmp_path, "--device", DEVICE, "--context", "4096", "--memory-budget", "8GB")
    less = as_json(*small)["plan"]
    assert less["total"] <= 8e9
    assert 2000 < less["residency"]["expert_slots"] < 3500
    assert less["residency"]["streamed_layers"] == []
    said = " ".join(run(*small).stdout.split())
    assert f"{less['residency']['expert_slots']} of 6144 experts in memory" in said


def test_a_config_alone_is_enough(config: Path) -> None:
    for path in (config, config / "config.json"):
        found = as_json(path, "--device", DEVICE)
        assert found["device"] == DEVICE
        assert found["recipe"]["bits"] == 4
        assert found["plan"]["fits"]
        assert found["plan"]["total"] > found["plan"]["kv"] > 0
        assert found["predicted"]["decode"] > 0


def test_an_artifact_is_planned_for_as_it_is_and_as_it_might_be(tiny_artifact: Path) -> None:
    own = as_json(tiny_artifact, "--device", DEVICE)
    config = as_json(tiny_artifact / "config.json", "--device", DEVICE)
    eight = as_json(tiny_artifact, "--device", DEVICE, "--bits", "8")
    assert eight["plan"]["linears"] > own["plan"]["linears"]
    assert own["plan"]["kv"] == config["plan"]["kv"]


def test_settings_reach_the_plan(config: Path) -> None:
    found = as_json(config, "--device", DEVICE, "--context", "64", "--sequences", "3", "--kv-dtype", "int8")
    assert (found["plan"]["context"], found["plan"]["sequences"]) == (64, 3)
    assert (found["plan"]["kv_dtype"], found["plan"]["num_pages"]) == ("int8", 12)
    assert as_json(config, "--device", DEVICE, "--group-size", "32")["recipe"]["group_size"] == 32


def test_a_budget_streams_what_it_does_not_hold(config: Path) -> None:
    settings = ("--device", DEVICE, "--context", "64", "--kv-dtype", "f32")
    resident = as_json(config, *settings)["plan"]["total"]
    found = as_json(config, *settings, "--memory-budget", str(resident - 1))
    assert found["plan"]["fits"]
    assert found["plan"]["total"] < resident
    assert found["plan"]["concessions"]


def test_what_does_not_fit_says_what_would_and_fails(config: Path) -> None:
    arguments = (config, "--device", DEVICE, "--kv-dtype", "f32")
    least = as_json(*arguments, "--memory-budget", "2MB")
    assert least["would_fit"] == []
    budget = str(least["plan"]["total"] - 1)
    found = as_json(*arguments, "--memory-budget", budget)
    assert not found["plan"]["fits"]
    assert all(way["total"] <= int(budget) for way in found["would_fit"])
    assert found["would_fit"]
    result = run(*arguments, "--memory-budget", budget)
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    assert found["would_fit"][0]["change"] in result.stdout


def test_the_table_has_the_numbers_and_the_bar_all_of_them(config: Path) -> None:
    result = run(config, "--device", DEVICE, "--sequences", "2")
    assert result.exit_code == 0
    total = as_json(config, "--device", DEVICE, "--sequences", "2")["plan"]["total"]
    parts = ("linear layers", "KV cache", "interpreter", "tokens/s", "the profile's peaks")
    for part in (*parts, format_bytes(total)):
        assert part in result.stdout
    bar = next(line for line in result.stdout.splitlines() if line.startswith("["))
    assert len(bar) == 62
    assert "░" in bar


def test_a_gguf_file_is_planned_for_with_its_own_bits() -> None:
    found = plan("smollm2", DEVICE)
    assert found.model.recipe is None
    assert found.speeds is not None
    assert found.plan.linears == sum(found.model.linear_bytes or ())
    assert open_planned("smollm2", bits=8).recipe is not None


def test_this_machine_is_measured(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = plan(config, memory_budget="130MB", context=16)
    assert found.rates is not None
    assert found.run.executor == "cpu"


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"bits": 5}, "bits is 5"), ({"kv_dtype": "f64"}, "kv_dtype"), ({"context": 0}, "context is 0")],
)
def test_settings_out_of_range(config: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        plan(config, DEVICE, **settings)


def test_what_is_no_model_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "nothing.json", "unknown"):
        with pytest.raises((NybbleError, OSError)) as caught:
            plan(path, DEVICE)
        assert "\n" not in str(caught.value)

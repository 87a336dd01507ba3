"""`nybble verify`."""

from pathlib import Path

import click

from .output import print_table
from .progress import progress

EPILOG = """\b
Example:
  nybble verify smollm2-int4
"""


@click.command("verify", epilog=EPILOG)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--threads", type=int, help="[default: from the device]")
def command(artifact: Path, threads: int | None) -> None:
    """Check ARTIFACT: every file's checksum, the integers of both halves, then their logits."""
    from ..verification import verify

    with progress() as report:
        result = verify(artifact, threads=threads, progress=report)
    rows = [("Files", f"{result.files} as the manifest says")]
    if result.tensors is None:
        rows.append(("Halves", "only one is there: nothing to compare"))
    else:
        rows.append(("Integers", f"{result.tensors} tensors equal in both halves"))
        rows.append(("Logits", f"mean KL {result.mean_kl:.1e}, same top token {result.top1_agreement:.1%}"))
    if result.genai_kl is not None:
        rows.append(("onnxruntime-genai's graph", f"mean KL {result.genai_kl:.1e}"))
    print_table(str(artifact), rows)

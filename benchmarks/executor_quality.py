"""What the CPU executor's int8 activations and its KV types cost, on a quantized model.

    nybble quantize smollm2 -o ARTIFACT --group-size 32
    python benchmarks/executor_quality.py ARTIFACT

The reference is transformers in float32 on the same dequantized weights, 8-bit embedding and head included.
Both see 8 windows of 512 tokens of the odd entries of `pydoc_data.topics`, which calibration never saw. KL is
the divergence of the next-token distributions, the mean over all 4,096 positions and the 99th percentile;
perplexity is that of each window's tokens after its first. Prints a table, and writes JSON.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nybble.export.artifact import Artifact, open_artifact
from nybble.quant.packing import QuantizedTensor
from nybble.runtime.batch import prompt_batch
from nybble.runtime.cpu_executor import PAGE_SIZE, CpuExecutor
from nybble.runtime.executor import KvDtype

RESULTS = Path(__file__).parent / "results" / "executor_quality.json"
WINDOWS, WINDOW_LENGTH = 8, 512
KV_DTYPES: tuple[KvDtype, ...] = ("f32", "f16", "int16", "int8")


def prose(artifact: Artifact) -> NDArray[np.int64]:
    """The windows' token ids, [windows, length]."""
    from nybble.quant.calibration import evaluation_text
    from nybble.quant.quality import evaluation_windows
    from nybble.runtime.tokenizer import Tokenizer

    ids = Tokenizer(artifact.tokenizer_files).encode(evaluation_text(), add_special_tokens=False)
    return evaluation_windows(np.asarray(ids), WINDOWS, WINDOW_LENGTH)


def reference_model(artifact: Artifact) -> Any:
    """transformers' model of the artifact's configuration, holding its dequantized weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    unwanted = ("model_type", "quantization_config", "torch_dtype", "dtype")
    settings = {key: value for key, value in artifact.config.items() if key not in unwanted}
    config = AutoConfig.for_model(artifact.config["model_type"], **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = artifact.weights(artifact.chosen("auto", preferred="gptq"))
    state = {}
    for name in artifact.spec.tensors():
        tensor = weights.tensor(name)
        values = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
        state[name] = torch.from_numpy(np.array(values, np.float32))
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        sys.exit(f"transformers' model lacks {missing} and has no place for {unexpected}")
    return model


def measure(artifact: Artifact, threads: int) -> dict[str, Any]:
    """Mean and 99th percentile of the KL divergence, perplexity and top-1 agreement by KV type."""
    import torch

    from nybble.quant.quality import kl_divergence, perplexity

    torch.set_num_threads(threads)
    windows, model = prose(artifact), reference_model(artifact)
    groups = len(artifact.spec.window_groups)
    executor = CpuExecutor(artifact.weights(artifact.chosen("auto", preferred="gptq")), threads=threads)
    divergences: dict[str, list[NDArray[np.float64]]] = {kind: [] for kind in KV_DTYPES}
    perplexities: dict[str, list[float]] = {kind: [] for kind in ("reference", *KV_DTYPES)}
    agree = dict.fromkeys(KV_DTYPES, 0)

    def window_perplexity(logits: NDArray[np.float32], ids: NDArray[np.int64]) -> float:
        return perplexity(lambda _: logits[None], ids[None])

    for ids in windows:
        with torch.no_grad():
            expected = model(torch.from_numpy(ids[None])).logits[0].numpy()
        perplexities["reference"].append(window_perplexity(expected, ids))
        for kind in KV_DTYPES:
            executor.allocate_kv(-(-len(ids) // PAGE_SIZE), kv_dtype=kind)
            found = executor.step(prompt_batch(ids.tolist(), groups, PAGE_SIZE))
            divergences[kind].append(kl_divergence(expected, found))
            perplexities[kind].append(window_perplexity(found, ids))
            agree[kind] += int((found.argmax(-1) == expected.argmax(-1)).sum())
    executor.close()
    # Windows are equally long: the geometric mean is the perplexity of all.
    total = {kind: float(np.exp(np.log(values).mean())) for kind, values in perplexities.items()}
    figures = {
        kind: {
            "mean_kl": float(np.mean(divergences[kind])),
            "p99_kl": float(np.percentile(divergences[kind], 99)),
            "perplexity": total[kind],
            "perplexity_change": total[kind] / total["reference"] - 1,
            "top1_agreement": agree[kind] / windows.size,
        }
        for kind in KV_DTYPES
    }
    return {"tokens": windows.size, "reference_perplexity": total["reference"], "kv_dtype": figures}


def show(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("KV type", "mean KL", "p99 KL", "perplexity", "change", "same top-1")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("transformers float32", "", "", f"{figures['reference_perplexity']:.3f}", "", "")
    for kind, row in figures["kv_dtype"].items():
        table.add_row(
            kind,
            f"{row['mean_kl']:.2e}",
            f"{row['p99_kl']:.2e}",
            f"{row['perplexity']:.3f}",
            f"{row['perplexity_change']:+.2%}",
            f"{row['top1_agreement']:.2%}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    artifact = open_artifact(arguments.artifact)
    figures = measure(artifact, arguments.threads)
    show(figures)
    command = ["python", "benchmarks/executor_quality.py", arguments.artifact.name, *sys.argv[2:]]
    report = {"command": shlex.join(command), "recipe": artifact.manifest.recipe.to_json(), **figures}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Runs in GPTQModel's own environment: loads artifacts with its torch kernel on the CPU, and compares each
with its reference, a Hugging Face folder of the dequantized weights in float32.

python gptqmodel_script.py CASES.json

CASES holds objects with `artifact`, `reference`, `tokens` (an .npy of int64 [windows, length]) and `loader`:
"gptqmodel", or "transformers" (whose GPTQ quantizer runs on GPTQModel). Prints a line of JSON for each.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# Compiling the dequantization of each layer takes minutes and gives the same numbers.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def load(artifact: str, loader: str) -> Any:
    if loader == "transformers":
        return AutoModelForCausalLM.from_pretrained(artifact, device_map="cpu", dtype=torch.float16).eval()
    from gptqmodel import BACKEND, GPTQModel

    loaded = GPTQModel.load(artifact, backend=BACKEND.GPTQ_TORCH, device="cpu", dtype=torch.float16)
    return loaded.model.eval()


@torch.inference_mode()
def compare(artifact: str, reference: str, tokens: str, loader: str) -> dict[str, Any]:
    model = load(artifact, loader)
    expected = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval()
    layers = dict(expected.named_modules())
    quantized, different = 0, []
    for name, module in model.named_modules():
        if not hasattr(module, "qweight"):
            continue
        quantized += 1
        # [in, out]: the layer multiplies from the right.
        weight = module.dequantize_weight().T
        if not torch.equal(weight, layers[name].weight.half()):
            different.append(name)
        bias = layers[name].bias
        if bias is not None and not torch.equal(module.bias, bias.half()):
            different.append(name + ".bias")
    divergence, agreement, count = 0.0, 0, 0
    for window in np.load(tokens):
        ids = torch.from_numpy(window)[None]
        ours = expected(ids).logits[0].log_softmax(-1)
        theirs = model(ids).logits[0].float().log_softmax(-1)
        divergence += float((ours.exp() * (ours - theirs)).sum(dtype=torch.float64))
        agreement += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count += ids.numel()
    return {
        "kernels": sorted({type(m).__name__ for m in model.modules() if hasattr(m, "qweight")}),
        "quantized_layers": quantized,
        "different_weights": different,
        "kl": divergence / count,
        "top1": agreement / count,
        "tokens": count,
    }


def main(cases_file: str) -> None:
    torch.set_num_threads(2)
    for case in json.loads(Path(cases_file).read_text(encoding="utf-8")):
        try:
            result = compare(**case)
        except Exception as error:  # the test reports it
            result = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

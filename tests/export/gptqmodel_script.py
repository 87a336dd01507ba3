"""Runs in GPTQModel's own environment: loads ARTIFACT with its torch backend on the CPU and compares it with
REFERENCE, a Hugging Face folder of the dequantized weights in float32. Prints one line of JSON.

python gptqmodel_script.py ARTIFACT REFERENCE TOKENS.npy LOADER

TOKENS is int64 [windows, length]. LOADER is "gptqmodel" or "transformers" (whose GPTQ quantizer runs on
GPTQModel).
"""

import json
import os
import sys
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

    return GPTQModel.load(
        artifact, backend=BACKEND.GPTQ_TORCH, device="cpu", dtype=torch.float16
    ).model.eval()


@torch.inference_mode()
def main(artifact: str, reference_folder: str, tokens_file: str, loader: str) -> dict[str, Any]:
    torch.set_num_threads(2)
    model = load(artifact, loader)
    reference = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32).eval()
    expected = dict(reference.named_modules())
    quantized, different = 0, []
    for name, module in model.named_modules():
        if not hasattr(module, "qweight"):
            continue
        quantized += 1
        # [in, out], which is the layer's own orientation.
        weight = type(module).dequantize_weight(module).T
        if not torch.equal(weight, expected[name].weight.half()):
            different.append(name)
        bias = expected[name].bias
        if bias is not None and not torch.equal(module.bias, bias.half()):
            different.append(name + ".bias")
    divergence, agreement, tokens = 0.0, 0, 0
    for window in np.load(tokens_file):
        ids = torch.from_numpy(window)[None]
        ours = reference(ids).logits[0].double().log_softmax(-1)
        theirs = model(ids).logits[0].double().log_softmax(-1)
        divergence += float((ours.exp() * (ours - theirs)).sum())
        agreement += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        tokens += ids.numel()
    return {
        "kernels": sorted({type(m).__name__ for m in model.modules() if hasattr(m, "qweight")}),
        "quantized_layers": quantized,
        "different_weights": different,
        "kl": divergence / tokens,
        "top1": agreement / tokens,
        "tokens": tokens,
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(*sys.argv[1:])))

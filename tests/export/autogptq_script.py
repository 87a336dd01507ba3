"""Runs in AutoGPTQ's own environment: loads artifacts with its torch kernel on the CPU, in float32, and
compares each with its reference, a Hugging Face folder of the dequantized weights.

python autogptq_script.py CASES.json

CASES holds objects with `artifact`, `reference` and `tokens` (an .npy of int64 [windows, length]). Prints a
line of JSON for each.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from auto_gptq import AutoGPTQForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def compare(artifact: str, reference: str, tokens: str) -> dict[str, Any]:
    loaded = AutoGPTQForCausalLM.from_quantized(
        artifact,
        device="cpu",
        model_basename="model",
        use_safetensors=True,
        torch_dtype=torch.float32,
        use_triton=False,
        use_marlin=False,
        disable_exllama=True,
        disable_exllamav2=True,
        inject_fused_attention=False,
        inject_fused_mlp=False,
    )
    model = loaded.model.eval()
    if model.config.tie_word_embeddings:
        # AutoGPTQ leaves an embedding that is the head too as it found it in memory.
        stored = load_file(Path(artifact) / "model.safetensors")["model.embed_tokens.weight"]
        model.model.embed_tokens.weight.copy_(stored)
    expected = AutoModelForCausalLM.from_pretrained(reference, torch_dtype=torch.float32).eval()
    windows = torch.from_numpy(np.load(tokens))
    ours, theirs = expected(windows).logits, model(windows).logits.float()
    one, other = ours.log_softmax(-1), theirs.log_softmax(-1)
    quantized = [module for module in model.modules() if hasattr(module, "qweight")]
    return {
        "kernels": sorted({type(module).__module__ for module in quantized}),
        "quantized_layers": len(quantized),
        "kl": float((one.exp() * (one - other)).sum(-1).mean()),
        "top1": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
    }


def main(cases_file: str) -> None:
    torch.set_num_threads(1)
    for case in json.loads(Path(cases_file).read_text(encoding="utf-8")):
        try:
            result = compare(**case)
        except Exception as error:  # the test reports it
            result = {"error": f"{type(error).__name__}: {error}"}
        print("\nRESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

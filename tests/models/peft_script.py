"""Runs in an environment with PEFT: makes adapters for a model, and saves the model with each merged.

python peft_script.py MODEL OUT CASES.json

CASES holds settings of `LoraConfig` by name. Writes OUT/NAME/adapter and OUT/NAME/merged.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def make(model: str, out: Path, settings: dict[str, Any]) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in sorted(adapted.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapted.save_pretrained(out / "adapter")
    fresh = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    PeftModel.from_pretrained(fresh, out / "adapter").merge_and_unload().save_pretrained(out / "merged")


if __name__ == "__main__":
    for case, settings in json.loads(Path(sys.argv[3]).read_text(encoding="utf-8")).items():
        make(sys.argv[1], Path(sys.argv[2], case), settings)

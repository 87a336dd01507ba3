"""transformers' modules of experts, which hold a layer's in two tensors: a checkpoint has three for each."""

import re
from typing import Any

NAMES = re.compile(
    r"(.*)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight"
)
PARTS = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": "down", "down_proj": "down"}


def with_fused_experts(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensors by the names, and in the shapes, of transformers' modules."""
    import torch

    result: dict[str, Any] = {}
    experts: dict[str, dict[tuple[int, str], Any]] = {}
    for name, tensor in state.items():
        if (match := NAMES.fullmatch(name)) is None:
            result[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
        else:
            experts.setdefault(match[1], {})[int(match[2]), PARTS[match[3]]] = tensor
    for layer, parts in experts.items():
        numbers = range(len(parts) // 3)
        gate_up = [torch.cat((parts[n, "gate"], parts[n, "up"])) for n in numbers]
        result[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        result[f"{layer}.mlp.experts.down_proj"] = torch.stack([parts[n, "down"] for n in numbers])
    return result

"""Quantized checkpoints as other tools write them, packed bit by bit from their documentation, with none of
Nybble's code."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Layer:
    """How a layer is stored."""

    bits: int = 4
    group_size: int = 32
    symmetric: bool = True
    desc_act: bool = False


@dataclass(frozen=True)
class Quantized:
    """A weight [out, in] as integers; `groups` [in] has each column's."""

    codes: NDArray[np.uint8]  # [out, in]
    zeros: NDArray[np.uint8]  # [out, groups]
    scales: NDArray[np.float16]  # [out, groups]
    groups: NDArray[np.int32]

    @property
    def weight(self) -> NDArray[np.float32]:
        codes, zeros = self.codes.astype(np.float32), self.zeros[:, self.groups].astype(np.float32)
        return (codes - zeros) * self.scales[:, self.groups].astype(np.float32)


def quantized(weight: NDArray[np.float32], layer: Layer, seed: int = 0) -> Quantized:
    """Round to nearest."""
    columns, top = weight.shape[1], (1 << layer.bits) - 1
    size = columns if layer.group_size == -1 else layer.group_size
    groups = (np.arange(columns) // size).astype(np.int32)
    if layer.desc_act:
        groups = groups[np.random.default_rng(seed).permutation(columns)]
    count = int(groups.max()) + 1
    low = np.minimum(0, np.stack([weight[:, groups == g].min(axis=1) for g in range(count)], axis=1))
    high = np.maximum(0, np.stack([weight[:, groups == g].max(axis=1) for g in range(count)], axis=1))
    if layer.symmetric:
        scales = (2 * np.maximum(-low, high) / top).astype(np.float16)
        zeros = np.full(scales.shape, 1 << (layer.bits - 1), np.uint8)
    else:
        scales = ((high - low) / top).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 1, top).astype(np.uint8)
    codes = np.rint(weight / scales.astype(np.float32)[:, groups]) + zeros[:, groups]
    return Quantized(np.clip(codes, 0, top).astype(np.uint8), zeros, scales, groups)


def bit_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """[n, m] codes packed along the second dimension, one bit after the other into int32 words."""
    rows, count = codes.shape
    words = np.zeros((rows, -(-count * bits // 32)), np.uint32)
    for column in range(count):
        for bit in range(bits):
            at = column * bits + bit
            value = (codes[:, column].astype(np.uint32) >> np.uint32(bit)) & np.uint32(1)
            words[:, at // 32] |= value << np.uint32(at % 32)
    return words.view(np.int32)


def gptq_tensors(stem: str, found: Quantized, bits: int, version: str) -> dict[str, NDArray[Any]]:
    zeros = found.zeros.T
    if version == "gptq":
        zeros = (zeros - 1) & np.uint8((1 << bits) - 1)
    return {
        f"{stem}.qweight": np.ascontiguousarray(bit_words(found.codes, bits).T),
        f"{stem}.qzeros": bit_words(np.ascontiguousarray(zeros), bits),
        f"{stem}.scales": np.ascontiguousarray(found.scales.T),
        f"{stem}.g_idx": found.groups,
    }


def awq_words(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """[n, out] codes packed along the outputs, eight a word."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for column in range(words.shape[1]):
        for place, output in enumerate(AWQ_ORDER):
            words[:, column] |= codes[:, column * 8 + output].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def awq_tensors(stem: str, found: Quantized) -> dict[str, NDArray[Any]]:
    return {
        f"{stem}.qweight": awq_words(np.ascontiguousarray(found.codes.T)),
        f"{stem}.qzeros": awq_words(np.ascontiguousarray(found.zeros.T)),
        f"{stem}.scales": np.ascontiguousarray(found.scales.T),
    }


def write_checkpoint(
    source: Path,
    out: Path,
    settings: Mapping[str, Any],
    layer_of: Callable[[str], Layer | None],
    shards: int = 1,
) -> dict[str, NDArray[np.float32]]:
    """A float folder as a quantized one with `quantization_config` `settings`; `layer_of` says how a linear
    layer (by its name without `.weight`) is stored, None for not quantized. Returns what every tensor stands
    for."""
    shutil.copytree(source, out)
    weights, stored, meant = load_file(out / "model.safetensors"), {}, {}
    for number, (name, weight) in enumerate(sorted(weights.items())):
        stem = name.removesuffix(".weight")
        inside = weight.ndim == 2 and "embed" not in name and (stem != "lm_head" or settings.get("lm_head"))
        layer = layer_of(stem) if inside else None
        if layer is None:
            stored[name] = weight.astype(np.float16)
            meant[name] = stored[name].astype(np.float32)
            continue
        found = quantized(weight.astype(np.float32), layer, seed=number)
        meant[name] = found.weight
        if settings["quant_method"] == "awq":
            stored |= awq_tensors(stem, found)
        else:
            version = settings.get("checkpoint_format", "gptq")
            stored |= gptq_tensors(stem, found, layer.bits, version)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": dict(settings)}))
    if shards == 1:
        save_file(stored, out / "model.safetensors")
        return meant
    (out / "model.safetensors").unlink()
    weight_map, names = {}, sorted(stored)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: stored[name] for name in names[shard::shards]}
        save_file(part, out / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return meant

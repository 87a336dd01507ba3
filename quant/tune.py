"""Distillation: scales and norms are tuned so that the whole model's predictions come close to the float
model's.

Layers are rounded one after another, each by its own squared error. What counts in the end is the
distribution of the next token, so at last everything that is not an integer is tuned together, by gradient
descent on KL(float model ‖ quantized model) over the calibration text: one factor for each group's scale, the
weights of the norms. Codes and zero points stay (the second phase of EfficientQAT,
https://arxiv.org/abs/2407.11062, with the float model as the teacher).

A step computes layer by layer, keeps each layer's input, and computes each layer once more on the way back:
in memory there is one layer's work at a time, and weights are integers until they are used.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..models.spec import ModelSpec
from ..records import dataclass
from .backward import backpropagate
from .forward import embed, head_logits, to_torch
from .packing import QuantizedTensor, quantize_head
from .packing_nf4 import AnyQuantized

if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, AnyQuantized | NDArray[np.float16]]


class CodedWeight:
    """A quantized weight as `codes − zeros`, int16 [out, groups, group size], and scales [out, groups] that
    are tuned by a factor."""

    def __init__(self, tensor: QuantizedTensor) -> None:
        import torch

        out, columns, groups = tensor.out_features, tensor.in_features, tensor.groups
        codes = np.zeros((out, groups * tensor.group_size), np.int16)
        codes[:, :columns] = tensor.codes
        grouped = codes.reshape(out, groups, -1)
        grouped -= tensor.zero_points[:, :, None].astype(np.int16)
        codes[:, columns:] = 0
        kind = torch.int8 if tensor.bits <= 4 else torch.int16
        self.tensor, self.columns = tensor, columns
        self.codes = torch.from_numpy(grouped).to(kind)
        self.scales = to_torch(tensor.scales)
        self.order = None
        if tensor.permutation is not None:
            self.order = torch.from_numpy(np.argsort(tensor.permutation))

    def weight(self, factor: "Tensor") -> "Tensor":
        """[out, in] float32, with scales times `factor` [out, groups]."""
        weight = self.codes * (self.scales * factor)[:, :, None]
        weight = weight.flatten(1)[:, : self.columns]
        return weight if self.order is None else weight[:, self.order]

    def tuned(self, factor: "Tensor") -> QuantizedTensor:
        """With scales rounded to float16."""
        return replace(self.tensor, scales=(self.scales * factor).numpy().astype(np.float16))


@dataclass(frozen=True)
class Teacher:
    """The float model's end: its last hidden states on the calibration text [samples, seq_len, hidden], the
    last norm's weight [hidden] and the head [vocab, hidden], all float32."""

    hidden: "Tensor"
    norm: "Tensor"
    head: "Tensor"


def tune(
    spec: ModelSpec,
    tensors: Tensors,
    token_ids: NDArray[np.int32],
    teacher: Teacher,
    *,
    epochs: int,
    learning_rate: float,
    seed: int,
    batch: int = 4,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Tensors:
    """The tensors that changed: linear layers with other scales, norms with other weights.

    `token_ids` [samples, seq_len] are read `epochs` times in an order that `seed` decides, `batch` windows a
    step. What is tuned are factors, all 1 at first, by Adam with a rate that falls along a cosine to 0.
    """
    import torch

    student = _Student(spec, tensors)
    steps: list[list[int]] = []
    for epoch in range(epochs):
        order = torch.randperm(len(token_ids), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        steps += [order[start : start + batch] for start in range(0, len(order), batch)]
    optimizer = torch.optim.Adam(list(student.factors.values()), lr=learning_rate, betas=(0.9, 0.95))
    for done, part in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * done / len(steps)))
        report(done, len(steps))
        student.accumulate(token_ids[part], teacher, teacher.hidden[part])
        optimizer.step()
        optimizer.zero_grad()
    report(len(steps), len(steps))
    return student.tuned()


class _Student:
    """The quantized model with a factor for each scale and each norm weight."""

    def __init__(self, spec: ModelSpec, tensors: Tensors) -> None:
        import torch

        self.spec = spec
        self.coded: dict[str, CodedWeight] = {}
        self.vectors: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}
        for name in [n for layer in range(spec.num_layers) for n in spec.layer_tensors(layer)]:
            tensor = tensors[name]
            if isinstance(tensor, QuantizedTensor):
                self.coded[name] = CodedWeight(tensor)
                self.factors[name] = torch.ones(tensor.scales.shape, requires_grad=True)
            else:
                self.vectors[name] = to_torch(tensor)
        self.vectors[spec.final_norm_name] = to_torch(_array(tensors[spec.final_norm_name]))
        for name, vector in self.vectors.items():
            if name.endswith("norm.weight"):
                self.factors[name] = torch.ones(vector.shape, requires_grad=True)
        self.embedding = to_torch(quantize_head(_array(tensors[spec.embedding_name])))
        tied = spec.tied_embeddings
        self.head = self.embedding if tied else to_torch(quantize_head(_array(tensors[spec.head_name])))

    def weight(self, name: str) -> "Tensor":
        if name in self.coded:
            return self.coded[name].weight(self.factors[name])
        vector = self.vectors[name]
        return vector * self.factors[name] if name in self.factors else vector

    def layer_weights(self, layer: int) -> "dict[str, Tensor]":
        return {name: self.weight(name) for name in self.spec.layer_tensors(layer)}

    def accumulate(self, token_ids: NDArray[np.int32], teacher: Teacher, hidden: "Tensor") -> float:
        """Adds the gradient of the mean KL divergence over windows of tokens [windows, seq_len] to the
        factors'; `hidden` are the teacher's last hidden states of these. Returns the divergence."""
        import torch

        spec = self.spec

        def loss(logits: "Tensor", window: int, start: int) -> "Tensor":
            with torch.no_grad():
                wanted = hidden[window, start : start + len(logits)]
                target = head_logits(spec, teacher.norm, teacher.head, wanted).log_softmax(-1)
            divergence = torch.nn.functional.kl_div(
                logits.log_softmax(-1), target, reduction="sum", log_target=True
            )
            return divergence / token_ids.size

        with torch.enable_grad():
            norm = self.weight(spec.final_norm_name)
        embedded = embed(spec, self.embedding, token_ids)
        return backpropagate(spec, embedded, self.layer_weights, norm, self.head, loss)

    def tuned(self) -> Tensors:
        import torch

        found: Tensors = {}
        with torch.no_grad():
            for name, factor in self.factors.items():
                if name in self.coded:
                    found[name] = self.coded[name].tuned(factor)
                else:
                    found[name] = (self.vectors[name] * factor).numpy().astype(np.float16)
        return found


def _array(tensor: AnyQuantized | NDArray[np.float16]) -> NDArray[np.float16]:
    assert isinstance(tensor, np.ndarray)
    return tensor

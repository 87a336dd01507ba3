"""`quantization_config`, as transformers, GPTQModel and vLLM read it, and as they write it."""

from dataclasses import dataclass
from typing import Any

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config_reader import shown
from ..quant.packing import CheckpointFormat
from ..quant.recipe import Recipe

# Loaders that refuse a group size which does not divide a layer's input size, by name and reason.
REFUSES_SHORT_GROUPS = ("vLLM", "SGLang")


@dataclass(frozen=True)
class GptqConfig:
    """The fields a reader needs; `group_size` is −1 for one group per row."""

    bits: int
    group_size: int
    desc_act: bool
    sym: bool
    checkpoint_format: CheckpointFormat

    @classmethod
    def from_recipe(cls, recipe: Recipe, checkpoint_format: CheckpointFormat = "gptq") -> "GptqConfig":
        return cls(recipe.bits, recipe.group_size, recipe.desc_act, recipe.symmetric, checkpoint_format)

    @classmethod
    def from_json(cls, data: object, where: str) -> "GptqConfig":
        """Checks a `quantization_config`; `where` names its file in messages. Raises `ModelFormatError` for a
        field that is missing or of the wrong type, `UnsupportedModelError` for what Nybble does not read."""
        if not isinstance(data, dict):
            raise ModelFormatError(f"{where}: quantization_config is {shown(data)}; expected an object")

        def field(name: str, kind: type, default: object = None) -> Any:
            value = data.get(name, default)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                found = shown(value) if name in data else "missing"
                raise ModelFormatError(f"{where}: {name} is {found}; expected a {kind.__name__}")
            return value

        def supported(name: str, value: object, *expected: object) -> None:
            if value not in expected:
                options = " or ".join(map(str, expected))
                raise UnsupportedModelError(f"{where}: {name} is {shown(value)}; supported is {options}")

        method = data.get("quant_method", data.get("method", "gptq"))
        supported("quant_method", method, "gptq")
        bits, group_size = field("bits", int), field("group_size", int)
        supported("bits", bits, 4, 8)
        if group_size != -1 and not 1 <= group_size < 1 << 31:
            raise ModelFormatError(
                f"{where}: group_size is {shown(group_size)}; expected -1 or a positive size"
            )
        key = "checkpoint_format" if "checkpoint_format" in data else "format"
        checkpoint_format = field(key, str, "gptq")
        supported(key, checkpoint_format, "gptq", "gptq_v2")
        supported("pack_dtype", data.get("pack_dtype", "int32"), "int32")
        supported("lm_head", field("lm_head", bool, False), False)
        if data.get("dynamic"):
            raise UnsupportedModelError(f"{where}: settings per layer (dynamic) are not supported")
        desc_act, sym = field("desc_act", bool, False), field("sym", bool, True)
        return cls(bits, group_size, desc_act, sym, checkpoint_format)

    def to_json(self, recipe: Recipe, version: str) -> dict[str, Any]:
        """What `config.json` (as `quantization_config`) and `quantize_config.json` hold."""
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "desc_act": self.desc_act,
            "sym": self.sym,
            "checkpoint_format": self.checkpoint_format,
            "pack_dtype": "int32",
            "lm_head": False,
            "damp_percent": recipe.damp,
            "static_groups": recipe.method == "gptq" and recipe.act_order == "static",
            "true_sequential": True,
            "meta": {"quantizer": [f"nybble:{version}"]},
        }

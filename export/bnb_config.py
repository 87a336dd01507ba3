"""bitsandbytes' `quantization_config`, as transformers reads and writes it."""

from typing import Any

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config_reader import shown
from ..quant.recipe import Recipe
from ..records import dataclass

QUANT_METHOD = "bitsandbytes"


def is_bnb(settings: dict[str, Any]) -> bool:
    """Whether a `quantization_config` is bitsandbytes'; older ones do not say `quant_method`."""
    if "quant_method" in settings:
        return bool(settings["quant_method"] == QUANT_METHOD)
    return any(settings.get(key) is True for key in ("load_in_4bit", "load_in_8bit"))


@dataclass(frozen=True)
class BnbConfig:
    """The fields a reader needs: 4 bits, which are NF4, or 8. What is stored says which layers are
    quantized."""

    bits: int

    @classmethod
    def from_json(cls, data: dict[str, Any], where: str) -> "BnbConfig":
        """Raises `ModelFormatError` for a field of the wrong type, `UnsupportedModelError` for what Nybble
        does not read."""
        found = []
        for bits in (4, 8):
            value = data.get(f"load_in_{bits}bit", False)
            if not isinstance(value, bool):
                raise ModelFormatError(
                    f"{where}: load_in_{bits}bit is {shown(value)}; expected true or false"
                )
            found += [bits] * value
        if len(found) != 1:
            raise ModelFormatError(
                f"{where}: {'both' if found else 'neither'} of load_in_4bit and load_in_8bit; expected one"
            )
        if found == [4]:
            # What the tensors are called tells the type where the config does not.
            for name, expected in (("bnb_4bit_quant_type", "nf4"), ("bnb_4bit_quant_storage", "uint8")):
                value = data.get(name, expected)
                if value != expected:
                    raise UnsupportedModelError(f"{where}: {name} is {shown(value)}; supported is {expected}")
        return cls(found[0])

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "BnbConfig":
        return cls(recipe.bits)

    def to_json(self) -> dict[str, Any]:
        """What `config.json` holds as `quantization_config`. The head stays as it is, like the embedding."""
        four = self.bits == 4
        return {
            "quant_method": QUANT_METHOD,
            "load_in_4bit": four,
            "load_in_8bit": not four,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "float16",
            "bnb_4bit_use_double_quant": False,
            "llm_int8_threshold": 6.0,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_skip_modules": ["lm_head"],
        }

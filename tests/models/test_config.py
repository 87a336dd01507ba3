"""What a config means, against transformers' own classes."""

from typing import Any

import numpy as np
import pytest
from experts import with_fused_experts

from nybble.errors import ModelFormatError, UnsupportedModelError
from nybble.models import ModelSpec, spec_from_config, supported_model_types
from nybble.models.decoder import ACTIVATIONS

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "granite",
    "smollm3",
    "olmo2",
    "gemma2",
    "gemma3_text",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)


def config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **changes}


def spec(model_type: str = "llama", **changes: Any) -> ModelSpec:
    return spec_from_config(config(model_type, **changes), "config.json")


def transformers_model(settings: dict[str, Any]) -> Any:
    """transformers' model of a config.json, built without memory for its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    rest = {key: value for key, value in settings.items() if key != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(settings["model_type"], **rest))


CASES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 32, "rms_norm_eps": 1e-5, "hidden_act": "gelu"}),
    ("llama", {"num_key_value_heads": None}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "head_dim": 4}),
    ("mistral", {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    ("granite", {"attention_multiplier": 0.1, "mlp_bias": True}),
    ("smollm3", {"pad_token_id": 0, "mlp_bias": True}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": None}),
    ("gemma2", {"query_pre_attn_scalar": 144}),
    ("gemma2", {"final_logit_softcapping": None, "attention_bias": True, "head_dim": 16}),
    ("gemma3_text", {"final_logit_softcapping": 3.0}),
    ("phi3", {"pad_token_id": 0}),
    ("phi3", {"pad_token_id": 0, "tie_word_embeddings": True, "num_key_value_heads": None}),
    ("mixtral", {"num_local_experts": 3}),
    ("mixtral", {"num_experts": 2, "num_experts_per_tok": 1, "head_dim": 4, "tie_word_embeddings": True}),
    ("qwen2_moe", {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 40}),
    ("qwen2_moe", {"num_experts": 5, "decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen2_moe", {"num_experts": 0}),
    ("qwen3_moe", {"num_experts": 9, "mlp_only_layers": [0, 2], "attention_bias": True, "head_dim": 16}),
    ("qwen3_moe", {"num_local_experts": 9, "mlp_only_layers": [0, 1, 2, 3]}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_names_and_shapes_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    import torch

    model = transformers_model(config(family, **changes))
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    ours = spec(family, **changes)
    if ours.tied_embeddings:
        expected.pop("lm_head.weight")
    shapes = ours.stored_tensors()
    fused = with_fused_experts({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    assert {name: tuple(tensor.shape) for name, tensor in fused.items()} == expected
    held = dict.fromkeys(shapes, 0)
    for name, rows in ours.stored_rows().items():
        assert rows.begin == held[rows.name]
        assert rows.end - rows.begin == ours.tensors()[name][0]
        held[rows.name] = rows.end
    assert held == {name: shape[0] for name, shape in shapes.items()}


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_values_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    model = transformers_model(config(family, **changes))
    ours, theirs = spec(family, **changes), model.config
    assert ours.model_type == family
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    attention = model.model.layers[0].self_attn
    assert ours.head_dim == attention.head_dim
    assert ours.softmax_scale == attention.scaling
    ropes = theirs.rope_parameters
    assert ours.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    assert ours.qk_norm == hasattr(attention, "q_norm")
    assert ours.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert len(ours.sliding_windows) == 4


@pytest.mark.parametrize(
    ("family", "changes"), [case for case in CASES if case[0] in ("mixtral", "qwen2_moe", "qwen3_moe")]
)
def test_a_mixture_is_that_of_transformers(family: str, changes: dict[str, Any]) -> None:
    ours, model = spec(family, **changes), transformers_model(config(family, **changes))
    sparse = [layer for layer, module in enumerate(model.model.layers) if hasattr(module.mlp, "experts")]
    assert [layer for layer in range(4) if ours.mixture_of(layer) is not None] == sparse
    assert ours.mlp_size == (0 if len(sparse) == 4 else ours.intermediate_size)
    for layer in sparse:
        mixture, module = ours.mixture_of(layer), model.model.layers[layer].mlp
        assert mixture is not None
        assert mixture.num_experts == module.experts.num_experts
        assert mixture.experts_per_token == module.gate.top_k
        assert mixture.normalized == getattr(module.gate, "norm_topk_prob", True)
        assert (mixture.shared_intermediate_size > 0) == hasattr(module, "shared_expert")


BAD_MIXTURES = [
    ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0, expected an integer in 1..1024"),
    ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 3}, "at most num_local_experts, 2"),
    ("qwen3_moe", {"num_experts": -1}, "num_experts is -1"),
    ("qwen3_moe", {"num_experts": 1024, "num_hidden_layers": 65}, "at most 65536 experts"),
    ("qwen3_moe", {"mlp_only_layers": [1, "2"]}, "mlp_only_layers is"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is"),
    ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
    ("qwen2_moe", {"moe_intermediate_size": 2**40}, "moe_intermediate_size"),
]


@pytest.mark.parametrize(("family", "changes", "expected"), BAD_MIXTURES)
def test_a_bad_mixture_is_named(family: str, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        spec(family, **changes)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "name", ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu"]
)
def test_an_activation_is_the_function_of_that_name(name: str) -> None:
    import torch
    from transformers.activations import ACT2FN

    functional = torch.nn.functional
    functions = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
    }
    x = torch.linspace(-6, 6, 1001)
    ours = functions[spec(hidden_act=name).activation](x)
    torch.testing.assert_close(ours, ACT2FN[name](x), rtol=1e-5, atol=1e-6)


WINDOWS = [
    ("llama", {"sliding_window": 3}),
    ("mistral", {"sliding_window": 3}),
    ("mistral", {"sliding_window": 1}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"sliding_window": 3}),
    ("qwen2", {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 2}),
    ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}),
    ("qwen3", {"sliding_window": 2, "use_sliding_window": True, "max_window_layers": 0}),
    (
        "qwen3",
        {
            "sliding_window": 4,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    ("smollm3", {"sliding_window": 3, "use_sliding_window": True, "no_rope_layers": [0, 1, 1, 0]}),
    ("smollm3", {"sliding_window": 3, "use_sliding_window": True, "no_rope_layer_interval": 2}),
    ("gemma2", {"sliding_window": 3}),
    ("gemma3_text", {"sliding_window": 3}),
    ("gemma3_text", {"sliding_window": 3, "sliding_window_pattern": 2}),
    ("phi3", {"sliding_window": 3}),
    ("phi3", {}),
    ("mixtral", {"sliding_window": 3}),
    ("mixtral", {}),
    ("qwen2_moe", {"sliding_window": 3, "use_sliding_window": True}),
    ("qwen2_moe", {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 2}),
    ("qwen2_moe", {"sliding_window": 3}),
    ("qwen3_moe", {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 2}),
]


@pytest.mark.parametrize(("family", "changes"), WINDOWS)
def test_windows_mask_what_transformers_masks(family: str, changes: dict[str, Any]) -> None:
    """Which earlier tokens a query attends to, read off transformers' attention weights layer by layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**SIZES, "pad_token_id": 0, **changes}
    theirs = AutoConfig.for_model(family, **settings, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(theirs).eval()
    length = 8
    with torch.no_grad():
        weights = model(torch.arange(length)[None], output_attentions=True).attentions
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    for layer, window in enumerate(spec(family, **changes).sliding_windows):
        expected = (key <= query) & (key > query - (window or length))
        assert np.array_equal((weights[layer] > 0).all(dim=(0, 1)).numpy(), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_the_config_class(family: str) -> None:
    """A config that has only what has no sensible default."""
    from transformers import AutoConfig

    sizes = {**SIZES, "num_attention_heads": 32, "hidden_size": 128}
    del sizes["num_key_value_heads"]
    theirs = AutoConfig.for_model(family, **sizes)
    ours = spec_from_config({"model_type": family, **sizes}, "config.json")
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    activation = theirs.hidden_activation if family.startswith("gemma") else theirs.hidden_act
    assert ours.activation == ACTIVATIONS[activation]
    ropes = theirs.rope_parameters
    assert ours.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 4)
    always = "sliding_attention" if family in ("mistral", "phi3") else None
    kinds = getattr(theirs, "layer_types", [always] * 4)
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert list(ours.sliding_windows) == windows


@pytest.mark.parametrize("changes", [{}, {"no_rope_layer_interval": 3}, {"no_rope_layers": [0, 1, 1, 0, 1]}])
def test_the_layers_without_rope_are_those_of_transformers(changes: dict[str, Any]) -> None:
    model = transformers_model(config("smollm3", pad_token_id=0, **changes))
    rotated = [layer.self_attn.use_rope for layer in model.model.layers]
    ours = spec("smollm3", **changes)
    assert [ours.rope_index(layer) is not None for layer in range(4)] == [bool(x) for x in rotated]


@pytest.mark.parametrize("layers", [[1, 0, 1], "1010", [1, 2, 1, 1], [1, None, 1, 1]])
def test_no_rope_layers_says_yes_or_no_for_every_layer(layers: object) -> None:
    with pytest.raises(ModelFormatError, match=r"no_rope_layers is .* expected a list of 0 and 1, one for"):
        spec("smollm3", no_rope_layers=layers)


def test_another_model_type_is_named_with_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mamba2'.*llama, mistral, qwen2, qwen3"):
        spec("mamba2")
    assert supported_model_types() == FAMILIES


BAD_VALUES = [
    ("model_type", 3, "a string"),
    ("hidden_size", None, "integer"),
    ("hidden_size", 0, "integer"),
    ("hidden_size", -64, "integer"),
    ("hidden_size", 64.0, "integer"),
    ("hidden_size", "64", "integer"),
    ("hidden_size", True, "integer"),
    ("hidden_size", 10**30, "integer"),
    ("hidden_size", 63, "multiple of num_attention_heads, 8"),
    ("vocab_size", 2**40, "integer"),
    ("intermediate_size", 2**40, "integer"),
    ("num_hidden_layers", 10**9, "integer"),
    ("num_attention_heads", 0, "integer"),
    ("num_key_value_heads", 3, "divisor of num_attention_heads, 8"),
    ("num_key_value_heads", 16, "divisor"),
    ("head_dim", 0, "integer"),
    ("head_dim", 2**31, "integer"),
    ("max_position_embeddings", 2**31, "integer"),
    ("rms_norm_eps", "1e-5", "number"),
    ("rms_norm_eps", 0, "number"),
    ("rms_norm_eps", float("nan"), "number"),
    ("rms_norm_eps", 10**400, "number"),
    ("tie_word_embeddings", "yes", "true or false"),
    ("attention_bias", 1, "true or false"),
    ("mlp_bias", None, "true or false"),
    ("hidden_act", ["silu"], "a string"),
    ("rope_theta", 0, "number"),
    ("rope_theta", float("inf"), "number"),
    ("rope_parameters", [1], "an object"),
    ("partial_rotary_factor", 1.5, "number"),
]


@pytest.mark.parametrize(("key", "value", "expected"), BAD_VALUES)
def test_a_bad_value_is_one_line_with_file_and_key(key: str, value: object, expected: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        spec_from_config(config() | {key: value}, "some/config.json")
    message = str(caught.value)
    assert message.startswith(f"some/config.json: {key} is ")
    assert expected in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("key", ["model_type", *SIZES])
def test_a_missing_size_is_named(key: str) -> None:
    settings = config()
    del settings[key]
    if key == "num_key_value_heads":
        assert spec_from_config(settings, "config.json").num_kv_heads == 8
        return
    with pytest.raises(ModelFormatError, match=f"config.json: {key} is missing"):
        spec_from_config(settings, "config.json")


UNSUPPORTED = [
    ("llama", {"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ("llama", {"num_local_experts": 8}, "num_local_experts"),
    ("qwen2", {"is_causal": False}, "is_causal"),
    ("llama", {"layer_types": ["chunked_attention"] * 4}, "layer_types[0]"),
    (
        "mistral",
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 3},
        "layer_types mixes",
    ),
    ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type is 'dynamic'"),
    ("llama", {"rope_parameters": {"rope_type": "proportional"}}, "rope_type is 'proportional'"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type is 'linear'; supported: default"),
    ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters has 'rope_type'"),
    ("olmo2", {"no_rope_layers": [1, 0, 1, 0]}, "no_rope_layers"),
    ("llama", {"head_dim": 5}, "not an even number"),
    ("llama", {"partial_rotary_factor": 0.01}, "not an even number"),
]


@pytest.mark.parametrize(("family", "changes", "named"), UNSUPPORTED)
def test_what_would_be_computed_otherwise_is_refused(
    family: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec(family, **changes)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layer_types_must_agree_with_the_layers_and_the_window() -> None:
    with pytest.raises(ModelFormatError, match="layer_types is '3 entries', expected 4"):
        spec("qwen2", layer_types=["full_attention"] * 3)
    with pytest.raises(ModelFormatError, match=r"layer_types\[0\].*no sliding window is set"):
        spec("qwen2", layer_types=["sliding_attention"] * 4, sliding_window=4)


def test_keys_that_leave_the_maths_alone_are_accepted() -> None:
    changed = spec(pretraining_tp=2, attention_dropout=0.1, use_cache=False, logits_scaling=1.0, auto_map={})
    assert changed == spec()

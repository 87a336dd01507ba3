"""Models that plans are made for, known by their config alone."""

from dataclasses import replace

from nybble.devices import load_profile
from nybble.models.spec import MixtureSpec, ModelSpec, RopeSpec
from nybble.quant.recipe import Recipe

SMOLLM2 = ModelSpec(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=8192,
    norm_eps=1e-5,
    rope=RopeSpec(theta=100000.0, rotary_dim=64),
    tied_embeddings=True,
)
# After Qwen3-30B-A3B, with a shared expert.
MIXTURE = replace(
    SMOLLM2,
    model_type="qwen2_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    rope=RopeSpec(theta=1000000.0, rotary_dim=128),
    tied_embeddings=False,
    mixture=MixtureSpec(tuple(range(48)), 128, 8, 768, True, 1536),
)
LAPTOP = load_profile("laptop-cpu")
INT4 = Recipe(bits=4, group_size=64)

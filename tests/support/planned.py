"""Models that plans are made for, known by their config alone."""

from nybble.devices import load_profile
from nybble.models.spec import ModelSpec, RopeSpec
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
LAPTOP = load_profile("laptop-cpu")
INT4 = Recipe(bits=4, group_size=64)

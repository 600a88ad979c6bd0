"""Models by name. Torch-free."""

from difflib import get_close_matches

from nvfp4.errors import UserError
from nvfp4.models.configs import MambaConfig, ModelConfig

# NVIDIA Nemotron Nano 12B v2: 62 blocks, 28 Mamba-2, 28 MLP, 6 attention; 12,310,001,152
# parameters. Published shape; the initial standard deviation was not published, 0.02 is Megatron's
# default.
NEMOTRON_NANO_12B_V2 = ModelConfig(
    name="nemotron_nano_12b_v2",
    pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
    hidden_size=5120,
    ffn_hidden_size=20480,
    num_attention_heads=40,
    num_query_groups=8,
    kv_channels=128,
    mamba=MambaConfig(num_heads=128, head_dim=80, state_dim=128, num_groups=8),
    vocab_size=131072,
    seq_length=8192,
)

# Nemotron-H at 8B as the NVFP4 paper trained it: 52 blocks, 24 Mamba-2, 24 MLP, 4 attention, 4 KV
# heads (the released Nemotron-H 8B has 8); 8,084,075,520 parameters.
NEMOTRON_H_8B = ModelConfig(
    name="nemotron_h_8b",
    pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    hidden_size=4096,
    ffn_hidden_size=21504,
    num_attention_heads=32,
    num_query_groups=4,
    kv_channels=128,
    mamba=MambaConfig(num_heads=128, head_dim=64, state_dim=128, num_groups=8),
    vocab_size=131072,
    seq_length=8192,
)

# The NVFP4 paper's transformer: 20 layers, each of them two blocks here, attention then MLP;
# 1,291,929,600 parameters. The base of its RoPE was not published, 10,000 is Megatron's default.
TRANSFORMER_1P2B = ModelConfig(
    name="transformer_1p2b",
    pattern="*-" * 20,
    hidden_size=2048,
    ffn_hidden_size=6144,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=131072,
    seq_length=8192,
    position="rope",
)

# The Nemotron family at a size that one CPU core trains: widths are multiples of 64, in_proj has
# 2*256 + 2*2*32 + 16 = 656 = 41*16 rows, and the blocks keep the order of the large model.
TINY = ModelConfig(
    name="tiny",
    pattern="M-M*-M-M*-M-",
    hidden_size=128,
    ffn_hidden_size=512,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=32,
    mamba=MambaConfig(num_heads=16, head_dim=16, state_dim=32, num_groups=2),
    vocab_size=1024,
    seq_length=256,
)

MODELS = {cfg.name: cfg for cfg in (NEMOTRON_NANO_12B_V2, NEMOTRON_H_8B, TRANSFORMER_1P2B, TINY)}


def get_model(name: str) -> ModelConfig:
    """The registered shape; UserError with the known names and the closest one."""
    if name not in MODELS:
        close = get_close_matches(name, MODELS, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"model {name!r} is not known{hint} Known: {', '.join(sorted(MODELS))}")
    return MODELS[name]

"""Tiny models of every family: `make.py families [NAME...]`.

A golden families/NAME.safetensors holds what went in and the logits that came out of transformers; of its weights only names and shapes,
since they are made from their names, here and in tests/src/families.rs alike. Checkpoints are written as published ones are named, so that
transformers reads them as it would those.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tiny import LLAMA3, TINY, YARN
from transformers import AutoModelForCausalLM, DynamicCache

TOKENS = 96
# The first so many are prefilled at once, the others decoded one by one with the cache.
PREFILL = 64
# A batch of sequences of these lengths, cut out of the tokens one after the other.
RAGGED = [17, 1, 40, 6]


def family(architecture: str, model_type: str, **changes) -> dict:
    return {"architectures": [architecture], "model_type": model_type, "hidden_act": "silu", **TINY, **changes}


LLAMA = family("LlamaForCausalLM", "llama")
MIXTRAL = family("MixtralForCausalLM", "mixtral", num_local_experts=8, num_experts_per_tok=2, sliding_window=None, intermediate_size=48)

# Heads of another width than hidden / heads.
QWEN3 = family("Qwen3ForCausalLM", "qwen3", head_dim=24, attention_bias=False, use_sliding_window=False, tie_word_embeddings=True)
# All that the two Qwen families of experts have in common.
QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

# Attention over latents, experts after the first layer. Sizes of heads that no two share.
DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
}

CASES = {
    "mixtral": MIXTRAL,
    "mixtral_linear": {**MIXTRAL, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "qwen2_moe": family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        **QWEN_MOE,
        shared_expert_intermediate_size=72,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
    ),
    "mistral": family("MistralForCausalLM", "mistral", sliding_window=None, rope_theta=1000.0),
    "qwen3": QWEN3,
    "qwen3_yarn": {**QWEN3, "rope_scaling": YARN},
    # Experts in the fourth layer alone.
    "qwen3_moe": family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        **QWEN_MOE,
        num_hidden_layers=4,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        head_dim=24,
        attention_bias=False,
        use_sliding_window=False,
    ),
    # As V2-Lite: queries at once, experts one by one.
    "deepseek_v2_lite": family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        **{**DEEPSEEK, "q_lora_rank": None, "n_group": None, "topk_group": None},
        topk_method="greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        rope_scaling={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v2": family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        **DEEPSEEK,
        topk_method="group_limited_greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=4.0,
        rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    ),
    "deepseek_v3": family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **DEEPSEEK,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "llama3": {**LLAMA, "rope_scaling": LLAMA3},
    "llama_bias": {**LLAMA, "attention_bias": True, "tie_word_embeddings": True},
    "qwen2": family("Qwen2ForCausalLM", "qwen2", use_sliding_window=False),
}


def shapes(config: dict) -> dict[str, list[int]]:
    """Every tensor of the checkpoint, by its published name."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    tensors = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = [config["vocab_size"], hidden]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        parts = {"input_layernorm.weight": [hidden], "post_attention_layernorm.weight": [hidden]}
        parts |= {f"self_attn.{name}": shape for name, shape in attention(config).items()}
        parts |= moe(config) if is_sparse(config, layer) else mlp("mlp", hidden, config["intermediate_size"])
        tensors |= {at + name: shape for name, shape in parts.items()}
    return tensors


def latent_attention(config: dict) -> dict[str, list[int]]:
    hidden, heads, rank, rope = (config[key] for key in ["hidden_size", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"])
    nope, value, low = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
    tensors = {"q_proj.weight": [heads * (nope + rope), hidden]}
    if low is not None:
        tensors = {"q_a_proj.weight": [low, hidden], "q_a_layernorm.weight": [low], "q_b_proj.weight": [heads * (nope + rope), low]}
    tensors |= {"kv_a_proj_with_mqa.weight": [rank + rope, hidden], "kv_a_layernorm.weight": [rank]}
    return tensors | {"kv_b_proj.weight": [heads * (nope + value), rank], "o_proj.weight": [hidden, heads * value]}


def attention(config: dict) -> dict[str, list[int]]:
    if "kv_lora_rank" in config:
        return latent_attention(config)
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    has_bias = {"qwen2": "qkv", "qwen2_moe": "qkv"}.get(config["model_type"], "qkvo" if config.get("attention_bias") else "")
    tensors = {}
    for part, outputs in {"q": heads, "k": kv_heads, "v": kv_heads}.items():
        tensors[f"{part}_proj.weight"] = [outputs * head, hidden]
        if part in has_bias:
            tensors[f"{part}_proj.bias"] = [outputs * head]
    tensors["o_proj.weight"] = [hidden, heads * head]
    if "o" in has_bias:
        tensors["o_proj.bias"] = [hidden]
    if config["model_type"].startswith("qwen3"):
        tensors |= {"q_norm.weight": [head], "k_norm.weight": [head]}
    return tensors


def mlp(at: str, hidden: int, inner: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, list[int]]:
    gate, up, down = (f"{at}.{name}.weight" for name in names)
    return {gate: [inner, hidden], up: [inner, hidden], down: [hidden, inner]}


def is_sparse(config: dict, layer: int) -> bool:
    match config["model_type"]:
        case "mixtral":
            return True
        case "qwen2_moe" | "qwen3_moe":
            return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0
        case "deepseek_v2" | "deepseek_v3":
            return layer >= config["first_k_dense_replace"]
    return False


def moe(config: dict) -> dict[str, list[int]]:
    hidden = config["hidden_size"]
    if config["model_type"] == "mixtral":
        at, inner, experts, names = "block_sparse_moe", config["intermediate_size"], config["num_local_experts"], ("w1", "w3", "w2")
    else:
        at, inner, experts = "mlp", config["moe_intermediate_size"], config.get("num_experts") or config["n_routed_experts"]
        names = ("gate_proj", "up_proj", "down_proj")
    tensors = {f"{at}.gate.weight": [experts, hidden]}
    for expert in range(experts):
        tensors |= mlp(f"{at}.experts.{expert}", hidden, inner, names)
    if config["model_type"] == "qwen2_moe":
        tensors |= mlp(f"{at}.shared_expert", hidden, config["shared_expert_intermediate_size"])
        tensors[f"{at}.shared_expert_gate.weight"] = [1, hidden]
    if "n_shared_experts" in config:
        tensors |= mlp(f"{at}.shared_experts", hidden, config["n_shared_experts"] * inner)
    if config.get("topk_method") == "noaux_tc":
        tensors[f"{at}.gate.e_score_correction_bias"] = [experts]
    return tensors


# Around what a tensor's numbers lie, and how far to both sides, by a part of its name. The first that fits holds. Wide enough that attention
# is far from uniform and experts differ.
SPREADS = [("norm", 1.0, 0.35), ("bias", 0.0, 0.5), ("embed_tokens", 0.0, 1.7), ("fc.weight", 0.0, 0.15), ("", 0.0, 0.35)]


def values(name: str, shape: list[int]) -> torch.Tensor:
    """A tensor's numbers, made from its name: FNV-1a, then splitmix64, of which 24 bits count."""
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = (state ^ byte) * 0x100000001B3 % 2**64
    with np.errstate(over="ignore"):
        mixed = np.uint64(state) + np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    unit = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    center, width = next((center, width) for part, center, width in SPREADS if part in name)
    return torch.from_numpy((np.float32(center) + np.float32(width) * unit).reshape(shape))


def load(config: dict, tensors: dict[str, list[int]]) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        save_file({name: values(name, shape) for name, shape in tensors.items()}, Path(folder) / "model.safetensors", {"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    return model.eval()


@torch.no_grad()
def run(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """`[rows, vocab]` each: of all tokens at once; of those after the prefill, one by one; of the ragged batch, padded on the left."""
    logits = model(tokens[None]).logits[0]
    cache = DynamicCache(config=model.config)
    model(tokens[None, :PREFILL], past_key_values=cache, use_cache=True)
    decoded = [model(token.reshape(1, 1), past_key_values=cache, use_cache=True).logits[0, -1] for token in tokens[PREFILL:]]
    longest, start = max(RAGGED), 0
    ids, mask = torch.zeros(len(RAGGED), longest, dtype=torch.long), torch.zeros(len(RAGGED), longest, dtype=torch.long)
    for row, length in enumerate(RAGGED):
        ids[row, longest - length :], mask[row, longest - length :] = tokens[start : start + length], 1
        start += length
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = model(ids, attention_mask=mask, position_ids=positions).logits
    ragged = [batch[row, longest - length :] for row, length in enumerate(RAGGED)]
    return {"logits": logits, "decode": torch.stack(decoded), "ragged": torch.cat(ragged)}


def make(here: Path, versions: dict[str, str], names: list[str]) -> None:
    (here / "families").mkdir(exist_ok=True)
    for name in names or CASES:
        config = CASES[name]
        torch.manual_seed(29)
        tokens = torch.randint(0, config["vocab_size"], (TOKENS,))
        tensors = shapes(config)
        outputs = run(load(config, tensors), tokens)
        assert all(output.isfinite().all() and output.dtype == torch.float32 for output in outputs.values())
        metadata = {**versions, "config": json.dumps(config), "tensors": json.dumps(tensors), "ragged": json.dumps(RAGGED)}
        outputs = {key: output.contiguous() for key, output in outputs.items()}
        save_file({"tokens": tokens.to(torch.int32), **outputs}, here / "families" / f"{name}.safetensors", metadata)
        millions = sum(np.prod(shape) for shape in tensors.values()) / 1e6
        print(f"{name:18} {millions:.2f} M weights, logits of standard deviation {outputs['logits'].std():.2f}")

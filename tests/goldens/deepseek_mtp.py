"""DeepSeek's MTP module written out in float64: `make.py drafts` writes drafts/deepseek.safetensors with it.

A pair of token t[i + 1] and hidden state h[i] stands at position i + 1. Weights are made from their names, as those of families.py. Nothing of
transformers is used: latents are expanded, experts are tried one by one.
"""

import json
import math

import torch
from families import CASES, latent_attention, moe, values

CONFIG = CASES["deepseek_v3"]
LAYER = CONFIG["num_hidden_layers"]
AT = f"model.layers.{LAYER}."
PAIRS, STEPS = 39, 3


def shapes() -> dict[str, list[int]]:
    hidden = CONFIG["hidden_size"]
    tensors = {name: [hidden] for name in ["enorm.weight", "hnorm.weight", "shared_head.norm.weight"]}
    tensors |= {"eh_proj.weight": [hidden, 2 * hidden]}
    tensors |= {"input_layernorm.weight": [hidden], "post_attention_layernorm.weight": [hidden]}
    tensors |= {f"self_attn.{name}": shape for name, shape in latent_attention(CONFIG).items()} | moe(CONFIG)
    return {AT + name: shape for name, shape in tensors.items()}


class Module:
    def __init__(self) -> None:
        self.weights = {name.removeprefix(AT): values(name, shape).double() for name, shape in shapes().items()}
        self.embedding = values("model.embed_tokens.weight", [CONFIG["vocab_size"], CONFIG["hidden_size"]]).double()
        self.head = values("lm_head.weight", [CONFIG["vocab_size"], CONFIG["hidden_size"]]).double()
        self.keys, self.values = [], []

    def norm(self, name: str, x: torch.Tensor, eps: float = CONFIG["rms_norm_eps"]) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + eps) * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.weights[f"{name}.weight"] @ x

    def turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """YaRN over interleaved pairs; both its amplitudes are 1."""
        scaling, dim, theta = CONFIG["rope_scaling"], x.shape[-1], CONFIG["rope_theta"]
        original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        pair_with = lambda turns: dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low, high = max(math.floor(pair_with(32)), 0), min(math.ceil(pair_with(1)), dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float64)
        ramp = ((pairs - low) / (high - low)).clamp(0, 1)
        frequencies = theta ** (-2 * pairs / dim) * ((1 - ramp) + ramp / factor)
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous()) * torch.polar(torch.ones_like(pairs), position * frequencies)
        return torch.view_as_real(turned).flatten(-2)

    def attention(self, x: torch.Tensor, position: int) -> torch.Tensor:
        heads, nope, rope = (CONFIG[key] for key in ["num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"])
        rank, value = CONFIG["kv_lora_rank"], CONFIG["v_head_dim"]
        q = self.linear("self_attn.q_b_proj", self.norm("self_attn.q_a_layernorm", self.linear("self_attn.q_a_proj", x), 1e-6)).reshape(heads, -1)
        q = torch.cat([q[:, :nope], self.turn(q[:, nope:], position)], dim=-1)
        latent, key = self.linear("self_attn.kv_a_proj_with_mqa", x).split([rank, rope])
        made = self.linear("self_attn.kv_b_proj", self.norm("self_attn.kv_a_layernorm", latent, 1e-6)).reshape(heads, nope + value)
        self.keys.append(torch.cat([made[:, :nope], self.turn(key, position).expand(heads, -1)], dim=-1))
        self.values.append(made[:, nope:])
        mscale = 0.1 * CONFIG["rope_scaling"]["mscale_all_dim"] * math.log(CONFIG["rope_scaling"]["factor"]) + 1
        scores = torch.einsum("hd,phd->hp", q, torch.stack(self.keys)) * (nope + rope) ** -0.5 * mscale**2
        return self.linear("self_attn.o_proj", torch.einsum("hp,phd->hd", scores.softmax(-1), torch.stack(self.values)).flatten())

    def mlp(self, at: str, x: torch.Tensor) -> torch.Tensor:
        return self.linear(f"{at}.down_proj", torch.nn.functional.silu(self.linear(f"{at}.gate_proj", x)) * self.linear(f"{at}.up_proj", x))

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.linear("mlp.gate", x).sigmoid()
        choice = scores + self.weights["mlp.gate.e_score_correction_bias"]
        groups = choice.reshape(CONFIG["n_group"], -1)
        best = groups.topk(2).values.sum(-1).topk(CONFIG["topk_group"]).indices
        allowed = torch.full_like(groups, -math.inf).index_fill(0, best, 0.0).flatten()
        chosen = (choice + allowed).topk(CONFIG["num_experts_per_tok"]).indices.tolist()
        total = sum(scores[expert] for expert in chosen)
        out = self.mlp("mlp.shared_experts", x)
        for expert in chosen:
            out = out + scores[expert] / total * CONFIG["routed_scaling_factor"] * self.mlp(f"mlp.experts.{expert}", x)
        return out

    def step(self, token: int, hidden: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Its own hidden state, and logits. Keys and values stay."""
        x = self.linear("eh_proj", torch.cat([self.norm("enorm", self.embedding[token]), self.norm("hnorm", hidden)]))
        x = x + self.attention(self.norm("input_layernorm", x), position)
        x = x + self.experts(self.norm("post_attention_layernorm", x))
        out = self.norm("shared_head.norm", x)
        return out, self.head @ out


def golden() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What goes in and comes out, and the metadata."""
    torch.manual_seed(37)
    tokens = torch.randint(0, CONFIG["vocab_size"], (PAIRS + 1,))
    hidden = torch.randn(PAIRS + 1, CONFIG["hidden_size"])
    module = Module()
    pairs = zip(tokens[1:].tolist(), hidden[:-1].double())
    outs = [module.step(token, before, position) for position, (token, before) in enumerate(pairs, 1)]
    logits = torch.stack([logits for _, logits in outs])
    # Then on by itself, from its own likeliest token and its own hidden state.
    out, drafts, chain = outs[-1][0], [], []
    for depth in range(STEPS):
        drafts.append(int((chain or [logits[-1]])[-1].argmax()))
        out, chained = module.step(drafts[-1], out, PAIRS + 1 + depth)
        chain.append(chained)
    print(f"deepseek mtp logits {tuple(logits.shape)}, standard deviation {logits.std():.2f}, drafts {drafts}")
    tensors = {"tokens": tokens.to(torch.int32), "hidden": hidden, "drafts": torch.tensor(drafts, dtype=torch.int32)}
    tensors |= {"logits": logits.float(), "chain": torch.stack(chain).float()}
    return tensors, {"tensors": json.dumps(shapes())}

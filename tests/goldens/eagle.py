"""EAGLE heads written out in float64: `make.py drafts` writes drafts/eagle.safetensors, eagle_bias.safetensors and eagle3.safetensors with it.

The base is a tiny Llama of seven layers run by transformers, in float64; of the heads nothing is taken from anywhere. A pair of token t[i + 1]
and the base's hidden state at i stands at position i + 1. Weights are made from their names, as those of families.py; a head's from its names
with `draft.` before them, so that none are the base's.
"""

import json

import torch
from families import LLAMA, load, mlp, shapes, values
from torch.nn.functional import silu

BASE = {**LLAMA, "num_hidden_layers": 7}
HEAD = {**LLAMA, "num_hidden_layers": 1}
# The layers of the base whose inputs EAGLE-3 reads: 2, L / 2 and L - 3 of L.
TAPS = [2, 3, 4]
DRAFT_VOCAB = 40
PAIRS, STEPS = 39, 3


def attention(config: dict, inputs: int) -> dict[str, list[int]]:
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head = hidden // heads
    tensors = {f"{part}_proj.weight": [outputs * head, inputs] for part, outputs in {"q": heads, "k": kv_heads, "v": kv_heads}.items()}
    return tensors | {"o_proj.weight": [hidden, heads * head]}


def layer(at: str, config: dict, inputs: int) -> dict[str, list[int]]:
    tensors = {"post_attention_layernorm.weight": [config["hidden_size"]]}
    tensors |= {f"self_attn.{name}": shape for name, shape in attention(config, inputs).items()}
    tensors |= mlp("mlp", config["hidden_size"], config["intermediate_size"])
    return {f"{at}.{name}": shape for name, shape in tensors.items()}


class Head:
    """What the heads have in common: one layer, with its keys and values."""

    AT = "layers.0"

    def __init__(self, config: dict, tensors: dict[str, list[int]], base: torch.nn.Module) -> None:
        self.config, self.tensors = config, tensors
        self.weights = {name: values(f"draft.{name}", shape).double() for name, shape in tensors.items()}
        self.embedding = self.weights.get("embed_tokens.weight", base.model.embed_tokens.weight)
        self.head = self.weights.get("lm_head.weight", base.lm_head.weight)
        self.keys, self.values = [], []

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.weights[f"{name}.weight"] @ x + self.weights.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = position * self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second = x[:, :half], x[:, half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1)

    def layer(self, x: torch.Tensor, residual: torch.Tensor, position: int) -> torch.Tensor:
        """Attention over `x` and an MLP, added to `residual`."""
        queries, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        projected = lambda part, heads: self.linear(f"{self.AT}.self_attn.{part}_proj", x).reshape(heads, -1)
        q = self.turn(projected("q", queries), position)
        self.keys.append(self.turn(projected("k", groups), position))
        self.values.append(projected("v", groups))
        of_query = torch.arange(queries) // (queries // groups)
        keys, values = torch.stack(self.keys)[:, of_query], torch.stack(self.values)[:, of_query]
        scores = torch.einsum("hd,phd->hp", q, keys) / q.shape[-1] ** 0.5
        residual = residual + self.linear(f"{self.AT}.self_attn.o_proj", torch.einsum("hp,phd->hd", scores.softmax(-1), values).flatten())
        y = self.norm(f"{self.AT}.post_attention_layernorm", residual)
        gated = silu(self.linear(f"{self.AT}.mlp.gate_proj", y)) * self.linear(f"{self.AT}.mlp.up_proj", y)
        return residual + self.linear(f"{self.AT}.mlp.down_proj", gated)


class Eagle(Head):
    """EAGLE-1 and -2: no norm before the attention, none at the end."""

    def __init__(self, base: torch.nn.Module, has_bias: bool) -> None:
        hidden = HEAD["hidden_size"]
        tensors = {"fc.weight": [hidden, 2 * hidden]} | layer(self.AT, HEAD, hidden)
        # One brings an embedding of its own, the other takes the base's.
        tensors |= {"fc.bias": [hidden]} if has_bias else {"embed_tokens.weight": [HEAD["vocab_size"], hidden]}
        super().__init__(HEAD, tensors, base)

    def features(self, hidden_states: list[torch.Tensor]) -> torch.Tensor:
        return hidden_states[-1]

    def step(self, token: int, feature: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What takes the feature's place in the next step, and logits. Keys and values stay."""
        x = self.linear("fc", torch.cat([self.embedding[token], feature]))
        out = self.layer(x, x, position)
        return out, self.head @ out

    def token(self, logits: torch.Tensor) -> int:
        return int(logits.argmax())


class Eagle3(Head):
    """EAGLE-3: features of three layers, a norm for either half of the attention's input, a head for some tokens."""

    AT = "midlayer"

    def __init__(self, base: torch.nn.Module) -> None:
        config = {**HEAD, "intermediate_size": 80, "rope_theta": 500.0, "draft_vocab_size": DRAFT_VOCAB}
        hidden = config["hidden_size"]
        tensors = {"fc.weight": [hidden, len(TAPS) * hidden]} | layer(self.AT, config, 2 * hidden)
        tensors |= {f"{self.AT}.{name}.weight": [hidden] for name in ["input_layernorm", "hidden_norm"]}
        tensors |= {"norm.weight": [hidden], "lm_head.weight": [DRAFT_VOCAB, hidden]}
        super().__init__(config, tensors, base)
        # Some tokens of the base, in order.
        tokens = torch.randperm(config["vocab_size"])[:DRAFT_VOCAB].sort().values
        self.d2t = tokens - torch.arange(DRAFT_VOCAB)

    def features(self, hidden_states: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([hidden_states[layer] for layer in TAPS], dim=-1)

    def step(self, token: int, feature: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        if len(feature) != self.config["hidden_size"]:
            feature = self.linear("fc", feature)
        norm = lambda name, x: self.norm(f"{self.AT}.{name}", x)
        x = torch.cat([norm("input_layernorm", self.embedding[token]), norm("hidden_norm", feature)])
        out = self.layer(x, feature, position)
        return out, self.head @ self.norm("norm", out)

    def token(self, logits: torch.Tensor) -> int:
        return int(logits.argmax() + self.d2t[logits.argmax()])


@torch.no_grad()
def goldens() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """What goes in and comes out, and the metadata, by name."""
    torch.manual_seed(46)
    base_tensors = shapes(BASE)
    base = load(BASE, base_tensors).double()
    tokens = torch.randint(0, BASE["vocab_size"], (PAIRS + 1,))
    # The last is that after the last norm.
    hidden_states = [states[0] for states in base.model(tokens[None], output_hidden_states=True).hidden_states]
    files = {}
    for name, head in {"eagle": Eagle(base, False), "eagle_bias": Eagle(base, True), "eagle3": Eagle3(base)}.items():
        pairs = zip(tokens[1:].tolist(), head.features(hidden_states)[:-1])
        outs = [head.step(token, feature, position) for position, (token, feature) in enumerate(pairs, 1)]
        logits = torch.stack([logits for _, logits in outs])
        # Then on by itself, from its own likeliest token and its own output.
        out, drafts, chain = outs[-1][0], [], []
        for depth in range(STEPS):
            drafts.append(head.token((chain or [logits[-1]])[-1]))
            out, chained = head.step(drafts[-1], out, PAIRS + 1 + depth)
            chain.append(chained)
        drafts.append(head.token(chain[-1]))
        print(f"{name} logits {tuple(logits.shape)}, standard deviation {logits.std():.2f}, drafts {drafts}")
        tensors = {"tokens": tokens.to(torch.int32), "drafts": torch.tensor(drafts, dtype=torch.int32)}
        tensors |= {"logits": logits.float(), "chain": torch.stack(chain).float()}
        if isinstance(head, Eagle3):
            tensors["d2t"] = head.d2t
        about = {"base": BASE, "base_tensors": base_tensors, "config": head.config, "tensors": head.tensors}
        files[name] = tensors, {key: json.dumps(value) for key, value in about.items()}
    return files

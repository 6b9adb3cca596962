"""The draft: an MTP module as DeepSeek-V3 describes it, with one Llama layer, and neither embedding nor head of its own.

    x   = eh_proj([enorm(embed(t[i+1])) ; hnorm(h[i])])    h[i]: the base's final norm's output at token i, or the draft's own
    x   = x + attention(input_norm(x)); x = x + mlp(post_norm(x))      at position i + 1
    out = norm(x); logits of t[i+2] = out @ embedding^T
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from .base import rms_norm, rotary_table, rotate
from .config import DEVICE, DTYPE

# Names in the checkpoint, under `model.layers.N.` with N the base's number of layers.
NAMES = {
    "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "input_norm": "input_layernorm", "q": "self_attn.q_proj",
    "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "post_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "norm": "shared_head.norm",
}  # fmt: skip


def sizes(shape):
    hidden, kv, inner = shape.hidden, shape.kv_heads * shape.head_dim, shape.intermediate
    return {
        "enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "input_norm": (hidden,), "q": (hidden, hidden),
        "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden), "post_norm": (hidden,), "gate": (inner, hidden),
        "up": (inner, hidden), "down": (hidden, inner), "norm": (hidden,),
    }  # fmt: skip


class Draft:
    def __init__(self, shape):
        self.shape = shape
        self.weights = {
            name: nn.Parameter((torch.ones(size) if len(size) == 1 else torch.randn(size) * 0.02).to(DEVICE))
            for name, size in sizes(shape).items()
        }
        self._tables = {}

    def state(self):
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def restore(self, state):
        for name, weight in self.weights.items():
            weight.copy_(state[name])

    def _linear(self, x, name):
        return F.linear(x, self.weights[name].to(x.dtype))

    def _norm(self, x, name):
        return rms_norm(x, self.weights[name], self.shape.eps)

    def _table(self, length, step):
        """cos and sin of positions step..step + length, and for deeper steps the additive mask (length, step * length)."""
        if (length, step) not in self._tables:
            cos, sin = rotary_table(self.shape, length + step)
            causal = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
            own = torch.eye(length, dtype=torch.bool, device=DEVICE)
            seen = torch.cat([causal] + [own] * (step - 1), 1)
            mask = torch.zeros(length, step * length, device=DEVICE, dtype=DTYPE).masked_fill(~seen, float("-inf"))
            self._tables[length, step] = cos[step:], sin[step:], mask if step > 1 else None
        return self._tables[length, step]

    def forward(self, embedded, hidden, earlier, step):
        """Unrolled step `step` (from 1) of the chains that start at each i.

        embedded: embedding of t[i + step]; hidden: what came before it, the base's (step 1) or the draft's own; both (B, S, hidden).
        earlier: keys and values of the steps before. A chain sees the first step's keys up to its start (these come from the base's
        hidden states, as after a verification) and from there its own. -> output (B, S, hidden), earlier with this step's.
        """
        shape = self.shape
        batch, length, _ = embedded.shape
        cos, sin, mask = self._table(length, step)
        split = lambda x, heads: x.view(batch, length, heads, shape.head_dim).transpose(1, 2)
        x = self._linear(torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), -1), "eh_proj")
        y = self._norm(x, "input_norm")
        query = rotate(split(self._linear(y, "q"), shape.heads), cos, sin)
        key = rotate(split(self._linear(y, "k"), shape.kv_heads), cos, sin)
        earlier = earlier + [(key, split(self._linear(y, "v"), shape.kv_heads))]
        if step == 1:
            out = F.scaled_dot_product_attention(query, *earlier[0], is_causal=True, enable_gqa=True)
        else:
            group = shape.heads // shape.kv_heads
            keys, values = (torch.cat(part, 2).repeat_interleave(group, 1) for part in zip(*earlier))
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        x = x + self._linear(out.transpose(1, 2).reshape(batch, length, -1), "o")
        y = self._norm(x, "post_norm")
        x = x + self._linear(F.silu(self._linear(y, "gate")) * self._linear(y, "up"), "down")
        return self._norm(x, "norm"), earlier

    def unroll(self, embedding, hidden, ids, steps):
        """Yields step and output for steps 1..=steps over ids (B, L) and the base's hidden (B, L, hidden): (B, L - steps - 1, hidden)."""
        length = ids.shape[1] - steps - 1
        current, earlier = hidden[:, :length], []
        for step in range(1, steps + 1):
            current, earlier = self.forward(embedding[ids[:, step : step + length]], current, earlier, step)
            yield step, current

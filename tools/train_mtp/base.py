"""The base: a Llama-shaped model read from a GGUF file, or made up for the smoke test. It is only run, never trained."""

import torch
import torch.nn.functional as F

from .config import DEVICE, DTYPE, Shape
from .gguf import Reader
from .kernels import decode_attention


def rms_norm(x, weight, eps):
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def rotary_table(shape, num_positions):
    """cos and sin, each (positions, head_dim): the two halves of a head turn together."""
    inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, device=DEVICE).float() / shape.head_dim)
    angle = torch.arange(num_positions, device=DEVICE).float()[:, None] * inverse
    return angle.cos().repeat(1, 2).to(DTYPE), angle.sin().repeat(1, 2).to(DTYPE)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Layer:
    """Weights of one layer, as few matrices as can be: qkv is q, k, v on one another, gate_up is gate and up."""

    def __init__(self, input_norm, q, k, v, o, post_norm, gate, up, down):
        place = lambda x: x.to(DEVICE, DTYPE).contiguous()
        self.input_norm, self.post_norm = place(input_norm), place(post_norm)
        self.qkv, self.o = place(torch.cat((q, k, v))), place(o)
        self.gate_up, self.down = place(torch.cat((gate, up))), place(down)


class Base:
    def __init__(self, shape, tensor):
        """`tensor(name, heads)` gives a weight in fp32 by its name in GGUF; heads > 0 where rows are in rotary order."""
        self.shape = shape
        self.embedding = tensor("token_embd", 0).to(DEVICE, DTYPE).contiguous()
        self.norm = tensor("output_norm", 0).to(DEVICE, DTYPE)
        self.layers = []
        for i in range(shape.layers):
            get = lambda name, heads=0: tensor(f"blk.{i}.{name}", heads)
            self.layers.append(
                Layer(
                    get("attn_norm"), get("attn_q", shape.heads), get("attn_k", shape.kv_heads), get("attn_v"), get("attn_output"),
                    get("ffn_norm"), get("ffn_gate"), get("ffn_up"), get("ffn_down"),
                )
            )  # fmt: skip

    @staticmethod
    def from_gguf(path):
        reader = Reader(path)
        key = lambda name: reader.metadata["llama." + name]
        hidden, heads = key("embedding_length"), key("attention.head_count")
        shape = Shape(
            hidden=hidden,
            intermediate=key("feed_forward_length"),
            layers=key("block_count"),
            heads=heads,
            kv_heads=key("attention.head_count_kv"),
            head_dim=hidden // heads,
            vocab=reader.tensors["token_embd.weight"][0][0],
            context=key("context_length"),
            rope_theta=key("rope.freq_base"),
            # Written as fp32: 9.9999997e-06.
            eps=float(f"{key('attention.layer_norm_rms_epsilon'):.6g}"),
        )
        if "output.weight" in reader.tensors:
            raise SystemExit(f"{path} has a head of its own: the draft's head is the base's embedding, so they must be tied")

        def tensor(name, heads):
            x = torch.from_numpy(reader.tensor(name + ".weight"))
            # llama.cpp stores q and k with the two halves of a head interleaved.
            return x.view(heads, shape.head_dim // 2, 2, -1).transpose(1, 2).reshape(x.shape) if heads else x

        return Base(shape, tensor)

    @staticmethod
    def random(shape, seed=0):
        generator = torch.Generator().manual_seed(seed)
        kv = shape.kv_heads * shape.head_dim
        rows = {
            "token_embd": (shape.vocab, shape.hidden), "attn_q": (shape.hidden, shape.hidden), "attn_k": (kv, shape.hidden),
            "attn_v": (kv, shape.hidden), "attn_output": (shape.hidden, shape.hidden), "ffn_gate": (shape.intermediate, shape.hidden),
            "ffn_up": (shape.intermediate, shape.hidden), "ffn_down": (shape.hidden, shape.intermediate),
        }  # fmt: skip

        def tensor(name, _heads):
            size = rows.get(name.split(".")[-1])
            if size is None:
                return 1 + 0.1 * torch.randn(shape.hidden, generator=generator)
            # The head is the embedding: wide enough that the base is sure of some tokens.
            return torch.randn(size, generator=generator) * (0.4 if name == "token_embd" else size[1] ** -0.5)

        return Base(shape, tensor)

    def _mlp(self, x, layer):
        gate, up = (rms_norm(x, layer.post_norm, self.shape.eps) @ layer.gate_up.t()).chunk(2, -1)
        return torch.addmm(x, F.silu(gate) * up, layer.down.t())

    @torch.no_grad()
    def prefill(self, ids):
        """ids (B, S) -> the last layer's input and the final norm's output, each (B, S, hidden)."""
        shape = self.shape
        batch, length = ids.shape
        x = self.embedding[ids].view(-1, shape.hidden)
        cos, sin = rotary_table(shape, length)
        turned = shape.heads + shape.kv_heads
        for layer in self.layers:
            last = x
            qkv = rms_norm(x, layer.input_norm, shape.eps) @ layer.qkv.t()
            qkv = qkv.view(batch, length, turned + shape.kv_heads, shape.head_dim).transpose(1, 2)
            query = rotate(qkv[:, : shape.heads], cos, sin)
            key = rotate(qkv[:, shape.heads : turned], cos, sin)
            out = F.scaled_dot_product_attention(query, key, qkv[:, turned:], is_causal=True, enable_gqa=True)
            x = torch.addmm(x, out.transpose(1, 2).reshape(-1, shape.hidden), layer.o.t())
            x = self._mlp(x, layer)
        out = rms_norm(x, self.norm, shape.eps)
        return last.view(batch, length, -1), out.view(batch, length, -1)

    def decode(self, tokens, time, keys, values, cos, sin):
        """One token per row at slot `time` (1,), all on the device: the final norm's output (rows, hidden).

        keys, values: per layer a cache (rows, kv_heads, slots, head_dim), written at `time`; cos, sin: of all slots.
        """
        shape = self.shape
        rows = len(tokens)
        turned = shape.heads + shape.kv_heads
        x = self.embedding[tokens]
        cos, sin = cos[time], sin[time]
        for layer, key_cache, value_cache in zip(self.layers, keys, values):
            qkv = rms_norm(x, layer.input_norm, shape.eps) @ layer.qkv.t()
            qkv = qkv.view(rows, turned + shape.kv_heads, shape.head_dim)
            query_key = rotate(qkv[:, :turned], cos, sin)
            key_cache.index_copy_(2, time, query_key[:, shape.heads :].unsqueeze(2))
            value_cache.index_copy_(2, time, qkv[:, turned:].unsqueeze(2))
            out = decode_attention(query_key[:, : shape.heads].contiguous(), key_cache, value_cache, time)
            x = torch.addmm(x, out.view(rows, -1), layer.o.t())
            x = self._mlp(x, layer)
        return rms_norm(x, self.norm, shape.eps)

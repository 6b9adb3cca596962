"""The two kernels that PyTorch lacks, in Triton, with what stands for them on a CPU; and a product that accumulates into fp32."""

import os

import torch

from .config import CUDA

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Triton's interpreter runs the kernels on a CPU, slowly: the smoke test uses it where it is asked for.
USE_TRITON = triton is not None and (CUDA or os.environ.get("TRITON_INTERPRET") == "1")

if triton:

    @triton.jit
    def _attention(
        Q, K, V, OUT, TIME, num_slots, scale, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
    ):
        """One query per row against keys 0..=TIME of its cache; a program does the GROUP query heads of one KV head, padded to 16."""
        row = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1)
        num_keys = tl.load(TIME).to(tl.int32) + 1
        heads, dims, slots = tl.arange(0, 16), tl.arange(0, DIM), tl.arange(0, BLOCK)
        at_query = ((row * KV_HEADS + kv_head) * GROUP + heads[:, None]) * DIM + dims[None, :]
        query = tl.load(Q + at_query, mask=heads[:, None] < GROUP, other=0.0)
        cache = (row * KV_HEADS + kv_head) * num_slots * DIM
        largest = tl.full((16,), -1e30, tl.float32)
        total = tl.zeros((16,), tl.float32)
        mean = tl.zeros((16, DIM), tl.float32)
        for start in range(0, num_keys, BLOCK):
            at = (start + slots)[:, None] * DIM + dims[None, :]
            valid = (start + slots) < num_keys
            key = tl.load(K + cache + at, mask=valid[:, None], other=0.0)
            value = tl.load(V + cache + at, mask=valid[:, None], other=0.0)
            score = tl.where(valid[None, :], tl.dot(query, tl.trans(key)) * scale, -1e30)
            new_largest = tl.maximum(largest, tl.max(score, 1))
            shrink = tl.exp(largest - new_largest)
            weight = tl.exp(score - new_largest[:, None])
            total = total * shrink + tl.sum(weight, 1)
            mean = mean * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
            largest = new_largest
        tl.store(OUT + at_query, (mean / total[:, None]).to(OUT.dtype.element_ty), mask=heads[:, None] < GROUP)

    @triton.jit
    def _softmax(Z, LOG_SUM, N: tl.constexpr, BLOCK: tl.constexpr):
        """Each row of Z (rows, N) becomes its softmax; N is a multiple of BLOCK."""
        row = tl.program_id(0).to(tl.int64)
        offsets = tl.arange(0, BLOCK)
        largest = -1e30
        total = 0.0
        for start in range(0, N, BLOCK):
            z = tl.load(Z + row * N + start + offsets).to(tl.float32)
            new_largest = tl.maximum(largest, tl.max(z, 0))
            total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(z - new_largest), 0)
            largest = new_largest
        log_sum = largest + tl.log(total)
        tl.store(LOG_SUM + row, log_sum)
        for start in range(0, N, BLOCK):
            at = Z + row * N + start + offsets
            tl.store(at, tl.exp(tl.load(at).to(tl.float32) - log_sum).to(Z.dtype.element_ty))


def decode_attention(query, keys, values, time):
    """Attention of one new token per row.

    query (rows, heads, dim), keys and values (rows, kv_heads, slots, dim), time (1,): the new token's slot, its key already there.
    """
    rows, heads, dim = query.shape
    kv_heads, num_slots = keys.shape[1:3]
    group, scale = heads // kv_heads, dim**-0.5
    if USE_TRITON:
        out = torch.empty_like(query)
        _attention[(rows, kv_heads)](query, keys, values, out, time, num_slots, scale, group, kv_heads, dim, 64, num_warps=2)
        return out
    seen = slice(0, int(time) + 1)
    score = query.view(rows, kv_heads, group, dim) @ keys[:, :, seen].transpose(-1, -2) * scale
    return (score.float().softmax(-1).to(query.dtype) @ values[:, :, seen]).reshape(rows, heads, dim)


def softmax_in_place(logits):
    """logits (rows, n) become their softmax; returns the log of each row's sum of exponentials, fp32 (rows,)."""
    if USE_TRITON:
        rows, n = logits.shape
        log_sum = torch.empty(rows, device=logits.device)
        block = min(4096, n & -n)
        _softmax[(rows,)](logits, log_sum, n, block, num_warps=8)
        return log_sum
    log_sum = logits.float().logsumexp(-1)
    logits.sub_(log_sum[:, None]).exp_()
    return log_sum


def matmul_fp32(a, b):
    """a @ b with an fp32 result."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()

//! The shapes that attention and the KV cache share: heads, and sequences of different lengths in one batch.

use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

/// The heads of one layer on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    pub num_heads: usize,
    /// Divides `num_heads`; query head h reads KV head `h / (num_heads / num_kv_heads)`.
    pub num_kv_heads: usize,
    pub head_dim: usize,
}

impl Heads {
    /// Columns of a `qkv` tensor: all queries, then all keys, then all values.
    pub fn qkv_cols(self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }

    /// Query heads that read one KV head.
    pub fn group(self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    pub(crate) fn check(self, op: &'static str) -> Result<()> {
        if self.num_kv_heads == 0 || !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let of = self.num_kv_heads;
            return Err(KernelError::NotMultiple { op, what: "num_heads", size: self.num_heads, of });
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(8) {
            return Err(KernelError::NotMultiple { op, what: "head_dim", size: self.head_dim, of: 8 });
        }
        Ok(())
    }
}

/// Which tokens of a batch belong to which sequence, and where its keys and values lie.
#[derive(Clone, Copy, Debug)]
pub struct Ragged<'a> {
    /// `[seqs + 1]` i32: sequence s owns tokens `cu_tokens[s]..cu_tokens[s + 1]`, the last of its sequence. From 0 to the
    /// number of tokens; a sequence may have none.
    pub cu_tokens: &'a Tensor,
    /// `[seqs]` i32: tokens of the sequence whose keys and values are in the cache, this step's included.
    pub kv_lens: &'a Tensor,
    /// `[seqs, max_blocks]` i32: its blocks in order; what lies beyond `kv_lens` is not read.
    pub block_tables: &'a Tensor,
    /// At least the most tokens of one sequence in this step.
    pub max_tokens_per_seq: usize,
    /// At least the largest of `kv_lens`.
    pub max_kv_len: usize,
}

/// One sequence's part of a batch, on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seq<'a> {
    /// Its first token in the batch.
    pub first_token: usize,
    pub num_tokens: usize,
    pub kv_len: usize,
    /// Its blocks, at least as many as `kv_len` needs, all inside the cache.
    pub blocks: &'a [i32],
}

impl<'a> Ragged<'a> {
    /// Shapes and dtypes; whether the numbers in them make sense is for [`seqs`](Self::seqs).
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        let num_seqs = self.kv_lens.dims().first().copied().unwrap_or(0);
        self.kv_lens.expect_shape(op, "kv_lens", [num_seqs])?;
        self.cu_tokens.expect_shape(op, "cu_tokens", [num_seqs + 1])?;
        let (_, max_blocks) = self.block_tables.rows_cols();
        self.block_tables.expect_shape(op, "block_tables", [num_seqs, max_blocks])?;
        self.kv_lens.expect_dtype(op, "kv_lens", DType::I32)?;
        self.cu_tokens.expect_dtype(op, "cu_tokens", DType::I32)?;
        self.block_tables.expect_dtype(op, "block_tables", DType::I32)
    }

    pub(crate) fn num_seqs(&self) -> usize {
        self.kv_lens.dims()[0]
    }

    /// Sequence `s` of tensors on the host.
    pub(crate) fn seq(&self, s: usize, block_size: usize) -> Seq<'a> {
        let (cu_tokens, kv_lens) = (self.cu_tokens.as_slice::<i32>(), self.kv_lens.as_slice::<i32>());
        let (_, max_blocks) = self.block_tables.rows_cols();
        let first_token = cu_tokens[s] as usize;
        let kv_len = kv_lens[s] as usize;
        let blocks = &self.block_tables.as_slice::<i32>()[s * max_blocks..][..kv_len.div_ceil(block_size)];
        Seq { first_token, num_tokens: cu_tokens[s + 1] as usize - first_token, kv_len, blocks }
    }

    /// Checks the numbers on the host: tokens in order, lengths inside the block tables, blocks inside the cache.
    pub(crate) fn check_values(
        &self,
        op: &'static str,
        num_tokens: usize,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<()> {
        let value = |arg, got: i32, want| Err(KernelError::Value { op, arg, got: got.into(), want });
        let (cu_tokens, kv_lens) = (self.cu_tokens.as_slice::<i32>(), self.kv_lens.as_slice::<i32>());
        let (_, max_blocks) = self.block_tables.rows_cols();
        if cu_tokens[0] != 0 {
            return value("cu_tokens", cu_tokens[0], "0 at the start");
        }
        if let Some(pair) = cu_tokens.windows(2).find(|pair| pair[0] > pair[1]) {
            return value("cu_tokens", pair[1], "at least the one before");
        }
        let end = cu_tokens[cu_tokens.len() - 1];
        if end as usize != num_tokens {
            return value("cu_tokens", end, "the number of tokens at the end");
        }
        for (s, &kv_len) in kv_lens.iter().enumerate() {
            let of_step = cu_tokens[s + 1] - cu_tokens[s];
            if kv_len < of_step {
                return value("kv_lens", kv_len, "at least the tokens of this step");
            }
            if kv_len as usize > max_blocks * block_size || kv_len as usize > self.max_kv_len {
                return value("kv_lens", kv_len, "no more than the block table holds and max_kv_len says");
            }
            let blocks = self.seq(s, block_size).blocks;
            if of_step > 0
                && let Some(&block) = blocks.iter().find(|&&block| block < 0 || block as usize >= num_blocks)
            {
                return value("block_tables", block, "a block of the cache");
            }
        }
        Ok(())
    }
}

/// The shape of a layer's K or V, checked: `[blocks, num_kv_heads, block_size, head_dim]`. Blocks and tokens of one.
pub(crate) fn check_cache(op: &'static str, k: &Tensor, v: &Tensor, heads: Heads) -> Result<(usize, usize)> {
    let &[num_blocks, _, block_size, _] = k.dims() else {
        return Err(KernelError::Shape {
            op,
            arg: "k",
            got: k.shape(),
            want: [0, heads.num_kv_heads, 0, heads.head_dim].into(),
        });
    };
    let want = [num_blocks, heads.num_kv_heads, block_size, heads.head_dim];
    k.expect_shape(op, "k", want)?;
    v.expect_shape(op, "v", want)?;
    v.expect_dtype(op, "v", k.dtype())?;
    if !(block_size.is_power_of_two() && (16..=128).contains(&block_size)) {
        return Err(KernelError::Value { op, arg: "block size", got: block_size as i64, want: "16, 32, 64 or 128" });
    }
    Ok((num_blocks, block_size))
}

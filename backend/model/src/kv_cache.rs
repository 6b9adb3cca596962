//! The paged KV cache: what every layer keeps of tokens, in blocks that sequences own through block tables.
//!
//! Layers say what that is ([`KvLayer`]); the memory plan, blocks and copies follow from its size.
//! A drafter's layers are further layers of the same cache and the same blocks, so one block table serves both.

use drafthorse_kernels::ops::copy_rows::copy_rows;
use drafthorse_kernels::{DType, Device, Tensor};

use crate::error::{ModelError, Result};

/// What one layer keeps of one token, on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvLayer {
    /// K and V of some heads.
    Heads { num_kv_heads: usize, head_dim: usize },
    /// One latent that serves all heads, and on every rank.
    Latent { width: usize },
}

impl KvLayer {
    /// Numbers of one token.
    pub fn token_values(self) -> usize {
        match self {
            KvLayer::Heads { num_kv_heads, head_dim } => 2 * num_kv_heads * head_dim,
            KvLayer::Latent { width } => width,
        }
    }

    /// Bytes of one token.
    pub fn token_bytes(self, dtype: DType) -> usize {
        self.token_values() * dtype.bytes()
    }
}

/// The shape of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// The target's layers, then a drafter's.
    pub layers: Vec<KvLayer>,
    /// Width of the target's hidden state that is kept of each block's last token, for a drafter; 0: none is.
    pub last_hidden: usize,
    /// Tokens of one block.
    pub block_size: usize,
    pub dtype: DType,
}

impl KvLayout {
    /// Bytes of one block over all layers: what the memory plan divides by.
    pub fn block_bytes(&self) -> usize {
        let token_bytes: usize = self.layers.iter().map(|layer| layer.token_bytes(self.dtype)).sum();
        self.block_size * token_bytes + self.last_hidden * self.dtype.bytes()
    }
}

/// One layer's memory.
enum Layer {
    /// K and V, `[blocks, kv heads, block size, head dim]` each.
    Heads([Tensor; 2]),
    /// `[blocks, block size, width]`.
    Latent(Tensor),
}

impl Layer {
    #[cfg(test)]
    fn tensors(&self) -> &[Tensor] {
        match self {
            Layer::Heads(tensors) => tensors,
            Layer::Latent(tensor) => std::slice::from_ref(tensor),
        }
    }

    fn tensors_mut(&mut self) -> &mut [Tensor] {
        match self {
            Layer::Heads(tensors) => tensors,
            Layer::Latent(tensor) => std::slice::from_mut(tensor),
        }
    }
}

/// The memory of every layer.
pub struct KvCache {
    layout: KvLayout,
    num_blocks: usize,
    layers: Vec<Layer>,
    /// `[blocks, last_hidden]`.
    last_hidden: Tensor,
}

impl KvCache {
    /// # Errors
    /// If the device is out of memory.
    pub fn new(device: &Device, layout: KvLayout, num_blocks: usize) -> Result<Self> {
        let layer = |layer: &KvLayer| -> Result<Layer> {
            let (block_size, dtype) = (layout.block_size, layout.dtype);
            match *layer {
                KvLayer::Heads { num_kv_heads, head_dim } => {
                    let shape = [num_blocks, num_kv_heads, block_size, head_dim];
                    let zeros = |what| Tensor::zeros(device, what, shape, dtype);
                    Ok(Layer::Heads([zeros("K cache")?, zeros("V cache")?]))
                }
                KvLayer::Latent { width } => {
                    Ok(Layer::Latent(Tensor::zeros(device, "latent cache", [num_blocks, block_size, width], dtype)?))
                }
            }
        };
        let layers = layout.layers.iter().map(layer).collect::<Result<_>>()?;
        let last_hidden = Tensor::zeros(device, "hidden states", [num_blocks, layout.last_hidden], layout.dtype)?;
        Ok(KvCache { layers, layout, num_blocks, last_hidden })
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub fn size_bytes(&self) -> usize {
        self.num_blocks * self.layout.block_bytes()
    }

    /// The target's hidden states of each block's last token, `[blocks, hidden]`: a drafter's first entry in the next block comes
    /// from the last token of the one before.
    pub fn last_hidden(&mut self) -> &mut Tensor {
        &mut self.last_hidden
    }

    /// K and V of layer `index`.
    ///
    /// # Errors
    /// `OutOfRange` if there is no such layer, `KvKind` if it keeps something else: the layout was not the model's.
    pub fn heads(&mut self, index: usize) -> Result<&mut [Tensor; 2]> {
        match self.layer(index)? {
            Layer::Heads(tensors) => Ok(tensors),
            Layer::Latent(_) => Err(ModelError::KvKind { layer: index, got: "latents", want: "K and V" }),
        }
    }

    /// Latents of layer `index`.
    ///
    /// # Errors
    /// As [`heads`](Self::heads).
    pub fn latents(&mut self, index: usize) -> Result<&mut Tensor> {
        match self.layer(index)? {
            Layer::Latent(tensor) => Ok(tensor),
            Layer::Heads(_) => Err(ModelError::KvKind { layer: index, got: "K and V", want: "latents" }),
        }
    }

    fn layer(&mut self, index: usize) -> Result<&mut Layer> {
        let limit = self.layers.len();
        self.layers.get_mut(index).ok_or(ModelError::OutOfRange { what: "KV layer", got: index, limit })
    }

    /// Copies whole blocks, `(from, to)`, in every layer and in order: copy on write of shared blocks.
    ///
    /// # Errors
    /// `OutOfRange` if a block does not exist; nothing is then copied.
    pub fn copy_blocks(&mut self, copies: &[(u32, u32)]) -> Result<()> {
        let (what, limit) = ("KV block", self.num_blocks);
        for &(from, to) in copies {
            let got = from.max(to) as usize;
            if got >= limit {
                return Err(ModelError::OutOfRange { what, got, limit });
            }
        }
        let rows = (self.layout.last_hidden > 0).then_some(&mut self.last_hidden);
        for tensor in self.layers.iter_mut().flat_map(Layer::tensors_mut).chain(rows) {
            copy_rows(tensor, copies)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> KvCache {
        let layers = vec![KvLayer::Heads { num_kv_heads: 2, head_dim: 3 }, KvLayer::Latent { width: 7 }];
        let layout = KvLayout { layers, last_hidden: 5, block_size: 2, dtype: DType::F32 };
        let mut cache = KvCache::new(&Device::Cpu, layout, 3).unwrap();
        let mut next = 0.0;
        let tensors = cache.layers.iter_mut().flat_map(Layer::tensors_mut).chain([&mut cache.last_hidden]);
        for value in tensors.flat_map(Tensor::as_mut_slice::<f32>) {
            *value = next;
            next += 1.0;
        }
        cache
    }

    #[test]
    fn copies_run_in_order_over_all_layers() {
        let mut cache = cache();
        let first_block = |cache: &KvCache| -> Vec<Vec<f32>> {
            let tensors = cache.layers.iter().flat_map(Layer::tensors).chain([&cache.last_hidden]);
            tensors.map(|tensor| tensor.rows(0..1).as_slice().to_vec()).collect()
        };
        let before = first_block(&cache);
        cache.copy_blocks(&[(0, 2), (1, 0), (2, 1)]).unwrap();
        let now_in_1: Vec<Vec<f32>> = cache
            .layers
            .iter()
            .flat_map(Layer::tensors)
            .chain([&cache.last_hidden])
            .map(|t| t.rows(1..2).as_slice().to_vec())
            .collect();
        assert_eq!(now_in_1, before);
        assert_ne!(first_block(&cache), before);
        assert_eq!(cache.copy_blocks(&[(0, 3)]).unwrap_err().to_string(), "KV block is 3, below 3 is possible");
    }

    #[test]
    fn a_block_counts_every_layer() {
        let cache = cache();
        assert_eq!(cache.layout().block_bytes(), 2 * (2 * 2 * 3 + 7) * 4 + 5 * 4);
        let held: usize =
            cache.layers.iter().flat_map(Layer::tensors).chain([&cache.last_hidden]).map(Tensor::size_bytes).sum();
        assert_eq!(cache.size_bytes(), held);
    }

    #[test]
    fn a_layer_is_what_the_layout_says() {
        let mut cache = cache();
        assert_eq!(cache.heads(0).unwrap()[1].dims(), [3, 2, 2, 3]);
        assert_eq!(cache.latents(1).unwrap().dims(), [3, 2, 7]);
        let of = |result: Result<()>| result.unwrap_err().to_string();
        assert_eq!(of(cache.heads(1).map(|_| ())), "KV layer 1 keeps latents, the model reads K and V of it");
        assert_eq!(of(cache.latents(0).map(|_| ())), "KV layer 0 keeps K and V, the model reads latents of it");
        assert_eq!(of(cache.latents(2).map(|_| ())), "KV layer is 2, below 2 is possible");
    }
}

//! What schemes share: the slices of merged parts, and rows turned into codes on all threads.

use std::sync::{Mutex, PoisonError};

use drafthorse_kernels::ops::matmul_f32::F32Weight;
use drafthorse_kernels::pool::parallel_for;

use super::scheme::{Part, QuantScheme, QuantWeight};
use crate::error::Result;
use crate::weights::{Rows, Slice, Stored};

/// One part as a rank reads it.
pub(super) struct Piece<'a> {
    pub(super) part: &'a Part<'a>,
    pub(super) slice: Slice,
    /// Where its rows begin in the merged weight.
    pub(super) first_row: usize,
}

/// The slices of `parts`, one below the other, and the dimensions `[out, in]` of the whole. `group` inputs share a scale.
pub(super) fn pieces<'a>(
    parts: &'a [Part<'a>],
    in_features: usize,
    group: usize,
) -> Result<(Vec<Piece<'a>>, [usize; 2])> {
    let mut pieces = Vec::with_capacity(parts.len());
    let (mut rows, mut cols) = (0, in_features);
    for part in parts {
        let slice = part.shard.slice(part.at.path(), part.out_features, in_features, group, part.at.place())?;
        cols = slice.cols.len();
        let first_row = rows;
        rows += slice.rows.len();
        pieces.push(Piece { part, slice, first_row });
    }
    Ok((pieces, [rows, cols]))
}

/// Parts that are stored differently become one f32 weight: exact, but as large as f32 is.
pub(super) fn load_mixed(
    scheme: &dyn QuantScheme,
    parts: &[Part<'_>],
    in_features: usize,
) -> Result<Box<dyn QuantWeight>> {
    let (pieces, [out, inputs]) = pieces(parts, in_features, 1)?;
    let at = &parts[0].at;
    tracing::warn!(layer = at.path(), "parts of one layer are stored differently, they are kept as float32");
    let mut weight = F32Weight::new(at.device(), out, inputs)?;
    for piece in pieces {
        let Part { at, out_features, shard } = piece.part;
        let part = scheme.load(Part { at: at.clone(), out_features: *out_features, shard: *shard }, in_features)?;
        if !at.is_checking() {
            weight.write_rows(piece.first_row, part.dequantize()?.as_slice())?;
        }
    }
    Ok(Box::new(weight))
}

/// How the `weight` of each part is stored. One that is missing, misshapen or not stored as the others is noted.
pub(super) fn floats(parts: &[Part<'_>], in_features: usize) -> Vec<Option<Stored>> {
    let stored = |part: &Part<'_>| part.at.floats("weight", &[part.out_features, in_features]);
    let formats: Vec<Option<Stored>> = parts.iter().map(stored).collect();
    if let Some(&first) = formats.iter().flatten().next() {
        for (part, stored) in parts.iter().zip(&formats) {
            if let Some(stored) = stored.filter(|&stored| stored != first) {
                part.at.note_mixed("weight", stored, first);
            }
        }
    }
    formats
}

/// Rows as codes, with a scale and an offset for each group.
pub(super) struct Codes<Q> {
    pub(super) values: Vec<Q>,
    pub(super) scales: Vec<f32>,
    pub(super) offsets: Vec<f32>,
}

/// One row's share of [`Codes`].
pub(super) struct RowCodes<'a, Q> {
    pub(super) values: &'a mut [Q],
    pub(super) scales: &'a mut [f32],
    pub(super) offsets: &'a mut [f32],
}

impl<Q: Copy + Default + Send> Codes<Q> {
    pub(super) fn new() -> Self {
        Codes { values: Vec::new(), scales: Vec::new(), offsets: Vec::new() }
    }

    /// Becomes the codes of `rows`, each made by `encode` from the row's values, in groups of `group`.
    pub(super) fn encode(
        &mut self,
        rows: &Rows<'_>,
        stored: Stored,
        group: usize,
        encode: &(dyn Fn(&[f32], &mut RowCodes<'_, Q>) + Sync),
    ) {
        let cols = rows.cols;
        let groups = cols / group;
        self.values.resize(rows.num_rows * cols, Q::default());
        self.scales.resize(rows.num_rows * groups, 0.0);
        self.offsets.resize(rows.num_rows * groups, 0.0);
        let values = self.values.chunks_mut(rows.cols);
        let of_groups = self.scales.chunks_mut(groups).zip(self.offsets.chunks_mut(groups));
        let outputs = values.zip(of_groups).map(|(values, (scales, offsets))| RowCodes { values, scales, offsets });
        let inputs = rows.bytes.chunks(rows.cols * stored.bytes());
        let tasks: Vec<_> = inputs.zip(outputs).map(|task| Mutex::new(Some(task))).collect();
        parallel_for(tasks.len(), &|i| {
            let task = tasks[i].lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some((bytes, mut codes)) = task {
                let mut row = vec![0.0; cols];
                stored.to_f32(bytes, &mut row);
                encode(&row, &mut codes);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use drafthorse_kernels::{DType, Device};
    use safetensors::tensor::Dtype;

    use crate::quant::{Part, schemes};
    use crate::testing::Tiny;
    use crate::weights::{Checkpoint, LoadContext, Place, Shard};

    /// A merged weight as its kernel sees it on one rank, row by row.
    fn merged(tiny: &Tiny, quant: &str, names: &[(&str, Shard)], place: Place) -> Vec<Vec<f32>> {
        let (dir, config) = (tiny.write(), tiny.parsed());
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let schemes = schemes(Some(&quant.into()), None).unwrap();
        let mut context = LoadContext::new(&checkpoint, &config, &schemes, &Device::Cpu, DType::F32);
        context.place = place;
        let layer = context.root().at("model.layers.0");
        let shape = |name: &str| tiny.tensors[&format!("model.layers.0.{name}.weight")].shape.clone();
        let part = |&(name, shard)| Part { at: layer.at(name), out_features: shape(name)[0], shard };
        let parts: Vec<_> = names.iter().map(part).collect();
        let weight = schemes.linear.load_merged(&parts, shape(names[0].0)[1]).unwrap();
        let [_, inputs] = weight.dims();
        weight.dequantize().unwrap().to_vec::<f32>().unwrap().chunks(inputs).map(<[f32]>::to_vec).collect()
    }

    #[test]
    fn ranks_hold_the_rows_and_columns_of_the_whole() {
        let tiny = Tiny::new(Dtype::BF16, r#"{"num_key_value_heads": 1}"#);
        let qkv = |kv_shard| [("self_attn.q_proj", Shard::Out), ("self_attn.k_proj", kv_shard)];
        let down = [("mlp.down_proj", Shard::In)];
        for quant in ["none", "weight_only_int8"] {
            let whole = merged(&tiny, quant, &qkv(Shard::Out), Place::ALONE);
            assert_eq!(whole.len(), 64 + 16);
            for rank in 0..2 {
                let place = Place { rank, world: 2 };
                let part = merged(&tiny, quant, &qkv(Shard::KvHeads { copies: 2 }), place);
                let want = [&whole[rank * 32..(rank + 1) * 32], &whole[64..]].concat();
                assert_eq!(part, want, "{quant} rank {rank}: its own queries, and the one KV head");
            }
        }
        let whole = merged(&tiny, "none", &down, Place::ALONE);
        for rank in 0..2 {
            let part = merged(&tiny, "none", &down, Place { rank, world: 2 });
            let want: Vec<_> = whole.iter().map(|row| row[rank * 48..(rank + 1) * 48].to_vec()).collect();
            assert_eq!(part, want, "rank {rank} has its columns of every row");
        }
    }

    #[test]
    fn unquantized_weights_are_the_checkpoint_s() {
        for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
            let tiny = Tiny::new(dtype, "{}");
            let got = merged(&tiny, "none", &[("mlp.gate_proj", Shard::Replicated)], Place::ALONE);
            assert_eq!(got.concat(), tiny.values("model.layers.0.mlp.gate_proj.weight"), "{dtype:?}");
        }
    }

    #[test]
    fn int8_is_within_half_a_step_and_int4_within_half_of_its_own() {
        let tiny = Tiny::new(Dtype::BF16, "{}");
        let want = tiny.values("model.layers.0.mlp.gate_proj.weight");
        for (quant, steps) in [("weight_only_int8", 127.0), ("weight_only_int4", 7.5)] {
            let got = merged(&tiny, quant, &[("mlp.gate_proj", Shard::Replicated)], Place::ALONE).concat();
            // Weights lie within 0.4 on both sides of zero; a searched grid may round its outermost ones by a step.
            let step = 0.4 / steps;
            let errors: Vec<f32> = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).collect();
            let mean = errors.iter().sum::<f32>() / errors.len() as f32;
            assert!(errors.iter().all(|&error| error <= step * 1.01), "{quant}");
            assert!(mean > 0.0 && mean <= step * 0.27, "{quant}: {mean} of a step {step}");
        }
    }
}

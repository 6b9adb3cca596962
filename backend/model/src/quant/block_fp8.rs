//! DeepSeek's native checkpoints: 8-bit floats (e4m3) with a scale for each block of 128 x 128 weights.
//!
//! Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3. For a layer NAME of `[out, in]`:
//!
//! | tensor                  | dtype   | shape                          | |
//! |-------------------------|---------|--------------------------------|-|
//! | `NAME.weight`           | F8_E4M3 | `[out, in]`                    | |
//! | `NAME.weight_scale_inv` | floats  | `[out / 128, in / 128]`, up    | what weights are multiplied with, despite its name |
//!
//! Layers whose weight is of plain floats are as they are: head, embedding, router. Activations are not quantized.

use drafthorse_kernels::ops::matmul_f32::F32Weight;
use drafthorse_kernels::ops::matmul_fp8::Fp8Weight;

use super::bf16::Unquantized;
use super::scheme::{Part, QuantScheme, QuantWeight};
use super::stream::{Piece, load_mixed, pieces};
use crate::config::StoredQuantization;
use crate::error::Result;
use crate::weights::{Slice, StoredDtype};

/// Rows and columns of a block.
const BLOCK: usize = 128;

pub(super) struct BlockFp8;

impl BlockFp8 {
    pub(super) const NAME: &'static str = "fp8";

    pub(super) fn new(stored: &StoredQuantization) -> Result<Self> {
        stored.expect("fmt", stored.fmt.as_deref().unwrap_or("e4m3"), &["e4m3"])?;
        stored.expect("activation_scheme", stored.activation_scheme.as_deref().unwrap_or("dynamic"), &["dynamic"])?;
        let block = match &stored.weight_block_size {
            Some(size) => format!("{size:?}"),
            None => "missing".to_owned(),
        };
        stored.expect("weight_block_size", &block, &["[128, 128]"])?;
        Ok(BlockFp8)
    }
}

impl QuantScheme for BlockFp8 {
    fn name(&self) -> &'static str {
        BlockFp8::NAME
    }

    fn load_merged(&self, parts: &[Part<'_>], in_features: usize) -> Result<Box<dyn QuantWeight>> {
        let is_fp8 = |part: &Part<'_>| part.at.dtype_of("weight") == Some(StoredDtype::F8E4M3);
        match parts.iter().filter(|part| is_fp8(part)).count() {
            0 => return Unquantized.load_merged(parts, in_features),
            count if count < parts.len() => return load_mixed(self, parts, in_features),
            _ => {}
        }
        // Ranks cut between blocks; alone, a last block may be smaller.
        let group = if parts[0].at.place().world > 1 { BLOCK } else { 1 };
        let (pieces, [out, inputs]) = pieces(parts, in_features, group)?;
        let device = parts[0].at.device();
        if inputs > BLOCK && !inputs.is_multiple_of(BLOCK) {
            return load_dequantized(&pieces, in_features, [out, inputs]);
        }
        let mut weight = Fp8Weight::new(device, out, inputs, (inputs > BLOCK).then_some(BLOCK))?;
        for piece in &pieces {
            read(piece, in_features, &mut |first, codes, scales| Ok(weight.write_rows(first, codes, scales)?))?;
        }
        Ok(Box::new(weight))
    }
}

/// A weight whose rows end within a block has no kernel: it is kept as floats, exactly.
fn load_dequantized(
    pieces: &[Piece<'_>],
    in_features: usize,
    [out, inputs]: [usize; 2],
) -> Result<Box<dyn QuantWeight>> {
    let device = pieces[0].part.at.device();
    let mut weight = F32Weight::new(device, out, inputs)?;
    for piece in pieces {
        // One row of blocks, filled up with zeros, dequantizes as any.
        let padded = inputs.next_multiple_of(BLOCK);
        let mut values = Vec::new();
        read(piece, in_features, &mut |first, codes, scales| {
            let num_rows = codes.len() / inputs;
            let mut rows = Fp8Weight::new(device, num_rows, padded, Some(BLOCK))?;
            let mut filled = vec![0; num_rows * padded];
            for (filled, codes) in filled.chunks_mut(padded).zip(codes.chunks(inputs)) {
                filled[..inputs].copy_from_slice(codes);
            }
            rows.write_rows(0, &filled, scales)?;
            let mut row = vec![0.0; padded];
            values.clear();
            for i in 0..num_rows {
                rows.read_row(i, &mut row);
                values.extend_from_slice(&row[..inputs]);
            }
            Ok(weight.write_rows(first, &values)?)
        })?;
    }
    Ok(Box::new(weight))
}

/// Streams codes and, for each row, the scales of its blocks.
fn read(piece: &Piece<'_>, in_features: usize, each: &mut dyn FnMut(usize, &[u8], &[f32]) -> Result<()>) -> Result<()> {
    let (at, out) = (&piece.part.at, piece.part.out_features);
    let of_blocks = [out.div_ceil(BLOCK), in_features.div_ceil(BLOCK)];
    let columns = piece.slice.cols.start / BLOCK..piece.slice.cols.end.div_ceil(BLOCK);
    let mut scales = Vec::new();
    if let Some(stored) = at.floats("weight_scale_inv", &of_blocks) {
        let slice = Slice { rows: 0..of_blocks[0], cols: columns.clone() };
        scales.resize(of_blocks[0] * columns.len(), 0.0);
        at.stream("weight_scale_inv", of_blocks[1], stored.bytes(), &slice, &mut |rows| {
            stored.to_f32(rows.bytes, &mut scales[rows.first * rows.cols..][..rows.num_rows * rows.cols]);
            Ok(())
        })?;
    }
    if !at.expect("weight", &[out, in_features], StoredDtype::F8E4M3) {
        return Ok(());
    }
    let mut of_rows = Vec::new();
    at.stream("weight", in_features, 1, &piece.slice, &mut |rows| {
        of_rows.clear();
        for row in rows.first..rows.first + rows.num_rows {
            let block = (piece.slice.rows.start + row) / BLOCK;
            of_rows.extend_from_slice(&scales[block * columns.len()..][..columns.len()]);
        }
        each(piece.first_row + rows.first, rows.bytes, &of_rows)
    })
}

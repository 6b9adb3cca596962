//! Weights as the checkpoint has them: bf16 exactly, f32 and f16 as f32.
//!
//! With bf16 activations f32 and f16 weights are rounded to bf16: more bits would be lost on their inputs anyway.

use drafthorse_kernels::DType;
use drafthorse_kernels::ops::matmul_bf16::Bf16Weight;
use drafthorse_kernels::ops::matmul_f32::F32Weight;
use half::bf16;

use super::scheme::{Part, QuantScheme, QuantWeight};
use super::stream::{Piece, floats, pieces};
use crate::error::Result;
use crate::weights::{Rows, Stored};

pub(super) struct Unquantized;

impl QuantScheme for Unquantized {
    fn name(&self) -> &'static str {
        "none"
    }

    fn load_merged(&self, parts: &[Part<'_>], in_features: usize) -> Result<Box<dyn QuantWeight>> {
        let at = &parts[0].at;
        let (pieces, [out, inputs]) = pieces(parts, in_features, 1)?;
        let formats = floats(parts, in_features);
        let is_bf16 = formats.iter().flatten().all(|&stored| stored == Stored::BF16);

        if is_bf16 || at.dtype() == DType::BF16 {
            let mut weight = Bf16Weight::new(at.device(), out, inputs)?;
            let mut values = Vec::new();
            read(&pieces, &formats, in_features, &mut |first, stored, rows| {
                if stored == Stored::BF16
                    && cfg!(target_endian = "little")
                    && let Some(mut on_device) = weight.device_rows(first..first + rows.num_rows)
                {
                    return Ok(rows.upload.send(0..rows.bytes.len(), &mut on_device)?);
                }
                values.resize(rows.num_rows * rows.cols, bf16::ZERO);
                stored.to_bf16(rows.bytes, &mut values);
                Ok(weight.write_rows(first, &values)?)
            })?;
            return Ok(Box::new(weight));
        }
        let mut weight = F32Weight::new(at.device(), out, inputs)?;
        let mut values = Vec::new();
        read(&pieces, &formats, in_features, &mut |first, stored, rows| {
            values.resize(rows.num_rows * rows.cols, 0.0);
            stored.to_f32(rows.bytes, &mut values);
            Ok(weight.write_rows(first, &values)?)
        })?;
        Ok(Box::new(weight))
    }
}

/// Streams all pieces to `each`, with the row of the merged weight that they begin at.
fn read(
    pieces: &[Piece<'_>],
    formats: &[Option<Stored>],
    in_features: usize,
    each: &mut dyn FnMut(usize, Stored, &Rows<'_>) -> Result<()>,
) -> Result<()> {
    for (piece, stored) in pieces.iter().zip(formats) {
        let Some(stored) = *stored else { continue };
        piece.part.at.stream("weight", in_features, stored.bytes(), &piece.slice, &mut |rows| {
            each(piece.first_row + rows.first, stored, &rows)
        })?;
    }
    Ok(())
}

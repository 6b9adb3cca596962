//! 4-bit weights that are stored input by input: what AWQ and GPTQ share.
//!
//! For a layer NAME of `[out, in]`, with `group` neighbouring inputs that share a scale and a zero point, `w = scale * (q - zero)`:
//!
//! | tensor         | dtype  | AWQ               | GPTQ              |
//! |----------------|--------|-------------------|-------------------|
//! | `NAME.qweight` | I32    | `[in, out / 8]`   | `[in / 8, out]`   |
//! | `NAME.qzeros`  | I32    | `[in / group, out / 8]` | the same    |
//! | `NAME.scales`  | floats | `[in / group, out]`     | the same    |
//!
//! Eight values lie in a word, the first in its lowest bits. The kernels want rows of outputs, so a part is turned around in memory.

use drafthorse_kernels::ops::matmul_int4::{Int4Weight, Offset};

use super::GroupSize;
use super::bf16::Unquantized;
use super::scheme::{Part, QuantScheme, QuantWeight};
use super::stream::{Piece, load_mixed, pieces};
use crate::config::StoredQuantization;
use crate::error::{ModelError, Result};
use crate::weights::{Slice, StoredDtype};

/// Values of a word.
const WORD: usize = 8;

/// How words are filled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packing {
    /// Values of a word of `qweight` are neighbouring inputs of one output, else outputs of one input.
    pub(super) words_of_inputs: bool,
    /// Which of eight neighbouring outputs each value of a word is.
    pub(super) order: [usize; WORD],
    /// What is added to stored zero points; the sum is of four bits.
    pub(super) zero_offset: u8,
}

/// A scheme of this kind.
pub(super) struct Columns {
    pub(super) name: &'static str,
    pub(super) group: GroupSize,
    pub(super) packing: Packing,
}

impl Columns {
    /// `-1` is all of a row.
    pub(super) fn group(stored: &StoredQuantization) -> Result<GroupSize> {
        let size = stored.group_size.unwrap_or(-1);
        GroupSize::new(size).map_err(|_| stored.refuse("group_size", &size, "-1 (a whole row), 32, 64, 128"))
    }
}

impl QuantScheme for Columns {
    fn name(&self) -> &'static str {
        self.name
    }

    fn load_merged(&self, parts: &[Part<'_>], in_features: usize) -> Result<Box<dyn QuantWeight>> {
        let is_float = |part: &Part<'_>| !part.at.contains("qweight") && part.at.contains("weight");
        match parts.iter().filter(|part| is_float(part)).count() {
            0 => {}
            count if count == parts.len() => return Unquantized.load_merged(parts, in_features),
            _ => return load_mixed(self, parts, in_features),
        }
        let at = &parts[0].at;
        let group = self.group.checked(at.path(), in_features)?;
        let (pieces, [out, inputs]) = pieces(parts, in_features, if group < in_features { group } else { 1 })?;
        let stored_group = (group < inputs).then_some(group);
        let mut weight = Int4Weight::new(at.device(), out, inputs, stored_group, Offset::ZeroPoint)?;
        for piece in &pieces {
            self.read(piece, in_features, group, &mut weight)?;
        }
        Ok(Box::new(weight))
    }
}

impl Columns {
    fn read(&self, piece: &Piece<'_>, in_features: usize, group: usize, weight: &mut Int4Weight) -> Result<()> {
        let (at, out) = (&piece.part.at, piece.part.out_features);
        let (rows, cols) = (&piece.slice.rows, &piece.slice.cols);
        for (what, size) in [("out", out), ("in", in_features), ("out", rows.start), ("out", rows.end)] {
            if !size.is_multiple_of(WORD) {
                let (name, why) = (at.path().to_owned(), "values of a word");
                return Err(ModelError::NotMultiple { name, what, size, of: WORD, why });
            }
        }
        let groups = in_features / group;
        let of_groups = cols.start / group..cols.end.div_ceil(group);
        let words = rows.start / WORD..rows.end / WORD;

        // `[out, groups]` of this rank.
        let num_groups = of_groups.len();
        let mut scales = vec![0.0; rows.len() * num_groups];
        if let Some(stored) = at.floats("scales", &[groups, out]) {
            let slice = Slice { rows: of_groups.clone(), cols: rows.clone() };
            let mut values = Vec::new();
            at.stream("scales", out, stored.bytes(), &slice, &mut |piece| {
                values.resize(piece.num_rows * piece.cols, 0.0);
                stored.to_f32(piece.bytes, &mut values);
                for (i, value) in values.iter().enumerate() {
                    scales[i % piece.cols * num_groups + piece.first + i / piece.cols] = *value;
                }
                Ok(())
            })?;
        }
        let mut zeros = vec![0.0; rows.len() * num_groups];
        if at.expect("qzeros", &[groups, out / WORD], StoredDtype::I32) {
            let slice = Slice { rows: of_groups, cols: words.clone() };
            at.stream("qzeros", out / WORD, 4, &slice, &mut |piece| {
                for (i, value) in values_of(piece.bytes) {
                    let (word, place) = (i / WORD % piece.cols, self.packing.order[i % WORD]);
                    let at = (word * WORD + place) * num_groups + piece.first + i / WORD / piece.cols;
                    zeros[at] = f32::from((value + self.packing.zero_offset) & 15);
                }
                Ok(())
            })?;
        }

        let inputs = cols.len();
        let (shape, slice) = match self.packing.words_of_inputs {
            true => ([in_features / WORD, out], Slice { rows: cols.start / WORD..cols.end / WORD, cols: rows.clone() }),
            false => ([in_features, out / WORD], Slice { rows: cols.clone(), cols: words }),
        };
        if !at.expect("qweight", &shape, StoredDtype::I32) || at.is_checking() {
            return Ok(());
        }
        let mut codes = vec![0u8; rows.len() * inputs];
        at.stream("qweight", shape[1], 4, &slice, &mut |piece| {
            for (i, value) in values_of(piece.bytes) {
                let (row, col) = (piece.first + i / WORD / piece.cols, i / WORD % piece.cols);
                let (input, output) = match self.packing.words_of_inputs {
                    true => (row * WORD + i % WORD, col),
                    false => (row, col * WORD + self.packing.order[i % WORD]),
                };
                codes[output * inputs + input] = value;
            }
            Ok(())
        })?;
        Ok(weight.write_rows(piece.first_row, &codes, &scales, &zeros)?)
    }
}

/// The values of little-endian words, in order.
fn values_of(bytes: &[u8]) -> impl Iterator<Item = (usize, u8)> {
    bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).enumerate()
}

//! What schemes share: the slices of merged parts, and rows turned into codes on all threads.

use std::sync::{Mutex, PoisonError};

use drafthorse_kernels::pool::parallel_for;

use super::scheme::Part;
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
        encode: &(dyn Fn(&[f32], RowCodes<'_, Q>) + Sync),
    ) {
        let groups = rows.cols / group;
        self.values.resize(rows.num_rows * rows.cols, Q::default());
        self.scales.resize(rows.num_rows * groups, 0.0);
        self.offsets.resize(rows.num_rows * groups, 0.0);
        let values = self.values.chunks_mut(rows.cols);
        let of_groups = self.scales.chunks_mut(groups).zip(self.offsets.chunks_mut(groups));
        let outputs = values.zip(of_groups).map(|(values, (scales, offsets))| RowCodes { values, scales, offsets });
        let inputs = rows.bytes.chunks(rows.cols * stored.bytes());
        let tasks: Vec<_> = inputs.zip(outputs).map(|task| Mutex::new(Some(task))).collect();
        parallel_for(tasks.len(), &|i| {
            let task = tasks[i].lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some((bytes, codes)) = task {
                let mut row = vec![0.0; rows.cols];
                stored.to_f32(bytes, &mut row);
                encode(&row, codes);
            }
        });
    }
}

//! Which slice of a tensor is this rank's.

use std::ops::Range;

use crate::error::{ModelError, Result};

/// Which part of a weight `[out, in]` a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shard {
    /// All of it.
    Replicated,
    /// An equal share of `out`: column-parallel, each rank has a part of the output.
    Out,
    /// An equal share of `in`: row-parallel, the outputs must be summed over ranks.
    In,
    /// An equal share of `out` where KV heads are fewer than ranks: `copies` neighbouring ranks hold the same share.
    KvHeads { copies: usize },
}

/// Where a rank stands among all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub rank: usize,
    pub world: usize,
}

impl Place {
    /// One rank alone.
    pub const ALONE: Place = Place { rank: 0, world: 1 };
}

/// Rows and columns of the whole weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

impl Shard {
    /// How the KV heads are spread: one share a rank, or one share for several ranks when there are fewer heads than ranks.
    ///
    /// # Errors
    /// `NotMultiple` if neither number divides the other.
    pub fn of_kv_heads(num_kv_heads: usize, world: usize) -> Result<Self> {
        if num_kv_heads.is_multiple_of(world) {
            return Ok(Shard::Out);
        }
        if world.is_multiple_of(num_kv_heads) {
            return Ok(Shard::KvHeads { copies: world / num_kv_heads });
        }
        let (name, why) = ("attention".into(), "the number of ranks");
        Err(ModelError::NotMultiple { name, what: "num_key_value_heads", size: num_kv_heads, of: world, why })
    }

    /// The part of a weight `[out, in]` that the rank at `place` holds. `group` is how many neighbouring inputs share a scale.
    ///
    /// # Errors
    /// `NotMultiple`, naming `name`, if the ranks' parts would not be equal or would cut a group.
    pub fn slice(self, name: &str, out: usize, inputs: usize, group: usize, place: Place) -> Result<Slice> {
        let Place { rank, world } = place;
        let part = |what, size: usize, parts: usize, index: usize, unit: usize| {
            let of = parts * unit;
            if !size.is_multiple_of(of) {
                let why = if unit > 1 { "ranks times quantization group" } else { "the number of ranks" };
                return Err(ModelError::NotMultiple { name: name.into(), what, size, of, why });
            }
            let share = size / parts;
            Ok(index * share..(index + 1) * share)
        };
        Ok(match self {
            Shard::Replicated => Slice { rows: 0..out, cols: 0..inputs },
            Shard::Out => Slice { rows: part("out", out, world, rank, 1)?, cols: 0..inputs },
            Shard::KvHeads { copies } => {
                Slice { rows: part("out", out, world / copies, rank / copies, 1)?, cols: 0..inputs }
            }
            Shard::In => Slice { rows: 0..out, cols: part("in", inputs, world, rank, group)? },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each rank's slice of a weight `[out, in]`, as text.
    fn slices(shard: Shard, out: usize, inputs: usize, group: usize, world: usize) -> String {
        let of = |rank| match shard.slice("w", out, inputs, group, Place { rank, world }) {
            Ok(Slice { rows, cols }) => format!("{rows:?} {cols:?}"),
            Err(err) => err.to_string(),
        };
        (0..world).map(of).collect::<Vec<_>>().join(" | ")
    }

    #[test]
    fn ranks_cover_a_weight_in_equal_parts() {
        assert_eq!(slices(Shard::Replicated, 4, 6, 1, 2), "0..4 0..6 | 0..4 0..6");
        assert_eq!(slices(Shard::Out, 4, 6, 1, 2), "0..2 0..6 | 2..4 0..6");
        assert_eq!(slices(Shard::In, 4, 6, 1, 2), "0..4 0..3 | 0..4 3..6");
        assert_eq!(slices(Shard::KvHeads { copies: 2 }, 4, 6, 1, 4), "0..2 0..6 | 0..2 0..6 | 2..4 0..6 | 2..4 0..6");
    }

    #[test]
    fn a_cut_through_a_group_is_refused() {
        assert_eq!(slices(Shard::In, 4, 128, 64, 2), "0..4 0..64 | 0..4 64..128");
        let refused = "w: in is 96, not a multiple of 128 (ranks times quantization group)";
        assert_eq!(slices(Shard::In, 4, 96, 64, 2), format!("{refused} | {refused}"));
        let refused = "w: out is 5, not a multiple of 2 (the number of ranks)";
        assert_eq!(slices(Shard::Out, 5, 96, 64, 2), format!("{refused} | {refused}"));
    }

    #[test]
    fn few_kv_heads_are_held_by_several_ranks() {
        assert_eq!(Shard::of_kv_heads(8, 2).unwrap(), Shard::Out);
        assert_eq!(Shard::of_kv_heads(2, 8).unwrap(), Shard::KvHeads { copies: 4 });
        assert_eq!(
            Shard::of_kv_heads(3, 2).unwrap_err().to_string(),
            "attention: num_key_value_heads is 3, not a multiple of 2 (the number of ranks)"
        );
    }
}

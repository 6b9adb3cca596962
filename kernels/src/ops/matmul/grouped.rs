//! Products of rows that each go to one of many weights: experts.

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use super::activations::Activations;
use super::run::{Product, even};
use super::{Format, Packed};
use crate::dtype::{DType, Float};
use crate::error::{KernelError, Result};
use crate::pool::{SharedMut, num_threads, parallel_for};
use crate::simd::Level;
use crate::tensor::Tensor;
use crate::with_float;
use crate::workspace::Workspace;

/// Which expert each token's choices go to: pairs of a token and a choice, in the order of their experts.
///
/// Pair `token * top_k + choice` is the token's choice. All sizes follow from the number of tokens, none from what was chosen, so a step
/// that holds them can be captured.
#[derive(Debug)]
pub struct Groups {
    /// `[pairs]` i32: pairs by expert, those of one expert in their own order.
    pub pairs: Tensor,
    /// `[pairs]` i32: where in `pairs` each pair stands.
    pub places: Tensor,
    /// `[experts + 1]` i32: where each expert's pairs begin in `pairs`; then their number.
    pub offsets: Tensor,
    /// Choices of a token.
    pub top_k: usize,
    /// On a GPU: a kernel that was launched since lets the next one begin only when what is above has been written.
    pub(crate) is_sorted: AtomicBool,
}

/// What the rows of a grouped product's input are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// One for each token, which goes to all that it chose.
    OfTokens,
    /// One for each pair, in the order of [`Groups::pairs`].
    OfPairs,
}

impl Groups {
    /// Room for `tokens` tokens; [`permute`](super::super::moe::permute) fills it.
    ///
    /// # Errors
    /// `WorkspaceFull`.
    pub fn take(workspace: &Workspace, tokens: usize, top_k: usize, num_experts: usize) -> Result<Self> {
        let pairs = tokens * top_k;
        Ok(Groups {
            pairs: workspace.take([pairs], DType::I32)?,
            places: workspace.take([pairs], DType::I32)?,
            offsets: workspace.take([num_experts + 1], DType::I32)?,
            top_k,
            is_sorted: AtomicBool::new(false),
        })
    }

    /// Bytes of workspace that [`take`](Self::take) takes.
    pub fn bytes(tokens: usize, top_k: usize, num_experts: usize) -> usize {
        let room = |len: usize| (len * DType::I32.bytes()).next_multiple_of(64);
        2 * room(tokens * top_k) + room(num_experts + 1)
    }

    pub fn num_pairs(&self) -> usize {
        self.pairs.rows_cols().1
    }

    pub fn num_experts(&self) -> usize {
        self.offsets.rows_cols().1.saturating_sub(1)
    }

    /// Bytes of workspace that a grouped product takes besides its activations.
    pub(crate) fn matmul_bytes(num_experts: usize) -> usize {
        (num_experts * DType::I32.bytes()).next_multiple_of(64)
    }

    /// Pairs of an expert, on the CPU.
    fn of_expert(&self, expert: usize) -> Range<usize> {
        let offsets = self.offsets.as_slice::<i32>();
        offsets[expert] as usize..offsets[expert + 1] as usize
    }

    /// Writes the experts that were chosen to the beginning of `to`, and gives their number.
    fn chosen(&self, to: &mut [i32]) -> usize {
        let mut count = 0;
        for expert in 0..self.num_experts() {
            if !self.of_expert(expert).is_empty() {
                to[count] = expert as i32;
                count += 1;
            }
        }
        count
    }
}

/// `y[i] = x[row of pair i] @ (its expert's rows of weight)ᵀ`; the contract is in the ops' folders.
pub(crate) fn matmul_grouped<F: Format>(
    x: &Tensor,
    rows: Rows,
    weight: &Packed<F>,
    groups: &Groups,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    matmul_grouped_at(Level::best(), x, rows, weight, groups, y, workspace)
}

/// [`matmul_grouped`] with given instructions, which must be available.
fn matmul_grouped_at<F: Format>(
    level: Level,
    x: &Tensor,
    rows: Rows,
    weight: &Packed<F>,
    groups: &Groups,
    y: &mut Tensor,
    workspace: &Workspace,
) -> Result<()> {
    let (num_pairs, num_experts) = (groups.num_pairs(), groups.num_experts().max(1));
    let [outputs, inputs] = weight.dims();
    if !outputs.is_multiple_of(num_experts) {
        return Err(KernelError::NotMultiple { op: F::OP, what: "out", size: outputs, of: num_experts });
    }
    let width = outputs / num_experts;
    let (num_rows, pairs_of_row) = match rows {
        Rows::OfTokens => (num_pairs / groups.top_k.max(1), groups.top_k),
        Rows::OfPairs => (num_pairs, 1),
    };
    x.expect_shape(F::OP, "x", [num_rows, inputs])?;
    y.expect_shape(F::OP, "y", [num_pairs, width])?;
    if num_pairs == 0 {
        return Ok(());
    }
    let mut chosen = workspace.take([num_experts], DType::I32)?;
    let num_chosen = groups.chosen(chosen.as_mut_slice());
    let chosen = &chosen.as_slice::<i32>()[..num_chosen];
    let pairs = groups.pairs.as_slice::<i32>();
    let rows_of = |i: usize| groups.of_expert(chosen[i] as usize);
    let activations = with_float!(F::OP, "x", x.dtype(), T => {
        let x = x.as_slice::<T>();
        let row = |i: usize| {
            let row = match rows {
                Rows::OfTokens => pairs[i] as usize / pairs_of_row,
                Rows::OfPairs => i,
            };
            &x[row * inputs..][..inputs]
        };
        Activations::pack_groups::<T, F>(num_pairs, &row, num_chosen, &rows_of, weight, workspace)?
    });
    with_float!(F::OP, "y", y.dtype(), T => {
        let y = SharedMut::new(y.as_mut_slice::<T>());
        run::<F, T>(level, &activations, weight, width, &y, chosen, &rows_of);
    });
    Ok(())
}

fn run<F: Format, T: Float>(
    level: Level,
    activations: &Activations,
    weight: &Packed<F>,
    width: usize,
    y: &SharedMut<T>,
    chosen: &[i32],
    rows_of: &(dyn Fn(usize) -> Range<usize> + Sync),
) {
    // Many tasks, since experts have rows of their own numbers.
    let chunks = (num_threads() * 8).div_ceil(chosen.len());
    parallel_for(chosen.len() * chunks, &|i| {
        let (i, chunk) = (i / chunks, i % chunks);
        let first = chosen[i] as usize * width;
        let (rows, outputs) = (rows_of(i), first..first + width);
        let product = Product { level, activations, weight, y, rows, outputs };
        let blocks = product.blocks();
        let part = even(blocks.len(), chunks, chunk);
        product.run_blocks(blocks.start + part.start..blocks.start + part.end);
    });
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::device::Device;
    use crate::ops::matmul::testing::random;
    use crate::ops::matmul::{Offset, Scales, reference, workspace_bytes};
    use crate::ops::matmul_bf16::Bf16;
    use crate::ops::matmul_f32::F32;
    use crate::ops::matmul_int4::Int4;
    use crate::ops::matmul_int8::Int8;
    use crate::ops::moe::permute;

    const EXPERTS: usize = 5;
    const TOP_K: usize = 2;

    /// Each token's choices: expert 3 gets most, expert 4 none.
    fn choices(tokens: usize) -> Vec<i32> {
        (0..tokens).flat_map(|t| [if t % 9 == 0 { 0 } else { 3 }, [1, 2, 0][t % 3]]).collect()
    }

    fn groups(ids: &[i32], workspace: &Workspace) -> Groups {
        let tokens = ids.len() / TOP_K;
        let ids = Tensor::from_slice(&Device::Cpu, "ids", ids, [tokens, TOP_K]).unwrap();
        let mut groups = Groups::take(workspace, tokens, TOP_K, EXPERTS).unwrap();
        permute(&ids, &mut groups).unwrap();
        groups
    }

    fn scales(out: usize, inputs: usize, group: Option<usize>, offset: Offset, center: f32) -> Option<Scales> {
        let mut scales = Scales::new(&Device::Cpu, "test", out, inputs, group, offset, center).unwrap();
        let count = out * inputs / group.unwrap_or(inputs);
        let offsets = if offset == Offset::Symmetric { Vec::new() } else { random(count, 8) };
        scales.write_rows("test", 0, out, &random(count, 6), &offsets).unwrap();
        Some(scales)
    }

    fn packed<F: Format>(
        out: usize,
        inputs: usize,
        scales: Option<Scales>,
        value: impl Fn(f32) -> F::Value,
    ) -> Packed<F> {
        let mut weight = Packed::new(&Device::Cpu, out, inputs, scales).unwrap();
        let values: Vec<F::Value> = random(out * inputs, 5).into_iter().map(value).collect();
        weight.write_rows(0, &values).unwrap();
        weight
    }

    /// Every pair has the bits that its expert alone gives its row, at every level, from rows of tokens and of pairs.
    fn check<F: Format>(weight: &Packed<F>, width: usize, num_tokens: &[usize]) {
        let [_, inputs] = weight.dims();
        for &tokens in num_tokens {
            let workspace_len = workspace_bytes(tokens * TOP_K, inputs) + 2 * Groups::bytes(tokens, TOP_K, EXPERTS);
            let workspace = Workspace::new(&Device::Cpu, workspace_len).unwrap();
            let groups = groups(&choices(tokens), &workspace);
            let x = random(tokens * inputs, 3);
            let narrow: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
            let whole = reference::matmul(&x, weight);
            let of_narrow = reference::matmul(&narrow, weight);
            let (pairs, ids) = (groups.pairs.as_slice::<i32>(), choices(tokens));
            for level in Level::available() {
                let product = |x: &Tensor, rows| {
                    let mut y = Tensor::zeros(&Device::Cpu, "y", [pairs.len(), width], DType::F32).unwrap();
                    matmul_grouped_at(level, x, rows, weight, &groups, &mut y, &workspace).unwrap();
                    y.to_vec::<f32>().unwrap()
                };
                let tensor = Tensor::from_slice(&Device::Cpu, "x", &x, [tokens, inputs]).unwrap();
                let got = product(&tensor, Rows::OfTokens);
                let want = |whole: &[f32]| -> Vec<f32> {
                    let of_pair = |&pair: &i32| {
                        let (token, expert) = (pair as usize / TOP_K, ids[pair as usize] as usize);
                        &whole[(token * EXPERTS + expert) * width..][..width]
                    };
                    pairs.iter().flat_map(of_pair).copied().collect()
                };
                assert!(got == want(&whole), "{level:?}, {tokens} tokens, {} x {inputs}", width);
                let tensor = Tensor::from_slice(&Device::Cpu, "x", &narrow, [tokens, inputs]).unwrap();
                assert!(product(&tensor, Rows::OfTokens) == want(&of_narrow), "{level:?}, {tokens} tokens of bf16");
                let spread: Vec<f32> =
                    pairs.iter().flat_map(|&p| &x[p as usize / TOP_K * inputs..][..inputs]).copied().collect();
                let tensor = Tensor::from_slice(&Device::Cpu, "x", &spread, [pairs.len(), inputs]).unwrap();
                assert!(product(&tensor, Rows::OfPairs) == got, "{level:?}, {tokens} tokens, rows of pairs");
            }
        }
    }

    #[test]
    fn each_pair_has_the_bits_of_its_expert_alone() {
        // Experts that fill blocks of outputs, and some that share them.
        for (width, inputs) in [(16, 64), (40, 33), (7, 96)] {
            let out = EXPERTS * width;
            check::<F32>(&packed(out, inputs, None, |v| v), width, &[0, 1, 2, 7, 30]);
            check::<Bf16>(&packed(out, inputs, None, bf16::from_f32), width, &[7, 30]);
            let group = inputs.is_multiple_of(32).then_some(32);
            let int8 = scales(out, inputs, group, Offset::Symmetric, 0.0);
            check::<Int8>(&packed(out, inputs, int8, |v| (v * 127.0) as i8), width, &[7, 30]);
            for offset in [Offset::Symmetric, Offset::ZeroPoint, Offset::Min] {
                let int4 = scales(out, inputs, group, offset, 8.0);
                check::<Int4>(&packed(out, inputs, int4, |v| ((v + 1.0) * 8.0) as u8), width, &[7, 30]);
            }
        }
    }

    #[test]
    fn an_expert_of_more_rows_than_a_panel_serves_at_once() {
        let (width, inputs) = (16, 40);
        check::<Bf16>(&packed(EXPERTS * width, inputs, None, bf16::from_f32), width, &[250]);
    }

    #[test]
    fn one_token_reads_its_choices_alone() {
        let (width, inputs) = (64, 96);
        let weight: Packed<Bf16> = packed(EXPERTS * width, inputs, None, bf16::from_f32);
        let workspace = Workspace::new(&Device::Cpu, 1 << 16).unwrap();
        for ids in [[1, 4], [0, 2]] {
            let groups = groups(&ids, &workspace);
            let x = Tensor::from_slice(&Device::Cpu, "x", &random(inputs, 3), [1, inputs]).unwrap();
            let mut y = Tensor::zeros(&Device::Cpu, "y", [TOP_K, width], DType::F32).unwrap();
            weight.read.lock().unwrap().clear();
            matmul_grouped(&x, Rows::OfTokens, &weight, &groups, &mut y, &workspace).unwrap();
            let blocks = width / crate::simd::LANES;
            let want: Vec<usize> =
                ids.iter().flat_map(|&id| id as usize * blocks..(id as usize + 1) * blocks).collect();
            let read = weight.read.lock().unwrap().clone();
            assert!(read.iter().eq(&want), "{ids:?} read {read:?}");
            assert_eq!(read.len() * weight.block_bytes(), TOP_K * width * inputs * 2, "bytes of top_k experts");
        }
    }

    #[test]
    fn a_broken_row_is_its_own_affair() {
        let (width, inputs, tokens) = (32, 64, 20);
        let weight: Packed<F32> = packed(EXPERTS * width, inputs, None, |v| v);
        let workspace = Workspace::new(&Device::Cpu, 1 << 18).unwrap();
        let groups = groups(&choices(tokens), &workspace);
        let mut values = random(tokens * inputs, 3);
        let run = |values: &[f32]| {
            let x = Tensor::from_slice(&Device::Cpu, "x", values, [tokens, inputs]).unwrap();
            let mut y = Tensor::zeros(&Device::Cpu, "y", [tokens * TOP_K, width], DType::F32).unwrap();
            matmul_grouped(&x, Rows::OfTokens, &weight, &groups, &mut y, &workspace).unwrap();
            y.to_vec::<f32>().unwrap()
        };
        let want = run(&values);
        values[4 * inputs] = f32::NAN;
        for (i, (got, want)) in run(&values).chunks(width).zip(want.chunks(width)).enumerate() {
            let token = groups.pairs.as_slice::<i32>()[i] as usize / TOP_K;
            assert!(if token == 4 { got.iter().all(|y| y.is_nan()) } else { got == want }, "pair {i} of token {token}");
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let workspace = Workspace::new(&Device::Cpu, 1 << 16).unwrap();
        let groups = groups(&[0, 1], &workspace);
        let product = |out, x: [usize; 2], y: [usize; 2]| {
            let weight: Packed<F32> = packed(out, 8, None, |v| v);
            let tensor = |shape: [usize; 2]| Tensor::zeros(&Device::Cpu, "t", shape, DType::F32).unwrap();
            let result = matmul_grouped(&tensor(x), Rows::OfTokens, &weight, &groups, &mut tensor(y), &workspace);
            result.unwrap_err().to_string()
        };
        assert_eq!(product(19, [1, 8], [2, 4]), "matmul_f32: out is 19, not a multiple of 5");
        assert_eq!(product(20, [2, 8], [2, 4]), "matmul_f32: x has shape [2, 8], expected [1, 8]");
        assert_eq!(product(20, [1, 8], [2, 5]), "matmul_f32: y has shape [2, 5], expected [2, 4]");
    }
}

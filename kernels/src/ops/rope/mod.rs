//! Rotary position embedding, rotate-half form: dimension `i` turns with dimension `i + rotary_dim / 2`.
//!
//! Source: Su et al. 2021, arXiv:2104.09864; scalings in `frequencies.rs`.

mod cpu;
mod frequencies;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::ops::attention::Heads;
use crate::tensor::Tensor;
use crate::with_float;

const OP: &str = "rope";

/// What angles a model turns by.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeParams {
    pub head_dim: usize,
    /// Leading dimensions of a head that turn; even, at most `head_dim`. The others pass unchanged.
    pub rotary_dim: usize,
    /// The base of the frequencies.
    pub theta: f64,
    /// Positions 0 to this, exclusive, can be looked up.
    pub max_positions: usize,
    pub scaling: RopeScaling,
}

/// How a context is stretched beyond the one trained on.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// All angles divided by `factor`.
    Linear {
        factor: f64,
    },
    /// The base grows with the length of the sequence. A token at position p turns as in a sequence of p + 1 tokens, as it does
    /// when decoded one by one, so that its key does not depend on how the prompt was cut into chunks.
    Dynamic {
        factor: f64,
        original_max_positions: usize,
    },
    /// Llama 3.1: by wavelength against the original context.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_positions: usize,
    },
    /// By the number of turns within the original context; `beta_fast` is 32 and `beta_slow` 1 where a config is silent.
    /// Cosine and sine are multiplied by `attention_factor`, or, if that is silent, by a value from `factor` and the `mscale`s.
    Yarn {
        factor: f64,
        original_max_positions: usize,
        beta_fast: f64,
        beta_slow: f64,
        attention_factor: Option<f64>,
        mscale: Option<f64>,
        mscale_all_dim: Option<f64>,
        /// Whether the range of blended pairs is widened to whole numbers; true where a config is silent.
        truncate: bool,
    },
}

/// Cosines and sines of every position, computed once.
#[derive(Debug)]
pub struct RopeTable {
    /// `[max_positions, rotary_dim]` f32: for each pair its cosine, then for each its sine.
    cos_sin: Tensor,
    head_dim: usize,
}

impl RopeTable {
    /// The kernels of a GPU turn whole heads only.
    pub(crate) fn expect_whole_heads(&self, op: &'static str, heads: Heads) -> Result<()> {
        let (_, rotary_dim) = self.cos_sin.rows_cols();
        if rotary_dim == heads.head_dim {
            return Ok(());
        }
        let want = "the head's dimension: heads that turn in part have no kernel on a GPU";
        Err(KernelError::Value { op, arg: "rotary_dim", got: rotary_dim as i64, want })
    }

    /// `[max_positions, rotary_dim]` f32: for each pair its cosine, then for each its sine.
    pub(crate) fn cos_sin(&self) -> &Tensor {
        &self.cos_sin
    }

    /// # Errors
    /// `NotMultiple` or `Value` if `rotary_dim` is odd or larger than `head_dim`, `OutOfMemory`.
    pub fn new(device: &Device, params: &RopeParams) -> Result<Self> {
        let &RopeParams { head_dim, rotary_dim, max_positions, .. } = params;
        if !rotary_dim.is_multiple_of(2) {
            return Err(KernelError::NotMultiple { op: OP, what: "rotary_dim", size: rotary_dim, of: 2 });
        }
        if rotary_dim > head_dim {
            return Err(KernelError::Value {
                op: OP,
                arg: "rotary_dim",
                got: rotary_dim as i64,
                want: "at most head_dim",
            });
        }
        let mut cos_sin = Tensor::zeros(device, "rope table", [max_positions, rotary_dim], DType::F32)?;
        match device {
            Device::Cpu => cpu::fill_table(params, cos_sin.as_mut_slice()),
            Device::Cuda(_) => {
                let mut host = vec![0.0; cos_sin.size_bytes() / 4];
                cpu::fill_table(params, &mut host);
                cos_sin.copy_from_slice(&host)?;
            }
        }
        Ok(RopeTable { cos_sin, head_dim })
    }

    pub fn max_positions(&self) -> usize {
        self.cos_sin.dims()[0]
    }

    pub fn size_bytes(&self) -> usize {
        self.cos_sin.size_bytes()
    }
}

/// Turns the query and key heads in `qkv` by their tokens' positions, in place.
///
/// | argument    | shape | dtype | |
/// |-------------|-------|-------|-|
/// | `qkv`       | `[tokens, (num_heads + 2 * num_kv_heads) * head_dim]`: all queries, then keys, then values | f32 or bf16 | q and k updated |
/// | `positions` | `[tokens]` | i32 | read |
///
/// With c and s from the table: `x[i] * c - x[i + half] * s` and `x[i + half] * c + x[i] * s`, in f32, each product rounded.
///
/// # Errors
/// `Shape`, `DType`, and `Value` if a position is not in the table; nothing is then written.
pub fn rope(qkv: &mut Tensor, positions: &Tensor, table: &RopeTable, heads: Heads) -> Result<()> {
    let (num_tokens, _) = qkv.rows_cols();
    qkv.expect_shape(OP, "qkv", [num_tokens, heads.qkv_cols()])?;
    positions.expect_dtype(OP, "positions", DType::I32)?;
    positions.expect_shape(OP, "positions", [num_tokens])?;
    if heads.head_dim != table.head_dim {
        let got = heads.head_dim as i64;
        return Err(KernelError::Value { op: OP, arg: "head_dim", got, want: "that of the rope table" });
    }
    match qkv.device() {
        Device::Cpu => {
            let positions = positions.as_slice::<i32>();
            let limit = table.max_positions();
            if let Some(&position) = positions.iter().find(|&&position| position < 0 || position as usize >= limit) {
                let want = "a position in the rope table";
                return Err(KernelError::Value { op: OP, arg: "positions", got: position.into(), want });
            }
            with_float!(OP, "qkv", qkv.dtype(), T => {
                cpu::rope::<T>(qkv.as_mut_slice(), positions, &table.cos_sin, heads);
            });
        }
        Device::Cuda(_) => return Err(KernelError::NotOnDevice { op: OP, device: "a GPU" }),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    const HEADS: Heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 4 };

    fn table(rotary_dim: usize, scaling: RopeScaling) -> RopeTable {
        let params = RopeParams { head_dim: 4, rotary_dim, theta: 100.0, max_positions: 50, scaling };
        RopeTable::new(&Device::Cpu, &params).unwrap()
    }

    /// One token at position 3, every head `[1, 2, 3, 4]`.
    fn turned(table: &RopeTable) -> Vec<f32> {
        let values: Vec<f32> = (0..16).map(|i| (i % 4 + 1) as f32).collect();
        let mut qkv = Tensor::from_slice(&Device::Cpu, "qkv", &values, [1, 16]).unwrap();
        let positions = Tensor::from_slice(&Device::Cpu, "positions", &[3], [1]).unwrap();
        rope(&mut qkv, &positions, table, HEADS).unwrap();
        qkv.to_vec().unwrap()
    }

    fn assert_close(got: &[f32], want: &[f32]) {
        assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6), "{got:?}, expected {want:?}");
    }

    #[test]
    fn queries_and_keys_turn_and_values_do_not() {
        // Pair 0 turns by 3, pair 1 by 3 / sqrt(100).
        let ((s0, c0), (s1, c1)) = (3f32.sin_cos(), 0.3f32.sin_cos());
        let head = [c0 - 3.0 * s0, 2.0 * c1 - 4.0 * s1, 3.0 * c0 + s0, 4.0 * c1 + 2.0 * s1];
        let got = turned(&table(4, RopeScaling::None));
        for got in got[..12].chunks(4) {
            assert_close(got, &head);
        }
        assert_eq!(got[12..], [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn dimensions_beyond_the_rotary_ones_pass() {
        let (s, c) = 3f32.sin_cos();
        let got = turned(&table(2, RopeScaling::None));
        assert_close(&got[..4], &[c - 2.0 * s, 2.0 * c + s, 3.0, 4.0]);
    }

    #[test]
    fn the_amplitude_multiplies_what_turns() {
        let yarn = RopeScaling::Yarn {
            factor: 1.0,
            original_max_positions: 50,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: Some(2.0),
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        };
        let (one, two) = (turned(&table(4, RopeScaling::None)), turned(&table(4, yarn)));
        for (one, two) in one[..12].iter().zip(&two) {
            assert!((2.0 * one - two).abs() < 1e-6);
        }
    }

    #[test]
    fn bf16_is_the_f32_result_rounded() {
        let table = table(4, RopeScaling::None);
        let mut qkv = Tensor::from_slice(&Device::Cpu, "qkv", &[1.0; 16].map(bf16::from_f32), [1, 16]).unwrap();
        let mut exact = Tensor::from_slice(&Device::Cpu, "qkv", &[1.0f32; 16], [1, 16]).unwrap();
        let positions = Tensor::from_slice(&Device::Cpu, "positions", &[7], [1]).unwrap();
        rope(&mut qkv, &positions, &table, HEADS).unwrap();
        rope(&mut exact, &positions, &table, HEADS).unwrap();
        let rounded: Vec<bf16> = exact.as_slice::<f32>().iter().map(|&x| bf16::from_f32(x)).collect();
        assert_eq!(qkv.as_slice::<bf16>(), rounded);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let table = table(4, RopeScaling::None);
        let mut qkv = Tensor::zeros(&Device::Cpu, "qkv", [1, 16], DType::F32).unwrap();
        let positions = Tensor::from_slice(&Device::Cpu, "positions", &[50], [1]).unwrap();
        let err = rope(&mut qkv, &positions, &table, HEADS).unwrap_err();
        assert_eq!(err.to_string(), "rope: positions is 50, expected a position in the rope table");
        let params =
            RopeParams { head_dim: 4, rotary_dim: 6, theta: 1e4, max_positions: 1, scaling: RopeScaling::None };
        let err = RopeTable::new(&Device::Cpu, &params).unwrap_err();
        assert_eq!(err.to_string(), "rope: rotary_dim is 6, expected at most head_dim");
    }
}

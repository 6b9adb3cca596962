//! What an operator may set for one rank.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use drafthorse_kernels::{DType, Device};
use drafthorse_model::MlaForm;

use crate::error::{Result, WorkerError};
use crate::grammar::Grammars;
use crate::runner::MAX_IN_FLIGHT;
use crate::spec::SpeculateConfig;

/// Where a rank runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    #[default]
    Cpu,
    /// GPU of this number; activations are then bf16.
    Cuda(usize),
}

/// What activations and the KV cache are stored in; sums are always f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationDtype {
    #[default]
    Float32,
    Bfloat16,
}

/// Settings of a rank. The defaults suit a CPU and a small model.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// A checkpoint in Hugging Face's layout.
    pub model_dir: PathBuf,
    pub device: DeviceKind,
    pub dtype: ActivationDtype,
    /// `weight_only_int8` or `weight_only_int4`: quantize at load. `None` keeps what the checkpoint has.
    pub quant_type: Option<String>,
    /// `weightonly_group_size`: neighbouring inputs that share a scale, -1 for all of a row. `None`: the type's default.
    pub quant_group_size: Option<i64>,
    /// `mla_use_matrix_absorption`: how attention over latents is computed, in models that have it.
    pub mla_form: MlaForm,
    /// Most sequences in one step; as many slots.
    pub max_num_seqs: u32,
    /// Most tokens in one step, over all sequences; sizes the workspace.
    pub max_num_batched_tokens: u32,
    /// Most tokens of one sequence. `None`: the model's context, or as much of it as the KV cache holds.
    pub max_model_len: Option<u32>,
    /// Tokens of KV in one block.
    pub block_size: u32,
    /// Bytes of KV cache. On the CPU it takes memory only as it fills.
    pub kv_cache_bytes: u64,
    /// On a GPU, if not 0: the share of its memory that the model may take; the KV cache gets what the rest leaves, whatever
    /// `kv_cache_bytes` says.
    pub memory_fraction: f64,
    /// Make the weights up instead of reading them: for measuring.
    pub random_weights: bool,
    /// Run decoding steps on a GPU op by op, not as recorded graphs.
    pub eager: bool,
    /// On a GPU, what comes of a sequence is the same bits whatever runs beside it and however its prompt is cut; slower. On a CPU it always is.
    pub deterministic: bool,
    /// Steps in flight that the engine may have, 1 or 2; `None`: 2 on a GPU, where the next one then begins without the host.
    pub pipeline_depth: Option<u32>,
    /// Measure how long a GPU is busy with each step.
    pub time_device: bool,
    /// Bound on weights, workspace, slots and KV cache together; `None` sets none.
    pub memory_bytes: Option<u64>,
    /// Threads of the process-wide CPU pool, if no model has started it; `None`: one a core.
    pub num_threads: Option<usize>,
    pub speculate: SpeculateConfig,
    /// What compiles the grammars of guided sequences. `None`: they fail.
    pub grammars: Option<Arc<Grammars>>,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        WorkerConfig {
            model_dir: PathBuf::new(),
            device: DeviceKind::Cpu,
            dtype: ActivationDtype::Float32,
            quant_type: None,
            quant_group_size: None,
            mla_form: MlaForm::default(),
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            max_model_len: None,
            block_size: 16,
            kv_cache_bytes: 512 << 20,
            memory_fraction: 0.0,
            random_weights: false,
            eager: false,
            deterministic: false,
            pipeline_depth: None,
            time_device: false,
            memory_bytes: None,
            num_threads: None,
            speculate: SpeculateConfig::default(),
            grammars: None,
        }
    }
}

impl WorkerConfig {
    /// Checks what the types cannot say.
    pub(crate) fn validate(&self) -> Result<()> {
        let setting = |field, got: u64, must: String| Err(WorkerError::Setting { field, got: got.to_string(), must });
        // Positions and counts are i32 on the device.
        let most = i32::MAX as u64;
        for (field, got) in [
            ("max_num_seqs", u64::from(self.max_num_seqs)),
            ("max_num_batched_tokens", u64::from(self.max_num_batched_tokens)),
            ("num_threads", self.num_threads.unwrap_or(1) as u64),
            ("pipeline_depth", self.pipeline_depth.unwrap_or(1).into()),
        ] {
            if got == 0 || got > most {
                return setting(field, got, format!("1 to {most}"));
            }
        }
        if ![16, 32, 64, 128].contains(&self.block_size) {
            return setting("block_size", self.block_size.into(), "16, 32, 64 or 128".into());
        }
        let (depth, most) = (self.pipeline_depth.unwrap_or(1), MAX_IN_FLIGHT as u32);
        if depth > most {
            return setting("pipeline_depth", depth.into(), format!("1 to {most}"));
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            let must = format!("at least max_num_seqs, {}: each running sequence takes a token", self.max_num_seqs);
            return setting("max_num_batched_tokens", self.max_num_batched_tokens.into(), must);
        }
        if !(0.0..=1.0).contains(&self.memory_fraction) {
            let got = self.memory_fraction.to_string();
            return Err(WorkerError::Setting { field: "memory_fraction", got, must: "0 to 1".into() });
        }
        Ok(())
    }

    /// What activations are stored in: the kernels of a GPU take bf16.
    pub(crate) fn activations(&self) -> DType {
        match self.device {
            DeviceKind::Cpu => self.dtype.dtype(),
            DeviceKind::Cuda(_) => DType::BF16,
        }
    }
}

impl DeviceKind {
    /// With `deterministic` one whose results do not depend on the batch.
    pub(crate) fn open(self, deterministic: bool) -> Result<Device> {
        match self {
            DeviceKind::Cpu => Ok(Device::Cpu),
            DeviceKind::Cuda(ordinal) if deterministic => Ok(Device::cuda_deterministic(ordinal)?),
            DeviceKind::Cuda(ordinal) => Ok(Device::cuda(ordinal)?),
        }
    }
}

impl ActivationDtype {
    /// The name that settings use.
    pub const fn name(self) -> &'static str {
        self.dtype().name()
    }

    pub(crate) const fn dtype(self) -> DType {
        match self {
            ActivationDtype::Float32 => DType::F32,
            ActivationDtype::Bfloat16 => DType::BF16,
        }
    }
}

impl fmt::Display for ActivationDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ActivationDtype {
    type Err = WorkerError;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "float32" => Ok(ActivationDtype::Float32),
            "bfloat16" => Ok(ActivationDtype::Bfloat16),
            _ => Err(WorkerError::Setting { field: "dtype", got: name.into(), must: "float32 or bfloat16".into() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut WorkerConfig)) -> String {
        let mut config = WorkerConfig::default();
        config.validate().unwrap();
        change(&mut config);
        config.validate().unwrap_err().to_string()
    }

    #[test]
    fn what_cannot_work_is_refused_with_its_field_and_bound() {
        assert_eq!(refused(|c| c.max_num_seqs = 0), "max_num_seqs is 0, must be 1 to 2147483647");
        assert_eq!(refused(|c| c.block_size = 12), "block_size is 12, must be 16, 32, 64 or 128");
        assert_eq!(
            refused(|c| c.max_num_batched_tokens = 63),
            "max_num_batched_tokens is 63, must be at least max_num_seqs, 64: each running sequence takes a token"
        );
        assert_eq!(
            "float16".parse::<ActivationDtype>().unwrap_err().to_string(),
            "dtype is float16, must be float32 or bfloat16"
        );
    }
}

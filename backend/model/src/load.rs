//! From a folder to a model that runs.

use std::path::Path;
use std::time::Instant;

use drafthorse_kernels::{DType, Device};

use crate::config::ModelConfig;
use crate::error::Result;
use crate::models::{self, Model};
use crate::quant::{self, QuantType};
use crate::weights::{Checkpoint, LoadContext, LoadProgress, Place};

/// How to load a checkpoint.
pub struct LoadOptions<'a> {
    pub device: Device,
    /// What activations are stored in: f32 or bf16.
    pub dtype: DType,
    /// Quantize the weights while they load.
    pub quant: Option<QuantType>,
    pub place: Place,
    /// Index of the model's first layer in the KV cache: 0, or for a drafter the number of the target's layers.
    pub first_kv_layer: usize,
    /// Called on the loading thread as bytes come in.
    pub progress: Option<&'a dyn Fn(LoadProgress)>,
}

impl Default for LoadOptions<'_> {
    /// All of the model on the CPU, f32 activations, weights as they are stored.
    fn default() -> Self {
        LoadOptions {
            device: Device::Cpu,
            dtype: DType::F32,
            quant: None,
            place: Place::ALONE,
            first_kv_layer: 0,
            progress: None,
        }
    }
}

/// A model in memory.
pub struct Loaded {
    pub model: Box<dyn Model>,
    pub config: ModelConfig,
    /// Device memory of this rank's weights.
    pub weight_bytes: usize,
    /// How the weights are stored now.
    pub quantization: &'static str,
}

/// Loads this rank's shard of the checkpoint in `dir`.
///
/// # Errors
/// Whatever is wrong with the folder: see [`ModelError`](crate::ModelError). Tensors that are missing or misshapen are all named
/// in one error, before any is read.
pub fn load(dir: &Path, options: LoadOptions<'_>) -> Result<Loaded> {
    let start = Instant::now();
    let config = ModelConfig::from_dir(dir)?;
    let build = models::builder(&config.architecture)?;
    let schemes = quant::schemes(options.quant.as_ref(), config.quantization.as_ref())?;
    let checkpoint = Checkpoint::open(dir)?;

    let context = |progress| {
        let mut context = LoadContext::new(&checkpoint, &config, &schemes, &options.device, options.dtype);
        context.place = options.place;
        context.first_kv_layer = options.first_kv_layer;
        context.progress = progress;
        context
    };
    // Once over all tensors without reading them: memory that nothing is written to costs nothing.
    checkpoint.set_checking(true);
    build(&context(None).root())?;
    checkpoint.verdict()?;

    checkpoint.set_checking(false);
    let context = context(options.progress);
    let model = build(&context.root())?;
    let weight_bytes = context.weight_bytes();
    let quantization = schemes.name();
    tracing::debug!(
        architecture = config.architecture,
        quantization,
        weight_bytes,
        seconds = start.elapsed().as_secs_f32(),
        "weights loaded"
    );
    Ok(Loaded { model, config, weight_bytes, quantization })
}

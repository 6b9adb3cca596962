//! From a folder to a drafter for a model that is loaded.

use std::path::Path;

use drafthorse_kernels::{DType, Device, Tensor};
use half::bf16;

use super::mtp::Mtp;
use super::naming::{DRAFT_TOKENS, Names};
use crate::config::ModelConfig;
use crate::error::{ModelError, Result};
use crate::load::LoadOptions;
use crate::models::Model;
use crate::quant::{self, QuantWeight};
use crate::weights::{Checkpoint, LoadContext, StoredDtype};

/// The model that a drafter drafts for.
#[derive(Clone, Copy)]
pub struct Base<'a> {
    pub model: &'a dyn Model,
    pub config: &'a ModelConfig,
}

/// A drafter in memory.
pub struct Draft {
    /// Takes [`Forward::target_hidden`](crate::Forward::target_hidden); its logits are of draft tokens.
    pub model: Box<dyn Model>,
    pub config: ModelConfig,
    /// Draft token to the base's token, if it drafts only some; else they are the same.
    pub tokens: Option<Vec<u32>>,
    /// Memory of its own weights.
    pub weight_bytes: usize,
}

/// Loads the MTP module in `dir`, which may be the base's own folder. Its KV lies after the base's layers.
///
/// # Errors
/// `OtherBase` if it is for another model, `NoMtp` if it is none, and as [`load`](crate::load).
pub fn load_draft(dir: &Path, base: Base<'_>, options: &LoadOptions<'_>) -> Result<Draft> {
    let mut config = ModelConfig::from_dir(dir)?;
    config.check_window(options.max_sequence)?;
    config.limit_positions(options.max_positions);
    for (key, got, want) in [
        ("vocab_size", config.vocab_size, base.config.vocab_size),
        ("hidden_size", config.hidden_size, base.config.hidden_size),
    ] {
        if got != want {
            return Err(ModelError::OtherBase { dir: dir.to_owned(), key, got, want });
        }
    }
    let schemes = quant::schemes(options.quant.as_ref(), config.quantization.as_ref())?;
    let mut checkpoint = Checkpoint::open(dir)?;
    let names = Names::of(&checkpoint, dir)?;
    names.turn(&mut checkpoint, config.hidden_size)?;
    if let Some(module) = names.in_base() {
        checkpoint.set_aside(|name| !name.starts_with(&module));
    }
    let tokens = draft_tokens(&checkpoint, config.vocab_size)?;
    let ends = base.model.ends();
    let head = format!("{}.weight", names.head);
    if let (Some(tokens), Some(ends), false) = (&tokens, &ends, checkpoint.contains(&head)) {
        let values = rows_of(&*ends.head, tokens, options)?;
        checkpoint.put_floats(&head, &[tokens.len(), config.hidden_size], &values);
    }

    let mut context = LoadContext::new(&checkpoint, &config, &schemes, &options.device, options.dtype);
    context.place = options.place;
    context.first_kv_layer = base.model.kv_layers().len();
    context.mla_form = options.mla_form;
    context.progress = options.progress;
    let num_tokens = tokens.as_ref().map_or(config.vocab_size, Vec::len);
    let model = context.checked(|root| Mtp::load(root, &names, ends.as_ref(), num_tokens))?;
    let weight_bytes = context.weight_bytes();
    tracing::info!(weight_bytes, quantization = schemes.name(), draft_tokens = num_tokens, "drafter loaded");
    Ok(Draft { model: Box::new(model), config, tokens, weight_bytes })
}

/// The tokens that the checkpoint says it drafts.
fn draft_tokens(checkpoint: &Checkpoint, vocab_size: usize) -> Result<Option<Vec<u32>>> {
    let Some(dtype) = checkpoint.dtype_of(DRAFT_TOKENS) else { return Ok(None) };
    let bytes = checkpoint.bytes(DRAFT_TOKENS)?;
    let differences: Vec<i64> = match dtype {
        StoredDtype::I64 => bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        StoredDtype::I32 => bytes.as_chunks().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect(),
        other => return Err(checkpoint.refuse_dtype(DRAFT_TOKENS, other, "I64 or I32")),
    };
    let token = |(index, difference): (i64, &i64)| {
        let token = index + difference;
        u32::try_from(token).ok().filter(|&token| (token as usize) < vocab_size).ok_or(ModelError::OutOfRange {
            what: "a token of d2t",
            got: token.unsigned_abs() as usize,
            limit: vocab_size,
        })
    };
    (0..).zip(&differences).map(token).collect::<Result<_>>().map(Some)
}

/// Rows of a head, dequantized.
fn rows_of(head: &dyn QuantWeight, rows: &[u32], options: &LoadOptions<'_>) -> Result<Vec<f32>> {
    let [_, cols] = head.dims();
    let ids: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
    let ids = Tensor::from_slice(&options.device, "draft tokens", &ids, [ids.len()])?;
    // A GPU has its weights, and so their rows, in bf16.
    let dtype = if options.device == Device::Cpu { DType::F32 } else { DType::BF16 };
    let mut values = Tensor::zeros(&options.device, "rows of the head", [rows.len(), cols], dtype)?;
    head.gather(&ids, &mut values)?;
    match dtype {
        DType::BF16 => Ok(values.to_vec::<bf16>()?.into_iter().map(bf16::to_f32).collect()),
        _ => Ok(values.to_vec()?),
    }
}

//! From a folder to a drafter for a model that is loaded.

use std::path::Path;

use drafthorse_kernels::{DType, Device, Tensor};
use half::bf16;

use super::kind::{Base, KINDS, Kind, Shared};
use super::names::Names;
use crate::config::ModelConfig;
use crate::error::{ModelError, Result, TensorProblem};
use crate::load::LoadOptions;
use crate::models::Model;
use crate::quant::{self, QuantWeight};
use crate::weights::{Checkpoint, LoadContext, StoredDtype};

/// A drafter in memory.
pub struct Draft {
    /// Takes [`Forward::target_hidden`](crate::Forward::target_hidden); its logits are of draft tokens.
    pub model: Box<dyn Model>,
    pub config: ModelConfig,
    /// Layers of the base whose inputs it reads side by side, in this order; none: it reads the base's last hidden state. Where it goes on
    /// from its own output, it reads that alone.
    pub taps: Vec<usize>,
    /// Draft token to the base's token, if it drafts only some; else they are the same.
    pub tokens: Option<Vec<u32>>,
    /// Memory of its own weights.
    pub weight_bytes: usize,
}

/// Loads the drafter for `speculate_method` `method` in `dir`, which may be the base's own folder. Its KV lies after the base's layers.
///
/// # Errors
/// `OtherBase` if it is for another model, `NoDraft` if it is none, `OtherDraft` if it is for another method, and as
/// [`load`](crate::load).
pub fn load_draft(dir: &Path, method: &str, base: Base<'_>, options: &LoadOptions<'_>) -> Result<Draft> {
    let mut config = ModelConfig::from_dir(dir)?;
    let mut checkpoint = Checkpoint::open(dir)?;
    let (kind, names) = kind_of(&checkpoint, dir, method)?;
    for (key, got, want) in [
        ("vocab_size", config.vocab_size, base.config.vocab_size),
        ("hidden_size", config.hidden_size, base.config.hidden_size),
    ] {
        if got != want {
            return Err(ModelError::OtherBase { dir: dir.to_owned(), key, got, want });
        }
    }
    let taps = (kind.taps)(&config, base)?;
    if kind.outlasts_training {
        let trained = config.max_position_embeddings;
        if config.allow_positions(base.config.max_position_embeddings) {
            tracing::warn!(
                trained,
                "the draft was trained on shorter texts than the base: later drafts may hold less often"
            );
        }
    }
    config.check_window(options.max_sequence)?;
    config.limit_positions(options.max_positions);
    let schemes = quant::schemes(options.quant.as_ref(), config.quantization.as_ref())?;
    names.turn(&mut checkpoint, config.hidden_size)?;
    if let Some(module) = names.in_base() {
        checkpoint.set_aside(|name| !name.starts_with(&module));
    }
    let tokens = draft_tokens(&checkpoint, &names, &config)?;
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
    let shared = Shared {
        ends: ends.as_ref(),
        num_tokens: tokens.as_ref().map_or(config.vocab_size, Vec::len),
        num_parts: taps.len().max(1),
    };
    let model = context.checked(|root| (kind.load)(root, &names, &shared))?;
    let weight_bytes = context.weight_bytes();
    let (kind, draft_tokens) = (kind.title, shared.num_tokens);
    tracing::info!(kind, weight_bytes, quantization = schemes.name(), draft_tokens, ?taps, "drafter loaded");
    Ok(Draft { model, config, taps, tokens, weight_bytes })
}

/// The drafter that the checkpoint holds, which must be one for `method`.
fn kind_of(checkpoint: &Checkpoint, dir: &Path, method: &str) -> Result<(&'static Kind, Names)> {
    let found = |of_method: bool| {
        let kinds = KINDS.iter().filter(|kind| (kind.method == method) == of_method);
        kinds.filter_map(|kind| Some((kind, (kind.names)(checkpoint)?))).next()
    };
    if let Some(found) = found(true) {
        return Ok(found);
    }
    let dir = dir.to_owned();
    if let Some((kind, _)) = found(false) {
        return Err(ModelError::OtherDraft {
            dir,
            kind: kind.title,
            for_method: kind.method,
            method: method.to_owned(),
        });
    }
    let wanted = KINDS.iter().rfind(|kind| kind.method == method);
    let (kind, sign) = wanted.map_or(("a draft", "of one"), |kind| (kind.title, kind.sign));
    Err(ModelError::NoDraft { dir, kind, sign })
}

/// The tokens that the checkpoint says it drafts. What its config says of them otherwise is noted.
fn draft_tokens(checkpoint: &Checkpoint, names: &Names, config: &ModelConfig) -> Result<Option<Vec<u32>>> {
    let (name, num_wanted) = (&names.draft_tokens, config.keys.count("draft_vocab_size")?);
    let note_shape = |name: &str, got: Vec<usize>, want: usize| {
        checkpoint.note(TensorProblem::Shape { name: name.to_owned(), got, want: vec![want] });
    };
    checkpoint.set_aside(|name| name == names.has_draft);
    match checkpoint.shape_of(&names.has_draft) {
        Some(shape) if *shape != [config.vocab_size] => note_shape(&names.has_draft, shape.to_vec(), config.vocab_size),
        _ => {}
    }
    let Some(dtype) = checkpoint.dtype_of(name) else {
        if num_wanted.is_some_and(|wanted| wanted != config.vocab_size) {
            checkpoint.note(TensorProblem::Missing { name: name.clone() });
        }
        return Ok(None);
    };
    let bytes = checkpoint.bytes(name)?;
    let differences: Vec<i64> = match dtype {
        StoredDtype::I64 => bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        StoredDtype::I32 => bytes.as_chunks().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect(),
        other => return Err(checkpoint.refuse_dtype(name, other, "I64 or I32")),
    };
    if let Some(wanted) = num_wanted.filter(|&wanted| wanted != differences.len()) {
        note_shape(name, vec![differences.len()], wanted);
    }
    let token = |(index, difference): (i64, &i64)| {
        let token = index + difference;
        u32::try_from(token).ok().filter(|&token| (token as usize) < config.vocab_size).ok_or(ModelError::DraftToken {
            name: name.clone(),
            index: index as usize,
            token,
            vocab_size: config.vocab_size,
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

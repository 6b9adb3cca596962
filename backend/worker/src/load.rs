//! From settings to a runner: the checkpoint, the memory plan, and everything that lives as long as the model.

use std::collections::VecDeque;
use std::time::Instant;

use drafthorse_control::Ready;
use drafthorse_kernels::device::Stopwatch;
use drafthorse_kernels::{DType, Device, Solo, Workspace, pool};
use drafthorse_model::{
    Base, Batch, BatchLimits, KvCache, KvLayout, LoadOptions, LoadProgress, Loaded, Model, ModelConfig, ModelError,
    QuantType, StepSize, load_draft,
};
use tracing::warn;

use crate::config::{DeviceKind, WorkerConfig};
use crate::error::{Result, WorkerError};
use crate::features::Features;
use crate::graphs::Graphs;
use crate::inputs::Inputs;
use crate::memory::{MemoryPlan, Needs, budget};
use crate::runner::{MAX_IN_FLIGHT, Runner};
use crate::sampler::{Sampler, logit_rows};
use crate::slots::{SlotSizes, Slots};
use crate::spec::{self, DraftSizes, Drafter, Forced, Method, ModelProposer, Proposer};

/// How far loading has come.
#[derive(Clone, Debug)]
pub enum Progress {
    /// Bytes of the checkpoint read, and all there are.
    Weights {
        done: u64,
        total: u64,
    },
    Planned(MemoryPlan),
}

/// A network and what must be known of it to run it.
pub(crate) struct Network {
    pub model: Box<dyn Model>,
    pub vocab_size: usize,
    pub hidden: usize,
    /// Positions it was made for.
    pub context: usize,
    pub weight_bytes: u64,
    pub drafter: Option<Drafter>,
}

/// Steps in flight. On the CPU the next one gains nothing by waiting in line.
fn pipeline_depth(config: &WorkerConfig, device: &Device) -> u32 {
    let most = match device {
        Device::Cpu => 1,
        Device::Cuda(_) => MAX_IN_FLIGHT as u32,
    };
    config.pipeline_depth.unwrap_or(most)
}

/// Loads what `config` names.
///
/// # Errors
/// `Setting`, `Memory`, or `Model` with what is wrong with the checkpoint.
pub(crate) fn load(config: &WorkerConfig, progress: &(dyn Fn(Progress) + Send)) -> Result<(Runner, Ready)> {
    config.validate()?;
    let method = spec::method(&config.speculate)?;
    check_rule(config, &method)?;
    if let Some(num_threads) = config.num_threads
        && let Err(running) = pool::set_threads(num_threads)
    {
        warn!(num_threads, running, "the cpu pool runs already, its number of threads stays");
    }
    if let Some(share) = config.speculate.forced_acceptance {
        warn!(share, "drafts hold whatever the model says: the text means nothing (speculate_forced_acceptance)");
    }
    let device = config.device.open(config.deterministic)?;
    let mut network = network(config, &device, matches!(method, Method::Model), progress)?;
    let proposer = match method {
        Method::Host(proposer) => Some(proposer),
        Method::None | Method::Model => None,
    };
    network.weight_bytes += network.drafter.as_ref().map_or(0, |drafter| drafter.weight_bytes);
    assemble(config, &device, network, proposer, progress)
}

/// A lossy rule changes what is said, so it is refused where there is nothing to verify.
fn check_rule(config: &WorkerConfig, method: &Method) -> Result<()> {
    let is_lossy = spec::verify_rule(&config.speculate)?.candidates().is_some();
    let must = match (method, config.device) {
        (Method::None, _) => "exact where speculate_method is none",
        (_, DeviceKind::Cuda(_)) => "exact on a GPU",
        _ => return Ok(()),
    };
    let got = config.speculate.verify.clone();
    if is_lossy { Err(WorkerError::Setting { field: "speculate_verify", got, must: must.into() }) } else { Ok(()) }
}

fn network(
    config: &WorkerConfig,
    device: &Device,
    drafts: bool,
    progress: &(dyn Fn(Progress) + Send),
) -> Result<Network> {
    let report = |at: LoadProgress| progress(Progress::Weights { done: at.read_bytes, total: at.total_bytes });
    let options = LoadOptions {
        device: device.clone(),
        dtype: config.activations(),
        random_weights: config.random_weights,
        mla_form: config.mla_form,
        max_positions: max_positions(config, device)?,
        max_sequence: config.max_model_len.map(|len| len as usize),
        quant: config.quant_type.clone().map(|name| QuantType { name, group_size: config.quant_group_size }),
        progress: Some(&report),
        ..LoadOptions::default()
    };
    let loaded = drafthorse_model::load(&config.model_dir, &options)?;
    let drafter = if drafts { Some(drafter(config, &loaded, options)?) } else { None };
    Ok(Network {
        drafter,
        model: loaded.model,
        vocab_size: loaded.config.vocab_size,
        hidden: loaded.config.hidden_size,
        context: loaded.config.max_position_embeddings,
        weight_bytes: loaded.weight_bytes as u64,
    })
}

/// The drafter that `config` names, for the base that was `loaded`.
fn drafter(config: &WorkerConfig, loaded: &Loaded, options: LoadOptions<'_>) -> Result<Drafter> {
    let speculate = &config.speculate;
    let dir = speculate.draft_dir.as_ref().unwrap_or(&config.model_dir);
    let base = Base { model: &*loaded.model, config: &loaded.config };
    let quant = speculate.draft_quant_type.clone().map(QuantType::from);
    let draft =
        load_draft(dir, &speculate.method, base, &LoadOptions { quant, ..options }).map_err(|error| match error {
            ModelError::NoDraft { .. } if speculate.draft_dir.is_none() => {
                let must =
                    "none without a draft: draft_model_name_or_path names none, and the checkpoint has none in it"
                        .into();
                WorkerError::Setting { field: "speculate_method", got: "mtp".into(), must }
            }
            error => WorkerError::Draft(error),
        })?;
    let num_tokens = draft.tokens.as_ref().map_or(draft.config.vocab_size, Vec::len);
    let longest = config.max_model_len.map_or(loaded.config.max_position_embeddings, |len| len as usize);
    if draft.config.max_position_embeddings < longest {
        let (got, must) =
            (longest.to_string(), format!("at most the draft's {}", draft.config.max_position_embeddings));
        return Err(WorkerError::Setting { field: "max_model_len", got, must });
    }
    let (model, tokens, taps, weight_bytes) = (draft.model, draft.tokens, draft.taps, draft.weight_bytes as u64);
    Ok(Drafter { model, tokens, num_tokens, taps, weight_bytes })
}

/// Plans the memory and takes it all.
pub(crate) fn assemble(
    config: &WorkerConfig,
    device: &Device,
    network: Network,
    proposer: Option<Box<dyn Proposer>>,
    progress: &(dyn Fn(Progress) + Send),
) -> Result<(Runner, Ready)> {
    let Network { model, vocab_size, hidden, context, weight_bytes, drafter } = network;
    let (max_tokens, max_seqs) = (config.max_num_batched_tokens as usize, config.max_num_seqs as usize);
    let dtype = config.activations();
    let chunk_rows = logit_rows(device);
    let max_drafts = match &drafter {
        Some(_) => config.speculate.max_draft_token_num as usize,
        None => proposer.as_ref().map_or(0, |proposer| proposer.max_drafts()),
    };
    let taps = drafter.as_ref().map(|drafter| drafter.taps.clone()).unwrap_or_default();
    let features = hidden * taps.len().max(1);
    let block_size = config.block_size as usize;
    let layout = KvLayout {
        layers: model.kv_layers().into_iter().chain(drafter.iter().flat_map(|d| d.model.kv_layers())).collect(),
        last_hidden: if drafter.is_some() { features } else { 0 },
        block_size,
        dtype,
    };

    // No sequence is longer than all blocks together.
    let most_blocks = most_kv_bytes(config, device)? / (layout.block_bytes() as u64).max(1);
    let kv_tokens = usize::try_from(most_blocks).unwrap_or(usize::MAX).saturating_mul(block_size);
    let longest = config.max_model_len.map_or(context, |len| len as usize).min(context).min(kv_tokens.max(1));
    let step = StepSize { tokens: max_tokens, seqs: max_seqs, logit_rows: chunk_rows, max_kv_len: longest };
    let draft_sizes = |max_blocks_per_seq: usize, num_blocks: usize| DraftSizes {
        max_drafts,
        adaptive: config.speculate.adaptive,
        max_tokens,
        max_seqs,
        max_blocks_per_seq,
        num_blocks,
        chunk_rows,
        max_kv_len: longest,
        hidden,
        features,
        dtype,
    };
    let of_target = model.workspace_bytes(step)
        + wanted_rows_bytes(chunk_rows, hidden, dtype)
        + Sampler::workspace_bytes(device, chunk_rows, vocab_size);
    let of_drafter = drafter.as_ref().map_or(0, |drafter| draft_sizes(0, 0).workspace_bytes(device, drafter));
    let workspace_bytes = of_target.max(of_drafter);
    let taken_bytes = (workspace_bytes + Features::bytes(taps.len(), max_tokens, hidden, dtype)) as u64;
    let slot_sizes = |max_model_len: usize, num_blocks: usize| SlotSizes {
        num_slots: max_seqs,
        // A step planned before the end of a sequence was known may reserve room past it.
        max_blocks: (max_model_len + (2 * max_drafts + 1) * MAX_IN_FLIGHT).div_ceil(block_size),
        block_size,
        num_blocks,
        max_model_len,
        max_drafts,
        vocab_size,
        hidden,
        dtype,
    };
    let plan = MemoryPlan::new(&Needs {
        weight_bytes,
        workspace_bytes: taken_bytes,
        slot_bytes: slot_sizes(longest, 0).bytes(),
        block_bytes: layout.block_bytes() as u64,
        kv_cache_bytes: kv_cache_bytes(config, device, &layout, taken_bytes)?,
        kv_setting: if follows_memory(config, device) { "memory_fraction" } else { "kv_cache_bytes" },
        block_size: config.block_size,
        max_model_len: config.max_model_len,
        context: u32::try_from(context).unwrap_or(u32::MAX),
        memory_bytes: budget(config.memory_bytes, device),
    })?;
    plan.log();
    progress(Progress::Planned(plan.clone()));

    let rule = spec::verify_rule(&config.speculate)?;
    let max_model_len = plan.max_model_len as usize;
    let sizes = slot_sizes(max_model_len, plan.num_blocks as usize);
    // A chunk of n prompt tokens wants the logits of n of them, the first from the chunk before, and of the next token.
    let max_logit_rows = max_tokens + max_seqs;
    let draft_slots = if drafter.is_some() { max_drafts } else { 0 };
    let proposer = match drafter {
        Some(drafter) => {
            let proposer = ModelProposer::new(device, drafter, draft_sizes(sizes.max_blocks, sizes.num_blocks))?;
            Some(Box::new(proposer) as Box<dyn Proposer>)
        }
        None => proposer,
    };
    let limits =
        BatchLimits { max_tokens, max_seqs, max_blocks_per_seq: sizes.max_blocks, max_logit_rows, max_later: 0 };
    let ready = Ready {
        num_blocks: plan.num_blocks,
        block_size: plan.block_size,
        max_model_len: plan.max_model_len,
        vocab_size: vocab_size as u32,
        max_drafts: max_drafts as u32,
        draft_slots: draft_slots as u32,
        needs_host_tokens: proposer.as_ref().is_some_and(|proposer| proposer.needs_host_tokens()),
        pipeline_depth: pipeline_depth(config, device),
        weight_bytes,
        kv_bytes: plan.kv_bytes,
        workspace_bytes: plan.workspace_bytes,
    };
    let take = || -> Result<Runner> {
        let stopwatches = match (config.time_device, Stopwatch::new(device)?, Stopwatch::new(device)?) {
            (true, Some(even), Some(odd)) => Some([even, odd]),
            _ => None,
        };
        Ok(Runner {
            model,
            kv: KvCache::new(device, layout, plan.num_blocks as usize)?,
            workspace: Workspace::new(device, workspace_bytes)?,
            comm: Box::new(Solo::default()),
            batch: Batch::new(device, limits)?,
            inputs: Inputs::new(max_logit_rows, max_seqs),
            slots: Slots::new(device, sizes)?.with_grammars(config.grammars.clone()),
            sampler: Sampler::new(device, chunk_rows, max_logit_rows, vocab_size)?.with_rule(rule),
            features: Features::new(device, taps.clone(), max_tokens, hidden, dtype)?,
            graphs: Graphs::new(device, config.eager),
            proposer,
            forced: config.speculate.forced_acceptance.and_then(Forced::new),
            propose_rows: Vec::with_capacity(max_seqs),
            kept_rows: Vec::with_capacity(max_seqs),
            max_model_len,
            vocab_size,
            hidden: (hidden, dtype),
            last_step: 0,
            in_flight: VecDeque::with_capacity(MAX_IN_FLIGHT),
            stopwatches,
            finished: Instant::now(),
        })
    };
    let mut runner = take().map_err(|error| plan.explain(error))?;
    if *device != Device::Cpu {
        runner.warm_up()?;
    }
    Ok((runner, ready))
}

/// Positions that a sequence can come to, as far as they are known before the model is: its tables need no more.
fn max_positions(config: &WorkerConfig, device: &Device) -> Result<Option<usize>> {
    // A step planned before the end of a sequence was known may reserve room past it.
    const SPARE: u64 = 1024;
    let per_token = ModelConfig::from_dir(&config.model_dir)?.kv_bytes_per_token(config.activations());
    let by_memory = most_kv_bytes(config, device)? / per_token.max(1) as u64;
    let most = by_memory.min(config.max_model_len.map_or(u64::MAX, u64::from));
    Ok(usize::try_from(most.saturating_add(SPARE)).ok())
}

/// Whether the KV cache gets what the rest leaves.
fn follows_memory(config: &WorkerConfig, device: &Device) -> bool {
    *device != Device::Cpu && config.memory_fraction > 0.0
}

/// More than the KV cache will take, known before anything is loaded: as set, or all of a GPU's memory.
fn most_kv_bytes(config: &WorkerConfig, device: &Device) -> Result<u64> {
    let of_device = device.memory_bytes()?.filter(|_| follows_memory(config, device));
    Ok(of_device.map_or(config.kv_cache_bytes, |(_, total)| total as u64))
}

/// What the KV cache may take: as set, or of a GPU's memory what `memory_fraction` allows and is not taken.
fn kv_cache_bytes(config: &WorkerConfig, device: &Device, layout: &KvLayout, workspace_bytes: u64) -> Result<u64> {
    let Some((free, total)) = device.memory_bytes()?.filter(|_| follows_memory(config, device)) else {
        return Ok(config.kv_cache_bytes);
    };
    // Weights are in place already. The library for large products and the driver's own want a little more.
    let taken = (total - free) as u64;
    let allowed = (total as f64 * config.memory_fraction) as u64;
    let left = allowed.saturating_sub(taken + workspace_bytes + GPU_RESERVE_BYTES);
    // Positions of the cache are counted in i32.
    let most = (i32::MAX as u64 / layout.block_size as u64).saturating_mul(layout.block_bytes() as u64);
    Ok(left.min(most))
}

/// Device memory left for cuBLASLt, loaded kernels and graphs.
const GPU_RESERVE_BYTES: u64 = 1 << 30;

/// The gathered hidden states of one chunk of logits.
fn wanted_rows_bytes(rows: usize, hidden: usize, dtype: DType) -> usize {
    (rows * hidden * dtype.bytes()).next_multiple_of(64)
}

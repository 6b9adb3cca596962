//! What a model will take, planned once when it loads: weights, workspace and KV cache.
//!
//! Nothing is allocated after that. On the CPU the KV cache and the workspace are zeroed pages that cost nothing until they
//! are written, so the plan is a bound and resident memory grows with use.

use std::fmt::Write;

use drafthorse_kernels::{Device, KernelError};
use drafthorse_model::ModelError;
use tracing::info;

use crate::error::{Result, WorkerError};

/// One part of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub name: &'static str,
    pub bytes: u64,
    /// The setting that makes it smaller.
    pub shrunk_by: &'static str,
}

/// What is known before the KV cache is laid out.
#[derive(Clone, Debug)]
pub(crate) struct Needs {
    pub weight_bytes: u64,
    pub workspace_bytes: u64,
    /// Slots and step inputs.
    pub slot_bytes: u64,
    /// K and V of one block in all layers.
    pub block_bytes: u64,
    /// What the KV cache may take, and the setting that decides it.
    pub kv_cache_bytes: u64,
    pub kv_setting: &'static str,
    pub block_size: u32,
    /// The operator's wish, or none: then as much of `context` as the KV cache holds.
    pub max_model_len: Option<u32>,
    /// Positions the model was made for.
    pub context: u32,
    /// Bound on all parts together, and who says so.
    pub memory_bytes: Option<(u64, &'static str)>,
}

/// Bytes and blocks, decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    pub weight_bytes: u64,
    pub workspace_bytes: u64,
    pub slot_bytes: u64,
    pub kv_bytes: u64,
    /// The setting that decides [`kv_bytes`](Self::kv_bytes).
    pub kv_setting: &'static str,
    pub num_blocks: u32,
    pub block_size: u32,
    pub max_model_len: u32,
}

impl MemoryPlan {
    /// # Errors
    /// `Memory` with all parts if the KV cache cannot hold one sequence of `max_model_len`, or if the parts together pass
    /// `memory_bytes`; `Setting` if `max_model_len` is more than the model takes.
    pub(crate) fn new(needs: &Needs) -> Result<Self> {
        let block_bytes = needs.block_bytes;
        let num_blocks = u32::try_from(needs.kv_cache_bytes / block_bytes.max(1)).unwrap_or(i32::MAX as u32);
        let tokens = u64::from(num_blocks) * u64::from(needs.block_size);
        let max_model_len = match needs.max_model_len {
            Some(wish) if wish == 0 || wish > needs.context => {
                let must = format!("1 to {}, the model's context", needs.context);
                return Err(WorkerError::Setting { field: "max_model_len", got: wish.to_string(), must });
            }
            Some(wish) => wish,
            None => needs.context.min(u32::try_from(tokens).unwrap_or(u32::MAX)),
        };
        let plan = MemoryPlan {
            weight_bytes: needs.weight_bytes,
            workspace_bytes: needs.workspace_bytes,
            slot_bytes: needs.slot_bytes,
            kv_bytes: u64::from(num_blocks) * block_bytes,
            kv_setting: needs.kv_setting,
            num_blocks,
            block_size: needs.block_size,
            max_model_len,
        };
        // A sequence of one token with nothing to follow is no service.
        let wanted = u64::from(max_model_len.max(2));
        if tokens < wanted {
            let wanted_bytes = wanted.div_ceil(u64::from(needs.block_size)) * block_bytes;
            let what = format!(
                "a sequence of {wanted} tokens wants {wanted_bytes} bytes of KV cache, {} gives {}: raise it or lower max_model_len",
                needs.kv_setting, needs.kv_cache_bytes
            );
            return Err(WorkerError::Memory { what, parts: plan.parts() });
        }
        if let Some((budget, source)) = needs.memory_bytes
            && plan.total_bytes() > budget
        {
            let what = format!("the model wants {} bytes, {source} {budget}", plan.total_bytes());
            return Err(WorkerError::Memory { what, parts: plan.parts() });
        }
        if max_model_len < needs.context && needs.max_model_len.is_none() {
            info!(max_model_len, context = needs.context, "context cut to what the kv cache holds");
        }
        Ok(plan)
    }

    /// An error of taking what was planned, with all parts if there was no room.
    pub(crate) fn explain(&self, error: WorkerError) -> WorkerError {
        match error {
            WorkerError::Kernel(KernelError::OutOfMemory { what, wanted, free })
            | WorkerError::Model(ModelError::Kernel(KernelError::OutOfMemory { what, wanted, free })) => {
                let what = format!("{what} wants {wanted} bytes, {free} are free");
                WorkerError::Memory { what, parts: self.parts() }
            }
            other => other,
        }
    }

    /// What a log or an error lists.
    pub fn parts(&self) -> Vec<Part> {
        vec![
            Part { name: "weights", bytes: self.weight_bytes, shrunk_by: "quant_type" },
            Part { name: "workspace", bytes: self.workspace_bytes, shrunk_by: "max_num_batched_tokens" },
            Part { name: "slots", bytes: self.slot_bytes, shrunk_by: "max_num_seqs" },
            Part { name: "kv cache", bytes: self.kv_bytes, shrunk_by: self.kv_setting },
        ]
    }

    pub fn total_bytes(&self) -> u64 {
        self.parts().iter().map(|part| part.bytes).sum()
    }

    pub(crate) fn log(&self) {
        for Part { name, bytes, shrunk_by } in self.parts() {
            info!(part = name, bytes, shrunk_by, "memory planned");
        }
        let MemoryPlan { num_blocks, block_size, max_model_len, .. } = *self;
        info!(total_bytes = self.total_bytes(), num_blocks, block_size, max_model_len, "memory planned");
    }
}

/// What may be taken: as set, or on the CPU what the machine has, where the system says.
pub(crate) fn budget(set: Option<u64>, device: &Device) -> Option<(u64, &'static str)> {
    let set = set.map(|bytes| (bytes, "memory_bytes allows"));
    let machine = || Some((machine_bytes()?, "this machine has"));
    set.or_else(|| (*device == Device::Cpu).then(machine).flatten())
}

fn machine_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
}

/// The parts in one line, for an error.
pub(crate) fn list(parts: &[Part]) -> String {
    let mut line = String::new();
    for Part { name, bytes, shrunk_by } in parts {
        let comma = if line.is_empty() { "" } else { ", " };
        let _ = write!(line, "{comma}{name} {bytes}, shrunk by {shrunk_by}");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1000 bytes of weights, 100 of workspace, 10 of slots, KV of 8 bytes a token in blocks of 4, a model of 64 positions.
    fn plan(kv_cache_bytes: u64, max_model_len: Option<u32>, memory_bytes: Option<u64>) -> String {
        let needs = Needs {
            weight_bytes: 1000,
            workspace_bytes: 100,
            slot_bytes: 10,
            block_bytes: 32,
            kv_cache_bytes,
            kv_setting: "kv_cache_bytes",
            block_size: 4,
            max_model_len,
            context: 64,
            memory_bytes: memory_bytes.map(|bytes| (bytes, "memory_bytes allows")),
        };
        match MemoryPlan::new(&needs) {
            Ok(plan) => {
                format!("{} blocks, {} bytes, {} tokens", plan.num_blocks, plan.total_bytes(), plan.max_model_len)
            }
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn the_kv_cache_decides_how_long_a_sequence_may_be() {
        assert_eq!(plan(4096, None, None), "128 blocks, 5206 bytes, 64 tokens");
        assert_eq!(plan(100, None, None), "3 blocks, 1206 bytes, 12 tokens", "rounded down to whole blocks");
        assert_eq!(plan(4096, Some(32), None), "128 blocks, 5206 bytes, 32 tokens");
    }

    #[test]
    fn too_little_memory_names_every_part_and_what_shrinks_it() {
        let parts = "weights 1000, shrunk by quant_type, workspace 100, shrunk by max_num_batched_tokens, \
                     slots 10, shrunk by max_num_seqs";
        assert_eq!(
            plan(100, Some(60), None),
            format!(
                "a sequence of 60 tokens wants 480 bytes of KV cache, kv_cache_bytes gives 100: raise it or lower max_model_len \
                 ({parts}, kv cache 96, shrunk by kv_cache_bytes)"
            )
        );
        assert_eq!(
            plan(4096, None, Some(2000)),
            format!(
                "the model wants 5206 bytes, memory_bytes allows 2000 ({parts}, kv cache 4096, shrunk by kv_cache_bytes)"
            )
        );
        assert!(plan(31, None, None).starts_with("a sequence of 2 tokens wants 32 bytes of KV cache"));
        assert_eq!(plan(4096, Some(65), None), "max_model_len is 65, must be 1 to 64, the model's context");
    }
}

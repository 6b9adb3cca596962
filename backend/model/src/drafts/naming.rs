//! What the tensors of an MTP module are called.
//!
//! | part          | as DeepSeek publishes it, in the base or apart | as PaddleNLP converts it        |
//! |---------------|------------------------------------------------|---------------------------------|
//! | norms, input  | `AT.{enorm,hnorm,eh_proj}`                     | `AT.{enorm,hnorm,eh_proj}`      |
//! | decoder layer | `AT.{input_layernorm,self_attn,...}`           | `AT.layers.0.{...}`             |
//! | last norm     | `AT.shared_head.norm`                          | `AT.norm`                       |
//! | embedding     | `AT.embed_tokens`, or the base's               | `AT.embed_tokens`               |
//! | head          | `AT.shared_head.head`, or the base's           | `lm_head`                       |
//!
//! `AT` is `model.layers.N` with N the number of the base's layers, or `deepseek_v3_mtp`; whatever stands before `eh_proj` is taken.
//! PaddleNLP's linear layers are stored `[in, out]`, which the shape of `eh_proj` tells.

use std::path::Path;

use crate::error::{ModelError, Result};
use crate::weights::Checkpoint;

/// Places in the checkpoint, without the `.weight` at their ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// Where `enorm`, `hnorm` and `eh_proj` are.
    pub module: String,
    pub layer: String,
    pub norm: String,
    pub embedding: String,
    pub head: String,
}

/// Draft token to token of the base, as EAGLE-3 stores it: the difference of the two.
pub(super) const DRAFT_TOKENS: &str = "d2t";

const INPUT: &str = ".eh_proj.weight";

impl Names {
    /// Those of the checkpoint in `dir`; of several modules those of the first.
    ///
    /// # Errors
    /// `NoMtp` if there is none.
    pub fn of(checkpoint: &Checkpoint, dir: &Path) -> Result<Self> {
        let module = checkpoint.names().find_map(|name| name.strip_suffix(INPUT));
        let Some(module) = module.map(str::to_owned) else { return Err(ModelError::NoMtp { dir: dir.to_owned() }) };
        let layer = format!("{module}.layers.0");
        let embedding = format!("{module}.embed_tokens");
        if checkpoint.contains(&format!("{layer}.input_layernorm.weight")) {
            return Ok(Names { norm: format!("{module}.norm"), head: "lm_head".into(), module, layer, embedding });
        }
        Ok(Names {
            layer: module.clone(),
            norm: format!("{module}.shared_head.norm"),
            head: format!("{module}.shared_head.head"),
            module,
            embedding,
        })
    }

    /// Where the module is among a base's layers, with a dot at its end; what is beside it may be the base's.
    pub fn in_base(&self) -> Option<String> {
        self.module.starts_with("model.layers.").then(|| format!("{}.", self.module))
    }

    /// Turns linear layers that are stored `[in, out]` around. `hidden` is the width of hidden states.
    ///
    /// # Errors
    /// `Read`.
    pub fn turn(&self, checkpoint: &mut Checkpoint, hidden: usize) -> Result<()> {
        let input = format!("{}{INPUT}", self.module);
        if checkpoint.shape_of(&input) != Some(&[2 * hidden, hidden]) {
            return Ok(());
        }
        // All matrices of its layer: projections, experts, their router.
        let parts = ["self_attn.", "mlp."].map(|part| format!("{}.{part}", self.layer));
        let is_matrix = |name: &&str| {
            let is_of_layer = parts.iter().any(|part| name.starts_with(part)) && name.ends_with(".weight");
            is_of_layer && checkpoint.shape_of(name).is_some_and(|shape| shape.len() == 2)
        };
        let of_layer: Vec<String> = checkpoint.names().filter(is_matrix).map(str::to_owned).collect();
        for name in of_layer.into_iter().chain([input, format!("{}.weight", self.head)]) {
            if checkpoint.contains(&name) {
                checkpoint.transpose(&name)?;
            }
        }
        Ok(())
    }
}

//! What the tensors of a drafter are called.
//!
//! | part          | MTP as DeepSeek publishes it, in the base or apart | MTP as PaddleNLP converts it | EAGLE                     |
//! |---------------|----------------------------------------------------|------------------------------|---------------------------|
//! | input         | `AT.eh_proj`                                       | `AT.eh_proj`                 | `AT.fc`                   |
//! | decoder layer | `AT.{input_layernorm,self_attn,...}`               | `AT.layers.0.{...}`          | `AT.layers.0`, `midlayer` |
//! | last norm     | `AT.shared_head.norm`                              | `AT.norm`                    | EAGLE-3: `AT.norm`        |
//! | embedding     | `AT.embed_tokens`, or the base's                   | `AT.embed_tokens`            | `AT.embed_tokens`, or the base's |
//! | head          | `AT.shared_head.head`, or the base's               | `lm_head`                    | `lm_head`, or the base's  |
//!
//! `AT` is whatever stands before the input: `model.layers.N` with N the number of the base's layers, `deepseek_v3_mtp`, `model`, `llama`, or
//! nothing. PaddleNLP's linear layers are stored `[in, out]`, which the shape of the input tells.

use crate::error::Result;
use crate::weights::Checkpoint;

/// Places in the checkpoint, without the `.weight` at their ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// Where what stands alone is.
    pub module: String,
    /// What hidden states enter by.
    pub input: String,
    pub layer: String,
    pub norm: String,
    pub embedding: String,
    pub head: String,
    /// Draft token to token of the base, as EAGLE-3 stores it: the difference of the two.
    pub draft_tokens: String,
    /// Whether a token of the base has a draft token; nothing is made of it.
    pub has_draft: String,
}

impl Names {
    /// Those of a module at `module`, whose parts but for `layer` are where most checkpoints have them.
    pub fn at(checkpoint: &Checkpoint, module: &str, input: &str, layer: &str) -> Self {
        let place = |name: &str, end: &str| {
            let places = [below(module, name), name.to_owned(), below("model", name)];
            let found = places.iter().find(|place| checkpoint.contains(&format!("{place}{end}")));
            found.unwrap_or(&places[0]).clone()
        };
        Names {
            module: module.to_owned(),
            input: below(module, input),
            layer: below(module, layer),
            norm: place("norm", ".weight"),
            embedding: place("embed_tokens", ".weight"),
            head: place("lm_head", ".weight"),
            draft_tokens: place("d2t", ""),
            has_draft: place("t2d", ""),
        }
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
        let input = format!("{}.weight", self.input);
        let is_turned = |shape: &[usize]| matches!(*shape, [rows, cols] if cols == hidden && rows > hidden);
        if !checkpoint.shape_of(&input).is_some_and(is_turned) {
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

/// Where the module stands whose input is called `input`; of several the first, and one of the fewest parts.
pub(super) fn module_of<'a>(checkpoint: &'a Checkpoint, input: &str) -> Option<&'a str> {
    let weight = format!("{input}.weight");
    let module = |name: &'a str| match name.strip_suffix(&weight)? {
        "" => Some(""),
        at => at.strip_suffix('.'),
    };
    checkpoint.names().filter_map(module).min_by_key(|at| at.matches('.').count())
}

/// `name` in `module`, which may be the checkpoint itself.
pub(super) fn below(module: &str, name: &str) -> String {
    match (module, name) {
        ("", name) => name.to_owned(),
        (module, "") => module.to_owned(),
        (module, name) => format!("{module}.{name}"),
    }
}

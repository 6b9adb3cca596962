//! EAGLE-3: one decoder layer over a token and what three layers of the base made of the one before, with a head of its own.
//!
//! Source: Li et al. 2025, arXiv:2503.01840; where the paper is silent, what published heads do. The base's hidden states, as they enter the
//! layers 2, L / 2 and L - 3 of L or those that the config names, are put side by side and turned into one, g[i]. Token t[i+1] and g[i] stand
//! at position i + 1; each is normalised, the attention sees both, and g[i] alone is what the layer adds to. Its output, before the last
//! norm, takes the place of g where the base has not been yet. The head knows some tokens only.

use drafthorse_kernels::Tensor;
use drafthorse_kernels::ops::copy_rows::copy;

use super::head_layer::HeadLayer;
use super::kind::{Base, Kind, Shared, given};
use super::names::{self, Names, below};
use crate::config::ModelConfig;
use crate::error::{ModelError, Result};
use crate::forward::Forward;
use crate::kv_cache::KvLayer;
use crate::layers::{Embedding, Linear, LmHead, RmsNorm};
use crate::models::{Model, StepSize, tensor_bytes};
use crate::quant::Part;
use crate::weights::{Checkpoint, Loader, Shard};

pub(super) const KIND: Kind = Kind {
    method: "eagle",
    title: "an EAGLE-3 head",
    sign: "fc.weight and midlayer.hidden_norm.weight",
    names: names_in,
    taps,
    load: |root, names, shared| Ok(Box::new(Eagle3::load(root, names, shared)?)),
    outlasts_training: true,
};

struct Eagle3 {
    embedding: Embedding,
    token_norm: RmsNorm,
    /// `[hidden, parts * hidden]`.
    input: Linear,
    hidden_norm: RmsNorm,
    /// The layer adds to the normalised g instead of g.
    norm_before_residual: bool,
    layer: HeadLayer,
    norm: RmsNorm,
    lm_head: LmHead,
    hidden_size: usize,
    /// Hidden states of the base that it reads of each token.
    num_parts: usize,
    element_bytes: usize,
}

fn names_in(checkpoint: &Checkpoint) -> Option<Names> {
    let module = names::module_of(checkpoint, "fc")?;
    let midlayer = below(module, "midlayer.");
    let layer = match () {
        () if checkpoint.names().any(|name| name.starts_with(&midlayer)) => "midlayer",
        () if checkpoint.contains(&below(module, "layers.0.hidden_norm.weight")) => "layers.0",
        () => return None,
    };
    Some(Names::at(checkpoint, module, "fc", layer))
}

/// What later kinds of heads add, which would make other drafts of the same tensors.
const NOT_SUPPORTED: [&str; 4] = ["norm_before_fc", "fc_norm", "norm_output", "parallel_drafting"];

/// # Errors
/// `Unsupported` unless the head is of one layer.
pub(super) fn one_layer(config: &ModelConfig) -> Result<()> {
    match config.num_layers {
        1 => Ok(()),
        more => Err(refused("num_hidden_layers", &more, "1 in an EAGLE head")),
    }
}

/// The layers whose inputs are read. A config may name them in two ways: on its own the inputs of layers, and in `eagle_config` layers whose
/// outputs, so the inputs of those after them. Whatever their order there, they are read from the first to the last.
fn taps(config: &ModelConfig, base: Base<'_>) -> Result<Vec<usize>> {
    const KEY: &str = "eagle_aux_hidden_state_layer_ids";
    one_layer(config)?;
    let (keys, eagle) = (&config.keys, config.keys.table("eagle_config"));
    for key in NOT_SUPPORTED {
        for keys in [keys, &eagle] {
            if keys.flag(key)? == Some(true) {
                return Err(refused(key, &true, "false"));
            }
        }
    }
    if eagle.flag("use_aux_hidden_state")? == Some(false) {
        return Err(refused(
            "eagle_config.use_aux_hidden_state",
            &false,
            "true in a head with a norm over hidden states",
        ));
    }
    let layers = base.config.num_layers;
    let outputs = eagle.indices(KEY)?.into_iter().map(|layer| layer.saturating_add(1));
    let named = [outputs.collect(), keys.indices(KEY)?].into_iter().find(|named: &Vec<usize>| !named.is_empty());
    let mut taps = match named {
        Some(named) => named,
        None if layers < 7 => {
            let supported = format!("layers to read: a base of {layers} has not the usual ones");
            return Err(refused(KEY, &"missing", &supported));
        }
        None => vec![2, layers / 2, layers - 3],
    };
    taps.sort_unstable();
    let is_twice = taps.windows(2).any(|pair| pair[0] == pair[1]);
    if is_twice || taps.len() < 2 || taps.last().is_some_and(|&last| last > layers) {
        let of_each: Vec<String> = taps.iter().map(usize::to_string).collect();
        let supported = format!("two and more, each once, inputs of layers up to {layers}: the base has so many");
        return Err(refused(KEY, &format!("inputs of {}", of_each.join(", ")), &supported));
    }
    Ok(taps)
}

fn refused(key: &str, value: &dyn std::fmt::Display, supported: &str) -> ModelError {
    ModelError::Unsupported { key: key.to_owned(), value: value.to_string(), supported: supported.to_owned() }
}

impl Eagle3 {
    fn load(root: &Loader<'_>, names: &Names, shared: &Shared<'_>) -> Result<Self> {
        let (hidden, ends, layer) = (root.config().hidden_size, shared.ends, root.at(&names.layer));
        let input = root.at(&names.input);
        let has_bias = input.contains("bias");
        let part = Part { at: input, out_features: hidden, shard: Shard::Replicated };
        Ok(Eagle3 {
            embedding: Embedding::load_or_share(root.at(&names.embedding), ends.map(|ends| &ends.table))?,
            token_norm: RmsNorm::load(&layer.at("input_layernorm"))?,
            input: Linear::column(&[part], shared.num_parts * hidden, has_bias)?,
            hidden_norm: RmsNorm::load(&layer.at("hidden_norm"))?,
            norm_before_residual: root.config().keys.flag("norm_before_residual")?.unwrap_or(false),
            layer: HeadLayer::load(&layer, 2 * hidden)?,
            norm: RmsNorm::load(&root.at(&names.norm))?,
            lm_head: LmHead::load_or_share(root.at(&names.head), shared.num_tokens, ends.map(|ends| &ends.head))?,
            hidden_size: hidden,
            num_parts: shared.num_parts,
            element_bytes: root.dtype().bytes(),
        })
    }
}

impl Model for Eagle3 {
    fn forward(&self, cx: &mut Forward<'_>) -> Result<Tensor> {
        let given = given(cx)?;
        // `out` first: it outlives the call.
        let mut out = self.embedding.output(cx)?;
        let mut x = self.embedding.output(cx)?;
        match given.rows_cols().1 {
            width if width == self.num_parts * self.hidden_size => self.input.forward(given, &mut out, cx)?,
            _ => copy(given, &mut out)?,
        }
        let mut pairs = cx.take([cx.batch.num_tokens(), 2 * self.hidden_size], x.dtype())?;
        self.embedding.forward(&mut x, cx)?;
        self.token_norm.pair(&x, &self.hidden_norm, &out, &mut pairs)?;
        if self.norm_before_residual {
            self.hidden_norm.forward(&out, &mut x)?;
            copy(&x, &mut out)?;
        }
        self.layer.attend(&pairs, &mut x, cx)?;
        drop(pairs);
        self.layer.finish(&mut x, &mut out, cx)?;
        Ok(out)
    }

    fn logits(&self, hidden: &Tensor, cx: &mut Forward<'_>) -> Result<Tensor> {
        let mut normed = cx.take(hidden.shape(), hidden.dtype())?;
        self.norm.forward(hidden, &mut normed)?;
        self.lm_head.forward(&normed, cx)
    }

    fn kv_layers(&self) -> Vec<KvLayer> {
        vec![self.layer.kv_layer()]
    }

    fn workspace_bytes(&self, step: StepSize) -> usize {
        let rows = |rows, width| tensor_bytes(rows * width, self.element_bytes);
        let hidden = rows(step.tokens, self.hidden_size);
        let pairs = rows(step.tokens, 2 * self.hidden_size);
        let layer = pairs + self.layer.workspace_bytes(step, self.element_bytes);
        // Those that are wanted, and normalised.
        let head = 2 * rows(step.logit_rows, self.hidden_size) + self.lm_head.workspace_bytes(step.logit_rows);
        hidden + head.max(hidden + layer.max(self.input.workspace_bytes(step.tokens)))
    }
}

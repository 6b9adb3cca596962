//! A multi-token-prediction module: one decoder layer over a token's embedding and the hidden state before it.
//!
//! Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 2.2, with a layer of their kind or, in its place, a Llama's.
//! Token t[i+1] and hidden state h[i] stand at position i + 1 and give the logits of t[i+2]; position 0 has no pair and no KV.
//! The module's own output takes the place of h where the target has not been yet, so that one module drafts several tokens.

use drafthorse_kernels::Tensor;

use super::kind::{Kind, Shared, given};
use super::names::{self, Names, below};
use crate::error::Result;
use crate::forward::Forward;
use crate::kv_cache::KvLayer;
use crate::layers::{Embedding, Linear, LmHead, RmsNorm};
use crate::models::{DecoderLayer, Model, StepSize, draft_layer, tensor_bytes};
use crate::quant::Part;
use crate::weights::{Checkpoint, Loader, Shard};

pub(super) const KIND: Kind = Kind {
    method: "mtp",
    title: "an MTP module",
    sign: "NAME.eh_proj.weight",
    names: names_in,
    taps: |_, _| Ok(Vec::new()),
    load: |root, names, shared| Ok(Box::new(Mtp::load(root, names, shared)?)),
    outlasts_training: false,
};

struct Mtp {
    embedding: Embedding,
    embedding_norm: RmsNorm,
    hidden_norm: RmsNorm,
    /// `[hidden, 2 * hidden]`; the embedding's half comes first.
    input: Linear,
    layer: DecoderLayer,
    norm: RmsNorm,
    lm_head: LmHead,
    hidden_size: usize,
    element_bytes: usize,
}

/// Of several modules those of the first.
fn names_in(checkpoint: &Checkpoint) -> Option<Names> {
    let module = names::module_of(checkpoint, "eh_proj")?;
    if checkpoint.contains(&below(module, "layers.0.input_layernorm.weight")) {
        return Some(Names::at(checkpoint, module, "eh_proj", "layers.0"));
    }
    let [norm, head] = ["shared_head.norm", "shared_head.head"].map(|name| below(module, name));
    Some(Names { norm, head, embedding: below(module, "embed_tokens"), ..Names::at(checkpoint, module, "eh_proj", "") })
}

impl Mtp {
    fn load(root: &Loader<'_>, names: &Names, shared: &Shared<'_>) -> Result<Self> {
        let config = root.config();
        let hidden = config.hidden_size;
        let (module, ends) = (root.at(&names.module), shared.ends);
        let part = Part { at: root.at(&names.input), out_features: hidden, shard: Shard::Replicated };
        let mut layer = draft_layer(&root.at(&names.layer))?;
        layer.leave_out_first_key();
        Ok(Mtp {
            embedding: Embedding::load_or_share(root.at(&names.embedding), ends.map(|ends| &ends.table))?,
            embedding_norm: RmsNorm::load(&module.at("enorm"))?,
            hidden_norm: RmsNorm::load(&module.at("hnorm"))?,
            input: Linear::column(&[part], 2 * hidden, false)?,
            layer,
            norm: RmsNorm::load(&root.at(&names.norm))?,
            lm_head: LmHead::load_or_share(root.at(&names.head), shared.num_tokens, ends.map(|ends| &ends.head))?,
            hidden_size: hidden,
            element_bytes: root.dtype().bytes(),
        })
    }
}

impl Model for Mtp {
    fn forward(&self, cx: &mut Forward<'_>) -> Result<Tensor> {
        let num_tokens = cx.batch.num_tokens();
        let target_hidden = given(cx)?;

        // `x` first: it outlives the call.
        let mut x = self.embedding.output(cx)?;
        let mut residual = self.embedding.output(cx)?;
        {
            let mut pairs = cx.take([num_tokens, 2 * self.hidden_size], x.dtype())?;
            self.embedding.forward(&mut residual, cx)?;
            self.embedding_norm.pair(&residual, &self.hidden_norm, target_hidden, &mut pairs)?;
            self.input.forward(&pairs, &mut residual, cx)?;
        }
        self.layer.begin(&residual, &mut x)?;
        self.layer.forward(&mut x, &mut residual, cx)?;
        self.norm.add(&mut x, &mut residual)?;
        Ok(x)
    }

    fn logits(&self, hidden: &Tensor, cx: &mut Forward<'_>) -> Result<Tensor> {
        self.lm_head.forward(hidden, cx)
    }

    fn kv_layers(&self) -> Vec<KvLayer> {
        vec![self.layer.kv_layer()]
    }

    fn workspace_bytes(&self, step: StepSize) -> usize {
        let rows = |rows, width| tensor_bytes(rows * width, self.element_bytes);
        let hidden = rows(step.tokens, self.hidden_size);
        let input = rows(step.tokens, 2 * self.hidden_size) + self.input.workspace_bytes(step.tokens);
        let layer = self.layer.workspace_bytes(step, self.element_bytes);
        let head = rows(step.logit_rows, self.hidden_size) + self.lm_head.workspace_bytes(step.logit_rows);
        hidden + head.max(hidden + input.max(layer))
    }
}

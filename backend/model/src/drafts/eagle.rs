//! EAGLE-1 and -2: one decoder layer that guesses the base's next hidden state, which the base's own head turns into a token.
//!
//! Source: Li et al. 2024, arXiv:2401.15077, and for the same weights in a tree arXiv:2406.16858; here they draft a chain. The token t[i+1]
//! and the hidden state f[i] after the base's last norm stand at position i + 1. The layer has no norm before its attention, and none comes
//! after it: its output is a guess of f[i+1], and takes its place where the base has not been yet.

use drafthorse_kernels::Tensor;
use drafthorse_kernels::ops::concat::concat;

use super::head_layer::HeadLayer;
use super::kind::{Kind, Shared, given};
use super::names::{self, Names};
use crate::error::Result;
use crate::forward::Forward;
use crate::kv_cache::KvLayer;
use crate::layers::{Embedding, Linear, LmHead};
use crate::models::{Model, StepSize, tensor_bytes};
use crate::quant::Part;
use crate::weights::{Checkpoint, Loader, Shard};

pub(super) const KIND: Kind = Kind {
    method: "eagle",
    title: "an EAGLE head",
    sign: "fc.weight",
    names: names_in,
    taps: |config, _| super::eagle3::one_layer(config).map(|()| Vec::new()),
    load: |root, names, shared| Ok(Box::new(Eagle::load(root, names, shared)?)),
    outlasts_training: true,
};

struct Eagle {
    embedding: Embedding,
    /// `[hidden, 2 * hidden]`; the embedding's half comes first.
    input: Linear,
    layer: HeadLayer,
    lm_head: LmHead,
    hidden_size: usize,
    element_bytes: usize,
}

fn names_in(checkpoint: &Checkpoint) -> Option<Names> {
    let module = names::module_of(checkpoint, "fc")?;
    Some(Names::at(checkpoint, module, "fc", "layers.0"))
}

impl Eagle {
    fn load(root: &Loader<'_>, names: &Names, shared: &Shared<'_>) -> Result<Self> {
        let (hidden, ends) = (root.config().hidden_size, shared.ends);
        let input = root.at(&names.input);
        let has_bias = input.contains("bias");
        let part = Part { at: input, out_features: hidden, shard: Shard::Replicated };
        Ok(Eagle {
            embedding: Embedding::load_or_share(root.at(&names.embedding), ends.map(|ends| &ends.table))?,
            input: Linear::column(&[part], 2 * hidden, has_bias)?,
            layer: HeadLayer::load(&root.at(&names.layer), hidden)?,
            lm_head: LmHead::load_or_share(root.at(&names.head), shared.num_tokens, ends.map(|ends| &ends.head))?,
            hidden_size: hidden,
            element_bytes: root.dtype().bytes(),
        })
    }
}

impl Model for Eagle {
    fn forward(&self, cx: &mut Forward<'_>) -> Result<Tensor> {
        let features = given(cx)?;
        // `out` first: it outlives the call.
        let mut out = self.embedding.output(cx)?;
        let mut x = self.embedding.output(cx)?;
        {
            let mut pairs = cx.take([cx.batch.num_tokens(), 2 * self.hidden_size], x.dtype())?;
            self.embedding.forward(&mut x, cx)?;
            concat(&x, features, &mut pairs)?;
            self.input.forward(&pairs, &mut out, cx)?;
        }
        self.layer.attend(&out, &mut x, cx)?;
        self.layer.finish(&mut x, &mut out, cx)?;
        Ok(out)
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

//! The pre-norm decoder that all families share: embedding, layers of attention and MLP around a residual stream, norm, head.

use drafthorse_kernels::{DType, Tensor};

use super::model::{Ends, Model, StepSize, tensor_bytes};
use crate::error::Result;
use crate::forward::Forward;
use crate::kv_cache::KvLayer;
use crate::layers::{Embedding, FeedForward, LmHead, RmsNorm, SelfAttention, Spread, SpreadAttention, SpreadMlp};
use crate::weights::Loader;

/// A whole network of layers that a family makes.
pub(crate) struct Decoder {
    embed: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    lm_head: LmHead,
    hidden_size: usize,
    /// Bytes of one activation.
    element_bytes: usize,
}

/// One layer of it, which drafters have too.
pub(crate) struct DecoderLayer {
    input_norm: RmsNorm,
    attention: Box<dyn SelfAttention>,
    post_norm: RmsNorm,
    mlp: Box<dyn FeedForward>,
}

impl Decoder {
    /// Loads this rank's shard; `layer` makes layer `i` of what is at `model.layers.i`.
    pub(crate) fn load(
        loader: &Loader<'_>,
        layer: impl Fn(&Loader<'_>, usize) -> Result<DecoderLayer>,
    ) -> Result<Box<dyn Model>> {
        let config = loader.config();
        let model = loader.at("model");
        let layers = (0..config.num_layers).map(|i| layer(&model.at(&format!("layers.{i}")), i));
        let layers = layers.collect::<Result<_>>()?;
        let (embed, lm_head) = Embedding::load_with_head(model.at("embed_tokens"), loader.at("lm_head"))?;
        Ok(Box::new(Decoder {
            embed,
            layers,
            norm: RmsNorm::load(&model.at("norm"))?,
            lm_head,
            hidden_size: config.hidden_size,
            element_bytes: loader.dtype().bytes(),
        }))
    }
}

impl DecoderLayer {
    /// `attention` and `mlp` with the norms before them, which are at `at`.
    pub(crate) fn new(
        at: &Loader<'_>,
        attention: impl SelfAttention + 'static,
        mlp: Box<dyn FeedForward>,
    ) -> Result<Self> {
        Ok(DecoderLayer {
            input_norm: RmsNorm::load(&at.at("input_layernorm"))?,
            attention: Box::new(attention),
            post_norm: RmsNorm::load(&at.at("post_attention_layernorm"))?,
            mlp,
        })
    }

    /// No query sees the key at position 0 from now on: nothing is written there.
    pub(crate) fn leave_out_first_key(&mut self) {
        self.attention.leave_out_first_key();
    }

    /// `x` becomes what [`forward`](Self::forward) takes, if this is the first layer.
    pub(crate) fn begin(&self, residual: &Tensor, x: &mut Tensor) -> Result<()> {
        self.input_norm.forward(residual, x)
    }

    pub(crate) fn kv_layer(&self) -> KvLayer {
        self.attention.kv_layer()
    }

    /// Scratch memory that [`forward`](Self::forward) takes.
    pub(crate) fn workspace_bytes(&self, step: StepSize, element_bytes: usize) -> usize {
        let attention = self.attention.workspace_bytes(step, element_bytes);
        attention.max(self.mlp.workspace_bytes(step.tokens, element_bytes))
    }

    /// `x` goes in normalised and comes out as what the next norm adds; `residual` gathers all layers.
    pub(crate) fn forward(&self, x: &mut Tensor, residual: &mut Tensor, cx: &mut Forward<'_>) -> Result<()> {
        self.attention.forward(x, cx)?;
        self.post_norm.add(x, residual)?;
        self.mlp.forward(x, cx)
    }

    fn spread_norm(&self, tokens: usize) -> Option<SpreadLayer<'_>> {
        Some(SpreadLayer {
            attention: self.attention.spread_norm(tokens)?,
            post_norm: &self.post_norm,
            mlp: self.mlp.spread_norm(tokens)?,
        })
    }
}

/// A layer whose norms are spread over the products around them.
struct SpreadLayer<'a> {
    attention: SpreadAttention<'a>,
    post_norm: &'a RmsNorm,
    mlp: SpreadMlp<'a>,
}

impl SpreadLayer<'_> {
    /// [`DecoderLayer::forward`] so; `next` is the norm of the layer after.
    fn forward(
        &self,
        x: &mut Tensor,
        spread: &mut Spread<'_>,
        next: Option<&RmsNorm>,
        cx: &mut Forward<'_>,
    ) -> Result<()> {
        self.attention.forward(x, spread, self.post_norm, cx)?;
        self.mlp.forward(x, spread, next, cx)
    }
}

impl Model for Decoder {
    fn forward(&self, cx: &mut Forward<'_>) -> Result<Tensor> {
        // In this order, since `x` is what outlives the call: memory is given back from the top.
        let mut x = self.embed.output(cx)?;
        let mut residual = self.embed.output(cx)?;
        self.embed.forward(&mut residual, cx)?;
        let (tokens, _) = x.rows_cols();
        let spread_layers: Option<Vec<_>> = self.layers.iter().map(|layer| layer.spread_norm(tokens)).collect();
        let Some(spread_layers) = spread_layers else {
            for (i, layer) in self.layers.iter().enumerate() {
                match i {
                    0 => layer.begin(&residual, &mut x)?,
                    _ => layer.input_norm.add(&mut x, &mut residual)?,
                }
                cx.tap(i, &residual)?;
                layer.forward(&mut x, &mut residual, cx)?;
            }
            self.norm.add(&mut x, &mut residual)?;
            cx.tap(self.layers.len(), &residual)?;
            return Ok(x);
        };
        let squares = cx.take([tokens, self.hidden_size / 16], DType::F32)?;
        let mut spread = Spread { residual: &mut residual, squares, eps: None };
        for (i, (layer, spread_layer)) in self.layers.iter().zip(spread_layers).enumerate() {
            if i == 0 {
                layer.input_norm.forward(spread.residual, &mut x)?;
            }
            cx.tap(i, spread.residual)?;
            let next = self.layers.get(i + 1).map(|layer| &layer.input_norm);
            spread_layer.forward(&mut x, &mut spread, next, cx)?;
        }
        drop(spread);
        self.norm.add(&mut x, &mut residual)?;
        cx.tap(self.layers.len(), &residual)?;
        Ok(x)
    }

    fn logits(&self, hidden: &Tensor, cx: &mut Forward<'_>) -> Result<Tensor> {
        self.lm_head.forward(hidden, cx)
    }

    fn kv_layers(&self) -> Vec<KvLayer> {
        self.layers.iter().map(DecoderLayer::kv_layer).collect()
    }

    fn workspace_bytes(&self, step: StepSize) -> usize {
        let hidden = |rows| tensor_bytes(rows * self.hidden_size, self.element_bytes);
        let of_layer = |layer: &DecoderLayer| layer.workspace_bytes(step, self.element_bytes);
        let layers = self.layers.iter().map(of_layer).max().unwrap_or(0);
        let head = hidden(step.logit_rows) + self.lm_head.workspace_bytes(step.logit_rows);
        // The squares of spread norms, in f32.
        let squares = tensor_bytes(step.tokens * self.hidden_size / 16, 4);
        hidden(step.tokens) + head.max(hidden(step.tokens) + squares + layers)
    }

    fn ends(&self) -> Option<Ends> {
        Some(Ends { table: self.embed.weight(), head: self.lm_head.weight() })
    }
}

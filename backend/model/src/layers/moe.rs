//! A mixture of experts in place of the MLP: each token goes through a few of many, and through those that are shared.
//!
//! Source: Jiang et al. 2024, arXiv:2401.04088 (Mixtral); Dai et al. 2024, arXiv:2401.06066 (shared experts). The steps are those of
//! [`drafthorse_kernels::ops::moe`]. Ranks have an equal part of every expert's width, and sum once at the end.

use drafthorse_kernels::ops::moe::{Groups, MAX_EXPERTS, Router, Rows, Shared, TopGroups, assign, combine};
use drafthorse_kernels::ops::silu_mul::silu_mul;
use drafthorse_kernels::{DType, Tensor};

use super::linear::load_weight;
use super::mlp::{FeedForward, GatedMlp};
use crate::error::{ModelError, Result};
use crate::forward::Forward;
use crate::models::tensor_bytes;
use crate::quant::{Activation, Part, QuantWeight};
use crate::weights::{Loader, Shard};

/// What families differ in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Experts {
    pub(crate) router: Router,
    /// The router has a `gate.e_score_correction_bias`, which chooses but does not count.
    pub(crate) has_correction_bias: bool,
    /// Width of one expert between its projections.
    pub(crate) intermediate: usize,
    /// What the projections gate, up and down of an expert are called.
    pub(crate) projections: [&'static str; 3],
    pub(crate) shared: Option<SharedExpert>,
}

impl Experts {
    /// The names of all families but Mixtral.
    pub(crate) const PROJECTIONS: [&'static str; 3] = ["gate_proj", "up_proj", "down_proj"];

    /// # Errors
    /// `Unsupported`, naming the key, if the router's numbers do not go together.
    fn check(&self) -> Result<()> {
        let refuse = |key: &str, value: usize, supported: String| {
            Err(ModelError::Unsupported { key: key.to_owned(), value: value.to_string(), supported })
        };
        let Router { num_experts, top_k, groups, .. } = self.router;
        let mut choice = num_experts;
        if let Some(TopGroups { num_groups, top_k, .. }) = groups {
            if !num_experts.is_multiple_of(num_groups) {
                return refuse(
                    "n_group",
                    num_groups,
                    format!("a divisor of the number of experts, which is {num_experts}"),
                );
            }
            if top_k > num_groups {
                return refuse("topk_group", top_k, format!("1 up to n_group, which is {num_groups}"));
            }
            choice = num_experts / num_groups * top_k;
        }
        if top_k > choice {
            let supported = format!("1 up to the experts that can be chosen, which are {choice}");
            return refuse("num_experts_per_tok", top_k, supported);
        }
        if num_experts > MAX_EXPERTS {
            return refuse("the number of experts", num_experts, format!("1 up to {MAX_EXPERTS}"));
        }
        Ok(self.router.check()?)
    }
}

/// An MLP that all tokens go through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedExpert {
    /// Where it is, below the layer's `mlp`.
    pub(crate) name: &'static str,
    pub(crate) intermediate: usize,
    /// What decides how much it counts, by a sigmoid; without, it counts as it is.
    pub(crate) gate: Option<&'static str>,
}

/// One layer's experts on one rank.
pub(crate) struct SparseMlp {
    router: Router,
    /// `[experts, hidden]`.
    gate: Box<dyn QuantWeight>,
    /// `[experts]` f32.
    correction_bias: Option<Tensor>,
    /// `[experts * 2 * intermediate, hidden]`: each expert's gate above its up.
    gate_up: Box<dyn QuantWeight>,
    /// `[experts * hidden, intermediate]`.
    down: Box<dyn QuantWeight>,
    shared: Option<SharedMlp>,
    /// Width of an expert on this rank.
    intermediate: usize,
    hidden: usize,
    sums_over_ranks: bool,
}

struct SharedMlp {
    mlp: GatedMlp,
    /// `[1, hidden]`.
    gate: Option<Box<dyn QuantWeight>>,
}

impl SparseMlp {
    /// Loads this rank's shard of the experts at `at`.
    pub(crate) fn load(at: &Loader<'_>, experts: &Experts) -> Result<Self> {
        let Experts { router, intermediate, projections: [gate, up, down], .. } = *experts;
        experts.check()?;
        let (hidden, world) = (at.config().hidden_size, at.place().world);
        let schemes = at.context().schemes;
        let of_experts = |projections: &[&str], out_features, shard| -> Vec<Part<'_>> {
            let names = (0..router.num_experts).flat_map(|i| projections.iter().map(move |name| (i, name)));
            names.map(|(i, name)| Part { at: at.at(&format!("experts.{i}.{name}")), out_features, shard }).collect()
        };
        let gate_up = of_experts(&[gate, up], intermediate, Shard::Out);
        let down = of_experts(&[down], hidden, Shard::In);
        let unsplit = |name, out_features| {
            let part = Part { at: at.at(name), out_features, shard: Shard::Replicated };
            load_weight(&*schemes.router, &[part], hidden)
        };
        let shared = experts.shared.map(|shared| -> Result<SharedMlp> {
            let mlp = GatedMlp::load_partial(&at.at(shared.name), shared.intermediate)?;
            Ok(SharedMlp { mlp, gate: shared.gate.map(|gate| unsplit(gate, 1)).transpose()? })
        });
        let correction_bias = match experts.has_correction_bias {
            true => Some(at.at("gate").vector("e_score_correction_bias", router.num_experts, Shard::Replicated)?),
            false => None,
        };
        Ok(SparseMlp {
            router,
            gate: unsplit("gate", router.num_experts)?,
            correction_bias,
            gate_up: load_weight(&*schemes.linear, &gate_up, hidden)?,
            down: load_weight(&*schemes.linear, &down, intermediate)?,
            shared: shared.transpose()?,
            intermediate: intermediate / world,
            hidden,
            sums_over_ranks: world > 1,
        })
    }

    /// Each token's experts and what they count.
    fn assign(&self, x: &Tensor, weights: &mut Tensor, groups: &mut Groups, cx: &Forward<'_>) -> Result<()> {
        let (tokens, Router { num_experts, top_k, .. }) = (x.rows_cols().0, self.router);
        let mut ids = cx.take([tokens, top_k], DType::I32)?;
        let mut logits = cx.take([tokens, num_experts], DType::F32)?;
        self.gate.matmul(&Activation::from(x), &mut logits, cx.workspace)?;
        Ok(assign(&mut logits, self.correction_bias.as_ref(), &self.router, &mut ids, weights, groups)?)
    }

    /// `silu(gate(x)) * up(x)` of each pair's expert.
    fn gate(&self, x: &Tensor, groups: &Groups, cx: &Forward<'_>) -> Result<Tensor> {
        let pairs = groups.num_pairs();
        // First: it outlives the call.
        let mut gated = cx.take([pairs, self.intermediate], x.dtype())?;
        if !self.gate_up.gated_experts(&Activation::from(x), Rows::OfTokens, groups, &mut gated)? {
            let mut gate_up = cx.take([pairs, 2 * self.intermediate], x.dtype())?;
            self.gate_up.matmul_experts(&Activation::from(x), Rows::OfTokens, groups, &mut gate_up, cx.workspace)?;
            silu_mul(&gate_up, &mut gated)?;
        }
        Ok(gated)
    }
}

impl FeedForward for SparseMlp {
    fn forward(&self, x: &mut Tensor, cx: &Forward<'_>) -> Result<()> {
        let (tokens, _) = x.rows_cols();
        let Router { num_experts, top_k, .. } = self.router;
        let mut weights = cx.take([tokens, top_k], DType::F32)?;
        let mut groups = Groups::take(cx.workspace, tokens, top_k, num_experts)?;
        self.assign(x, &mut weights, &mut groups, cx)?;

        let gated = self.gate(x, &groups, cx)?;
        let mut out = cx.take([groups.num_pairs(), self.hidden], x.dtype())?;
        self.down.matmul_experts(&Activation::from(&gated), Rows::OfPairs, &groups, &mut out, cx.workspace)?;

        match &self.shared {
            None => combine(&out, &groups, &weights, None, x)?,
            Some(shared) => {
                let mut y = cx.take([tokens, self.hidden], x.dtype())?;
                shared.mlp.forward_to(x, &mut y, cx)?;
                let mut counts = cx.take([tokens, 1], DType::F32)?;
                if let Some(gate) = &shared.gate {
                    gate.matmul(&Activation::from(&*x), &mut counts, cx.workspace)?;
                }
                let gate = shared.gate.as_ref().map(|_| &counts);
                combine(&out, &groups, &weights, Some(Shared { x: &y, gate }), x)?;
            }
        }
        if self.sums_over_ranks {
            cx.comm.all_reduce(x)?;
        }
        Ok(())
    }

    fn workspace_bytes(&self, tokens: usize, element_bytes: usize) -> usize {
        let Router { num_experts, top_k, .. } = self.router;
        let pairs = tokens * top_k;
        let choices = tensor_bytes(pairs, DType::F32.bytes());
        let logits = tensor_bytes(tokens * num_experts, DType::F32.bytes()) + self.gate.workspace_bytes(tokens);
        let width = |rows: usize, width| tensor_bytes(rows * width, element_bytes);
        let gate_up = width(pairs, 2 * self.intermediate) + self.gate_up.experts_workspace_bytes(pairs, num_experts);
        let out = width(pairs, self.hidden);
        let down = out + self.down.experts_workspace_bytes(pairs, num_experts);
        let shared = self.shared.as_ref().map_or(0, |shared| {
            let gate = shared.gate.as_ref().map_or(0, |gate| gate.workspace_bytes(tokens));
            let counts = tensor_bytes(tokens, DType::F32.bytes());
            let mlp = shared.mlp.workspace_bytes(tokens, element_bytes);
            out + width(tokens, self.hidden) + mlp.max(counts + gate)
        });
        let experts = width(pairs, self.intermediate) + gate_up.max(down).max(shared);
        choices + Groups::bytes(tokens, top_k, num_experts) + experts.max(choices + logits)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use drafthorse_kernels::ops::moe::{GroupScore, Scoring};
    use drafthorse_kernels::{Device, Solo, Workspace};

    use super::*;
    use crate::quant::{ActivationFormat, schemes};
    use crate::weights::{Checkpoint, LoadContext};
    use crate::{Batch, BatchLimits, KvCache, KvLayout, ModelConfig};

    const HIDDEN: usize = 64;
    const EXPERTS: usize = 16;
    const TOP_K: usize = 3;

    /// A weight that counts the bytes that products read of it; that no product reads more is a test of the kernels'.
    struct Counted {
        weight: Box<dyn QuantWeight>,
        read: Arc<AtomicUsize>,
    }

    impl QuantWeight for Counted {
        fn activation(&self) -> ActivationFormat {
            self.weight.activation()
        }

        fn matmul(&self, x: &Activation<'_>, y: &mut Tensor, workspace: &Workspace) -> Result<()> {
            self.read.fetch_add(self.size_bytes(), Ordering::Relaxed);
            self.weight.matmul(x, y, workspace)
        }

        fn matmul_experts(
            &self,
            x: &Activation<'_>,
            rows: Rows,
            groups: &Groups,
            y: &mut Tensor,
            workspace: &Workspace,
        ) -> Result<()> {
            let offsets = groups.offsets.to_vec::<i32>()?;
            let chosen = offsets.windows(2).filter(|ends| ends[0] < ends[1]).count();
            self.read.fetch_add(self.size_bytes() / groups.num_experts() * chosen, Ordering::Relaxed);
            self.weight.matmul_experts(x, rows, groups, y, workspace)
        }

        fn gather(&self, ids: &Tensor, y: &mut Tensor) -> Result<()> {
            self.weight.gather(ids, y)
        }

        fn dequantize(&self) -> Result<Tensor> {
            self.weight.dequantize()
        }

        fn dims(&self) -> [usize; 2] {
            self.weight.dims()
        }

        fn size_bytes(&self) -> usize {
            self.weight.size_bytes()
        }

        fn workspace_bytes(&self, tokens: usize) -> usize {
            self.weight.workspace_bytes(tokens)
        }

        fn experts_workspace_bytes(&self, pairs: usize, num_experts: usize) -> usize {
            self.weight.experts_workspace_bytes(pairs, num_experts)
        }
    }

    /// Bytes of weights that a step of `tokens` reads, and those of the router, of one expert, of what is shared.
    fn bytes(quant: &str, tokens: usize) -> (usize, [usize; 3]) {
        let config = r#"{"architectures": ["X"], "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 4}"#;
        let config = ModelConfig::parse(config, "config.json".into()).unwrap();
        let (checkpoint, schemes) = (Checkpoint::random(), schemes(Some(&quant.into()), None).unwrap());
        let context = LoadContext::new(&checkpoint, &config, &schemes, &Device::Cpu, DType::F32);
        let (num_experts, top_k, scoring) = (EXPERTS, TOP_K, Scoring::Softmax);
        let router = Router { num_experts, top_k, scoring, groups: None, normalize: true, scale: 1.0 };
        let shared = SharedExpert { name: "shared", intermediate: 96, gate: Some("shared_gate") };
        let (projections, has_correction_bias) = (Experts::PROJECTIONS, false);
        let experts = Experts { router, has_correction_bias, intermediate: 32, projections, shared: Some(shared) };
        let mut moe = SparseMlp::load(&context.root().at("mlp"), &experts).unwrap();

        let read = Arc::new(AtomicUsize::new(0));
        let counted =
            |weight: Box<dyn QuantWeight>| -> Box<dyn QuantWeight> { Box::new(Counted { weight, read: read.clone() }) };
        let SharedMlp { mlp, gate } = moe.shared.take().unwrap();
        let shared_gate = counted(gate.unwrap());
        let mlp = mlp.map_weights(&counted);
        let whole_experts = (moe.gate_up.size_bytes() + moe.down.size_bytes()) / EXPERTS;
        let sizes = [moe.gate.size_bytes(), whole_experts, mlp.size_bytes() + shared_gate.size_bytes()];
        moe.shared = Some(SharedMlp { mlp, gate: Some(shared_gate) });
        (moe.gate, moe.gate_up, moe.down) = (counted(moe.gate), counted(moe.gate_up), counted(moe.down));

        let limits =
            BatchLimits { max_tokens: tokens, max_seqs: 1, max_blocks_per_seq: 1, max_logit_rows: 1, max_later: 0 };
        let layout = KvLayout { layers: Vec::new(), last_hidden: 0, block_size: 16, dtype: DType::F32 };
        let cx = Forward {
            batch: &Batch::new(&Device::Cpu, limits).unwrap(),
            kv: &mut KvCache::new(&Device::Cpu, layout, 1).unwrap(),
            workspace: &Workspace::new(&Device::Cpu, moe.workspace_bytes(tokens, 4)).unwrap(),
            comm: &Solo::default(),
            target_hidden: None,
            taps: &mut [],
        };
        let x = crate::testing::random(tokens * HIDDEN, 5);
        let mut x = Tensor::from_slice(&Device::Cpu, "x", &x, [tokens, HIDDEN]).unwrap();
        moe.forward(&mut x, &cx).unwrap();
        (read.load(Ordering::Relaxed), sizes)
    }

    #[test]
    fn numbers_that_do_not_go_together_are_named_by_their_keys() {
        let refusal = |num_experts, top_k, groups: Option<(usize, usize)>| {
            let groups = groups.map(|(num_groups, top_k)| TopGroups { num_groups, top_k, score: GroupScore::Max });
            let router = Router { num_experts, top_k, scoring: Scoring::Softmax, groups, normalize: true, scale: 1.0 };
            let (projections, has_correction_bias) = (Experts::PROJECTIONS, false);
            let experts = Experts { router, has_correction_bias, intermediate: 32, projections, shared: None };
            experts.check().unwrap_err().to_string()
        };
        let chosen = |top_k, choice| {
            format!(
                "config.json: num_experts_per_tok is {top_k}, supported: 1 up to the experts that can be chosen, which are {choice}"
            )
        };
        assert_eq!(refusal(8, 9, None), chosen(9, 8));
        assert_eq!(refusal(8, 5, Some((4, 2))), chosen(5, 4));
        assert_eq!(
            refusal(8, 2, Some((3, 1))),
            "config.json: n_group is 3, supported: a divisor of the number of experts, which is 8"
        );
        assert_eq!(refusal(8, 2, Some((4, 5))), "config.json: topk_group is 5, supported: 1 up to n_group, which is 4");
        assert_eq!(refusal(2048, 2, None), "config.json: the number of experts is 2048, supported: 1 up to 1024");
    }

    #[test]
    fn one_token_reads_its_experts_the_shared_one_and_the_router() {
        for quant in ["none", "weight_only_int8", "weight_only_int4"] {
            let (read, [router, expert, shared]) = bytes(quant, 1);
            assert_eq!(read, router + TOP_K * expert + shared, "{quant}");
            let (read, _) = bytes(quant, 64);
            assert_eq!(read, router + EXPERTS * expert + shared, "{quant}: 64 tokens choose all");
        }
    }
}

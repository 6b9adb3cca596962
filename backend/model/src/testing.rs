//! Tiny random checkpoints, and how tests run them.

use std::collections::BTreeMap;
use std::path::Path;

use drafthorse_kernels::{DType, Solo, Workspace};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value};
use tempfile::TempDir;

use crate::{Batch, BatchInputs, BatchLimits, Forward, KvCache, KvLayout, LoadOptions, Loaded, ModelConfig, StepSize};

/// Tokens of a KV block in tests.
const BLOCK_SIZE: usize = 16;

/// A checkpoint before it is written.
#[derive(Clone)]
pub(crate) struct Tiny {
    pub config: Map<String, Value>,
    pub tensors: BTreeMap<String, Stored>,
}

/// A tensor of a checkpoint.
#[derive(Clone)]
pub(crate) struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Stored {
    /// `values` rounded to `dtype`.
    pub(crate) fn floats(dtype: Dtype, shape: &[usize], values: &[f32]) -> Self {
        let bytes = match dtype {
            Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Dtype::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            Dtype::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            other => panic!("{other:?} is no float"),
        };
        Stored { dtype, shape: shape.to_vec(), bytes }
    }

    /// What it holds, if floats.
    pub(crate) fn values(&self) -> Vec<f32> {
        match self.dtype {
            Dtype::F32 => self.bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::F16 => self.bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::BF16 => self.bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            other => panic!("{other:?} is no float"),
        }
    }
}

/// Numbers between -1 and 1.
pub(crate) fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1.0f32..1.0)).collect()
}

impl Tiny {
    /// Two layers, grouped-query attention, sizes that no vector width divides; `changes` go over its config.
    pub(crate) fn new(dtype: Dtype, changes: &str) -> Self {
        let base = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 90, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 128, "tie_word_embeddings": false}"#;
        let mut config: Map<String, Value> = serde_json::from_str(base).unwrap();
        config.extend(serde_json::from_str::<Map<String, Value>>(changes).unwrap());
        let mut tiny = Tiny { config, tensors: BTreeMap::new() };
        tiny.fill(dtype);
        tiny
    }

    pub(crate) fn parsed(&self) -> ModelConfig {
        ModelConfig::parse(&Value::from(self.config.clone()).to_string(), "config.json".into()).unwrap()
    }

    /// Weights wide enough that attention is far from even.
    fn fill(&mut self, dtype: Dtype) {
        let config = self.parsed();
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (q, kv) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
        let mut add = |name: &str, shape: &[usize], center: f32, width: f32| {
            let seed = self.tensors.len() as u64;
            let values = random(shape.iter().product(), seed);
            let values: Vec<f32> = values.iter().map(|v| center + width * v).collect();
            self.tensors.insert(name.to_owned(), Stored::floats(dtype, shape, &values));
        };
        add("model.embed_tokens.weight", &[config.vocab_size, hidden], 0.0, 1.0);
        add("model.norm.weight", &[hidden], 1.0, 0.5);
        if !config.tie_word_embeddings {
            add("lm_head.weight", &[config.vocab_size, hidden], 0.0, 0.5);
        }
        for layer in 0..config.num_layers {
            let mut add = |name: &str, shape: &[usize], center, width| {
                add(&format!("model.layers.{layer}.{name}"), shape, center, width);
            };
            add("input_layernorm.weight", &[hidden], 1.0, 0.5);
            add("post_attention_layernorm.weight", &[hidden], 1.0, 0.5);
            for (name, out, inputs, has_bias) in [
                ("self_attn.q_proj", q, hidden, config.qkv_bias),
                ("self_attn.k_proj", kv, hidden, config.qkv_bias),
                ("self_attn.v_proj", kv, hidden, config.qkv_bias),
                ("self_attn.o_proj", hidden, q, config.o_bias),
                ("mlp.gate_proj", inner, hidden, config.mlp_bias),
                ("mlp.up_proj", inner, hidden, config.mlp_bias),
                ("mlp.down_proj", hidden, inner, config.mlp_bias),
            ] {
                add(&format!("{name}.weight"), &[out, inputs], 0.0, 0.4);
                if has_bias {
                    add(&format!("{name}.bias"), &[out], 0.0, 0.5);
                }
            }
        }
    }

    /// The values of a tensor that is there.
    pub(crate) fn values(&self, name: &str) -> Vec<f32> {
        self.tensors[name].values()
    }

    /// Writes it into a folder that lasts as long as what is returned.
    pub(crate) fn write(&self) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), Value::from(self.config.clone()).to_string()).unwrap();
        write_safetensors(&dir.path().join("model.safetensors"), &self.tensors);
        dir
    }
}

pub(crate) fn write_safetensors(path: &Path, tensors: &BTreeMap<String, Stored>) {
    let views = tensors.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A loaded model with what it needs to run one sequence.
pub(crate) struct Rig {
    pub loaded: Loaded,
    kv: KvCache,
    batch: Batch,
    pub workspace: Workspace,
}

impl Rig {
    /// Room for `max_tokens` a step, and a workspace of exactly what the model plans.
    pub(crate) fn new(dir: &Path, options: &LoadOptions<'_>, max_tokens: usize) -> Self {
        let loaded = crate::load(dir, options).unwrap();
        let longest = loaded.config.max_position_embeddings;
        let num_blocks = longest.div_ceil(BLOCK_SIZE);
        let layout =
            KvLayout { layers: loaded.model.kv_layers(), last_hidden: 0, block_size: BLOCK_SIZE, dtype: options.dtype };
        let kv = KvCache::new(&options.device, layout, num_blocks).unwrap();
        let limits = BatchLimits {
            max_tokens,
            max_seqs: 1,
            max_blocks_per_seq: num_blocks,
            max_logit_rows: max_tokens,
            max_later: 0,
        };
        let batch = Batch::new(&options.device, limits).unwrap();
        let step = StepSize { tokens: max_tokens, seqs: 1, logit_rows: max_tokens, max_kv_len: longest };
        let workspace = Workspace::new(&options.device, loaded.model.workspace_bytes(step)).unwrap();
        Rig { loaded, kv, batch, workspace }
    }

    /// The logits of all `tokens`, which stand at `first` and after in their sequence. Its blocks are in reverse order.
    pub(crate) fn step(&mut self, tokens: &[i32], first: usize) -> Vec<f32> {
        let len = tokens.len() as i32;
        let positions: Vec<i32> = (first as i32..first as i32 + len).collect();
        let blocks: Vec<i32> = (0..self.kv.num_blocks() as i32).rev().collect();
        let rows: Vec<i32> = (0..len).collect();
        let inputs = BatchInputs {
            token_ids: tokens,
            positions: &positions,
            cu_tokens: &[0, len],
            kv_lens: &[first as i32 + len],
            block_tables: &[&blocks],
            logit_rows: &rows,
        };
        self.batch.set(&inputs).unwrap();
        let mut cx = Forward {
            batch: &self.batch,
            kv: &mut self.kv,
            workspace: &self.workspace,
            comm: &Solo::default(),
            target_hidden: None,
            taps: &mut [],
        };
        let hidden = self.loaded.model.forward(&mut cx).unwrap();
        let wanted = cx.wanted_rows(&hidden).unwrap();
        self.loaded.model.logits(&wanted, &mut cx).unwrap().to_vec().unwrap()
    }

    /// The logits of all `tokens`, run in chunks of the given lengths.
    pub(crate) fn chunked(&mut self, tokens: &[i32], chunks: &[usize]) -> Vec<f32> {
        assert_eq!(chunks.iter().sum::<usize>(), tokens.len());
        let mut first = 0;
        let mut logits = Vec::new();
        for &len in chunks {
            logits.extend(self.step(&tokens[first..first + len], first));
            first += len;
        }
        logits
    }
}

/// Options with these activations and this quantization, else the defaults.
pub(crate) fn options(dtype: DType, quant: &str) -> LoadOptions<'static> {
    LoadOptions { dtype, quant: Some(quant.into()), ..LoadOptions::default() }
}

/// The largest difference, as a part of the largest value of `want`.
pub(crate) fn relative_error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0.0f32, |max, v| max.max(v.abs()));
    got.iter().zip(want).fold(0.0f32, |max, (g, w)| max.max((g - w).abs())) / largest
}

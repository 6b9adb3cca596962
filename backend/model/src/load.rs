//! From a folder to a model that runs.

use std::path::Path;
use std::time::Instant;

use drafthorse_kernels::ops::mla::Form;
use drafthorse_kernels::{DType, Device};

use crate::config::ModelConfig;
use crate::error::Result;
use crate::models::{self, Model};
use crate::quant::{self, QuantType};
use crate::weights::{Checkpoint, LoadContext, LoadProgress, Place};

/// How to load a checkpoint.
pub struct LoadOptions<'a> {
    pub device: Device,
    /// What activations are stored in: f32 or bf16.
    pub dtype: DType,
    /// Quantize the weights while they load.
    pub quant: Option<QuantType>,
    pub place: Place,
    /// Read `config.json` alone and make the weights up: for measuring, no text comes of it.
    pub random_weights: bool,
    /// Positions that any sequence comes to, if fewer than the model was made for: tables need no more.
    pub max_positions: Option<usize>,
    /// Tokens of the longest sequence, if fewer than the model was made for.
    pub max_sequence: Option<usize>,
    /// Index of the model's first layer in the KV cache: 0, or for a drafter the number of the target's layers.
    pub first_kv_layer: usize,
    /// How attention over latents is computed, in models that have it.
    pub mla_form: Form,
    /// Called on the loading thread as bytes come in.
    pub progress: Option<&'a dyn Fn(LoadProgress)>,
}

impl Default for LoadOptions<'_> {
    /// All of the model on the CPU, f32 activations, weights as they are stored.
    fn default() -> Self {
        LoadOptions {
            device: Device::Cpu,
            dtype: DType::F32,
            quant: None,
            place: Place::ALONE,
            random_weights: false,
            max_positions: None,
            max_sequence: None,
            first_kv_layer: 0,
            mla_form: Form::default(),
            progress: None,
        }
    }
}

/// A model in memory.
pub struct Loaded {
    pub model: Box<dyn Model>,
    pub config: ModelConfig,
    /// Device memory of this rank's weights.
    pub weight_bytes: usize,
    /// How the weights are stored now.
    pub quantization: &'static str,
}

/// Loads this rank's shard of the checkpoint in `dir`.
///
/// # Errors
/// Whatever is wrong with the folder: see [`ModelError`](crate::ModelError). Tensors that are missing or misshapen are all named
/// in one error, before any is read.
pub fn load(dir: &Path, options: &LoadOptions<'_>) -> Result<Loaded> {
    let start = Instant::now();
    let mut config = ModelConfig::from_dir(dir)?;
    config.check_window(options.max_sequence)?;
    config.limit_positions(options.max_positions);
    let build = models::builder(&config.architecture)?;
    let schemes = quant::schemes(options.quant.as_ref(), config.quantization.as_ref())?;
    let checkpoint = match options.random_weights {
        false => Checkpoint::open(dir)?,
        true => Checkpoint::random(),
    };

    if let Some(stored) = &config.quantization
        && !options.random_weights
    {
        stored.check_names(&checkpoint.names().collect::<Vec<_>>())?;
    }
    let mut context = LoadContext::new(&checkpoint, &config, &schemes, &options.device, options.dtype);
    context.place = options.place;
    context.first_kv_layer = options.first_kv_layer;
    context.mla_form = options.mla_form;
    context.progress = options.progress;
    let model = context.checked(build)?;
    let weight_bytes = context.weight_bytes();
    let quantization = schemes.name();
    let seconds = start.elapsed().as_secs_f64();
    tracing::info!(
        architecture = config.architecture,
        quantization,
        weight_bytes,
        seconds,
        gb_per_second = weight_bytes as f64 / 1e9 / seconds,
        "weights loaded"
    );
    Ok(Loaded { model, config, weight_bytes, quantization })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use safetensors::tensor::Dtype;
    use tempfile::TempDir;

    use super::*;
    use crate::testing::{Rig, Stored, Tiny, write_safetensors};

    /// What comes of loading `dir`: the reason with folders left out, or the bytes of its weights.
    fn outcome(dir: &TempDir, options: &LoadOptions<'_>) -> String {
        match load(dir.path(), options) {
            Ok(loaded) => loaded.weight_bytes.to_string(),
            Err(err) => err.to_string().replace(&dir.path().display().to_string(), "DIR"),
        }
    }

    fn plain(dir: &TempDir) -> String {
        outcome(dir, &LoadOptions::default())
    }

    #[test]
    fn all_that_is_missing_or_misshapen_is_named_at_once() {
        let mut tiny = Tiny::new(Dtype::BF16, "{}");
        tiny.tensors.remove("model.norm.weight");
        tiny.tensors.remove("model.layers.1.mlp.up_proj.weight");
        let wide = Stored::floats(Dtype::BF16, &[90, 60], &[0.5; 90 * 60]);
        tiny.tensors.insert("lm_head.weight".into(), wide);
        let whole = Stored { dtype: Dtype::I32, shape: vec![64], bytes: vec![1; 256] };
        tiny.tensors.insert("model.layers.0.input_layernorm.weight".into(), whole);
        assert_eq!(
            plain(&tiny.write()),
            "DIR: model.layers.0.input_layernorm.weight has dtype I32, expected F32, F16 or BF16; \
             model.layers.1.mlp.up_proj.weight is missing; lm_head.weight has shape [90, 60], expected [90, 64]; \
             model.norm.weight is missing"
        );
    }

    #[test]
    fn what_is_multiplied_as_one_must_be_stored_as_one() {
        let mut tiny = Tiny::new(Dtype::BF16, "{}");
        let name = "model.layers.1.self_attn.k_proj.weight";
        let wide = Stored::floats(Dtype::F32, &[32, 64], &tiny.values(name));
        tiny.tensors.insert(name.into(), wide);
        // Norms stand alone.
        let norm = Stored::floats(Dtype::F32, &[64], &tiny.values("model.norm.weight"));
        tiny.tensors.insert("model.norm.weight".into(), norm);
        let dir = tiny.write();
        for quant in ["none", "weight_only_int8", "weight_only_int4"] {
            let refusal = outcome(&dir, &LoadOptions { quant: Some(quant.into()), ..LoadOptions::default() });
            let want = format!("DIR: {name} has dtype F32, those it is multiplied with as one have BF16");
            assert_eq!(refusal, want, "{quant}");
        }
    }

    #[test]
    fn a_long_list_of_missing_tensors_is_cut() {
        let mut tiny = Tiny::new(Dtype::BF16, "{}");
        tiny.tensors.retain(|name, _| name.contains("norm"));
        let message = plain(&tiny.write());
        assert!(message.starts_with("DIR: model.layers.0.self_attn.q_proj.weight is missing; "), "{message}");
        assert!(message.ends_with("; and 8 more"), "{message}");
    }

    #[test]
    fn tensors_that_nothing_uses_do_no_harm() {
        let mut tiny = Tiny::new(Dtype::BF16, "{}");
        let before = plain(&tiny.write());
        tiny.tensors.insert("model.extra".into(), Stored::floats(Dtype::F32, &[3], &[1.0, 2.0, 3.0]));
        assert_eq!(plain(&tiny.write()), before);
    }

    #[test]
    fn a_folder_that_is_no_checkpoint_says_why() {
        let tiny = Tiny::new(Dtype::BF16, "{}");
        let dir = tiny.write();
        let weights = dir.path().join("model.safetensors");
        std::fs::write(&weights, []).unwrap();
        assert_eq!(plain(&dir), "DIR/model.safetensors: the file is empty");
        std::fs::remove_file(&weights).unwrap();
        assert_eq!(plain(&dir), "DIR has no model.safetensors and no model.safetensors.index.json");
        std::fs::remove_file(dir.path().join("config.json")).unwrap();
        assert_eq!(plain(&dir), "cannot read DIR/config.json");
        let gpt = Tiny::new(Dtype::BF16, r#"{"architectures": ["GPT2LMHeadModel"]}"#).write();
        let unknown = "architecture GPT2LMHeadModel is unknown, supported: DeepseekV2ForCausalLM, ";
        assert!(plain(&gpt).starts_with(unknown), "{}", plain(&gpt));
    }

    #[test]
    fn weights_may_be_spread_over_files_that_an_index_lists() {
        let tiny = Tiny::new(Dtype::BF16, "{}");
        let dir = tiny.write();
        let tokens = [5, 7, 80, 3];
        let want = Rig::new(dir.path(), &LoadOptions::default(), 4).step(&tokens, 0);
        std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();

        let file_of = |name: &str| if name.contains("layers.1") { "b.safetensors" } else { "a.safetensors" };
        for file in ["a.safetensors", "b.safetensors"] {
            let part = tiny.tensors.clone().into_iter().filter(|(name, _)| file_of(name) == file).collect();
            write_safetensors(&dir.path().join(file), &part);
        }
        let write_index = |extra: &[(&str, &str)]| {
            let mut map: BTreeMap<&str, &str> =
                tiny.tensors.keys().map(|name| (name.as_str(), file_of(name))).collect();
            map.extend(extra.iter().copied());
            let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
            std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        };
        write_index(&[]);
        assert_eq!(Rig::new(dir.path(), &LoadOptions::default(), 4).step(&tokens, 0), want);
        write_index(&[("model.norm.weight", "b.safetensors")]);
        let lost = "tensor model.norm.weight is said to be here by the index, it is not";
        assert_eq!(plain(&dir), format!("DIR/b.safetensors: {lost}"));
        write_index(&[("model.norm.weight", "c.safetensors")]);
        assert_eq!(plain(&dir), "cannot read DIR/c.safetensors");
        let absolute = dir.path().join("a.safetensors");
        for file in ["../a.safetensors", "x/../../a.safetensors", "./../a.safetensors", "", absolute.to_str().unwrap()]
        {
            write_index(&[("model.norm.weight", file)]);
            let outside = format!(
                "DIR/model.safetensors.index.json: the index puts tensor model.norm.weight into {}, which is not inside the \
                 checkpoint's folder",
                file.replace(dir.path().to_str().unwrap(), "DIR")
            );
            assert_eq!(plain(&dir), outside);
        }
    }

    #[test]
    fn weights_are_counted_and_a_tied_head_once() {
        let bytes = |changes| plain(&Tiny::new(Dtype::BF16, changes).write()).parse::<usize>().unwrap();
        // 90 rows of 64, in blocks of 16 rows.
        assert_eq!(bytes("{}") - bytes(r#"{"tie_word_embeddings": true}"#), 96 * 64 * 2);
    }

    #[test]
    fn progress_ends_with_every_byte() {
        let dir = Tiny::new(Dtype::BF16, "{}").write();
        let seen = RefCell::new(Vec::new());
        let progress = |at| seen.borrow_mut().push(at);
        load(dir.path(), &LoadOptions { progress: Some(&progress), ..LoadOptions::default() }).unwrap();
        let seen = seen.into_inner();
        assert!(seen.is_sorted_by_key(|at| at.read_bytes));
        let last = seen.last().unwrap();
        assert_eq!(last.read_bytes, last.total_bytes);
    }

    #[test]
    fn ranks_that_cannot_share_equally_are_refused() {
        let dir = Tiny::new(Dtype::BF16, "{}").write();
        let on = |world, quant: Option<&str>| {
            let quant = quant.map(QuantType::from);
            outcome(&dir, &LoadOptions { place: Place { rank: 0, world }, quant, ..LoadOptions::default() })
        };
        assert_eq!(
            on(3, None),
            "model.layers.0.self_attn: num_attention_heads is 4, not a multiple of 3 (the number of ranks)"
        );
        let whole: usize = on(1, None).parse().unwrap();
        let half: usize = on(2, None).parse().unwrap();
        // The embedding table is whole on every rank, all else but the norms is halved.
        let table = 96 * 64 * 2;
        assert!(half > table && half - table < (whole - table) / 2 + 10_000, "{half} of {whole}");
        // More ranks than KV heads: two ranks hold the same one.
        assert!(on(4, Some("weight_only_int8")).starts_with("lm_head: out is 90"));
    }
}

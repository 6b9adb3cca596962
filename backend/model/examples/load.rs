//! How long a checkpoint takes to load, and how much memory.
//!
//! ```sh
//! cargo run --release -p drafthorse-model --example load -- write DIR 4    # 4 GB of random weights, ten thousand tensors in four files
//! cargo run --release -p drafthorse-model --example load -- DIR [quant_type]
//! ```
//!
//! The peak is the process's own memory (`VmHWM` of Linux); the system's cache of files is not in it.

#![allow(clippy::print_stdout, reason = "a program says what it found")]

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use drafthorse_model::{LoadOptions, load};
use serde_json::{Map, Value, json};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const FILES: usize = 4;
const HIDDEN: usize = 1024;
const EXPERTS: usize = 256;
/// Width of an expert.
const INNER: usize = 192;
const VOCAB: usize = 32_000;
const HEADS: usize = 16;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 64;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["write", dir, gigabytes] => write(Path::new(dir), gigabytes.parse()?),
        [dir] => measure(Path::new(dir), "none"),
        [dir, quant_type] => measure(Path::new(dir), quant_type),
        _ => Err("usage: load write DIR GIGABYTES | load DIR [quant_type]".into()),
    }
}

fn measure(dir: &Path, quant_type: &str) -> Result<()> {
    let before = peak_bytes()?;
    let start = Instant::now();
    let options = LoadOptions { quant: Some(quant_type.into()), ..LoadOptions::default() };
    let loaded = load(dir, &options)?;
    let seconds = start.elapsed().as_secs_f64();
    let (weights, peak) = (loaded.weight_bytes as f64 / 1e9, (peak_bytes()? - before) as f64 / 1e9);
    println!("{quant_type}: {weights:.3} GB of weights in {seconds:.2} s, {:.2} GB/s", weights / seconds);
    println!("peak {peak:.3} GB more than before, {:+.1} % of the weights", (peak / weights - 1.0) * 100.0);
    Ok(())
}

/// Most memory this process ever had.
fn peak_bytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM in /proc/self/status")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

/// A Qwen3-MoE of about so many gigabytes in bf16.
fn write(dir: &Path, gigabytes: f64) -> Result<()> {
    let of_layer = layer_shapes(0).values().map(|shape| 2 * shape.iter().product::<usize>()).sum::<usize>();
    let layers = ((gigabytes * 1e9 / of_layer as f64) as usize).max(1);
    let mut tensors = BTreeMap::from([
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ]);
    (0..layers).for_each(|layer| tensors.extend(layer_shapes(layer)));
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 4096, "tie_word_embeddings": true,
        "num_experts": EXPERTS, "num_experts_per_tok": 8, "moe_intermediate_size": INNER, "norm_topk_prob": true,
    });
    std::fs::create_dir_all(dir)?;
    std::fs::write(dir.join("config.json"), config.to_string())?;
    let names: Vec<&String> = tensors.keys().collect();
    let mut index = Map::new();
    for (i, names) in names.chunks(names.len().div_ceil(FILES)).enumerate() {
        let file = format!("model-{}-of-{FILES}.safetensors", i + 1);
        index.extend(names.iter().map(|name| ((*name).clone(), Value::from(file.as_str()))));
        write_file(&dir.join(file), names.iter().map(|name| (name.as_str(), &tensors[*name][..])))?;
    }
    std::fs::write(dir.join("model.safetensors.index.json"), json!({"weight_map": index}).to_string())?;
    println!("{} tensors, {layers} layers", tensors.len());
    Ok(())
}

fn layer_shapes(layer: usize) -> BTreeMap<String, Vec<usize>> {
    let mut shapes = BTreeMap::new();
    let mut add =
        |name: &str, shape: &[usize]| shapes.insert(format!("model.layers.{layer}.{name}.weight"), shape.to_vec());
    for norm in ["input_layernorm", "post_attention_layernorm"] {
        add(norm, &[HIDDEN]);
    }
    for norm in ["self_attn.q_norm", "self_attn.k_norm"] {
        add(norm, &[HEAD_DIM]);
    }
    add("self_attn.q_proj", &[HEADS * HEAD_DIM, HIDDEN]);
    add("self_attn.k_proj", &[KV_HEADS * HEAD_DIM, HIDDEN]);
    add("self_attn.v_proj", &[KV_HEADS * HEAD_DIM, HIDDEN]);
    add("self_attn.o_proj", &[HIDDEN, HEADS * HEAD_DIM]);
    add("mlp.gate", &[EXPERTS, HIDDEN]);
    for expert in 0..EXPERTS {
        add(&format!("mlp.experts.{expert}.gate_proj"), &[INNER, HIDDEN]);
        add(&format!("mlp.experts.{expert}.up_proj"), &[INNER, HIDDEN]);
        add(&format!("mlp.experts.{expert}.down_proj"), &[HIDDEN, INNER]);
    }
    shapes
}

fn write_file<'a>(path: &Path, tensors: impl Iterator<Item = (&'a str, &'a [usize])> + Clone) -> Result<()> {
    let mut end = 0;
    let mut header = Map::new();
    for (name, shape) in tensors.clone() {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        header.insert(name.to_owned(), json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}));
    }
    let header = Value::from(header).to_string();
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    // Numbers between 2^-7 and 2^-3 in size, of both signs; norms are ones.
    let mut state = 1u64;
    for (name, shape) in tensors {
        let is_norm = name.contains("norm");
        for _ in 0..shape.iter().product::<usize>() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bits = (state >> 48) as u16;
            let value = if is_norm { 0x3f80 } else { bits & 0x8000 | (120 + (bits >> 7 & 3)) << 7 | bits & 0x7f };
            file.write_all(&value.to_le_bytes())?;
        }
    }
    file.flush()?;
    Ok(())
}

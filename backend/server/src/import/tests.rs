//! Whole imports of files made here: small models, and files with one thing wrong.

use std::collections::BTreeMap;
use std::fs;

use half::bf16;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use tempfile::TempDir;
use tokenizers::Tokenizer;

use super::dequant::TensorType;
use super::*;

/// A GGUF file in parts, so that a test can change one.
#[derive(Clone)]
struct Sample {
    /// Type and bytes.
    keys: BTreeMap<String, (u32, Vec<u8>)>,
    /// Shape innermost first, type, bytes.
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn texts<'a>(list: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    let list: Vec<_> = list.into_iter().map(text).collect();
    [&8u32.to_le_bytes()[..], &(list.len() as u64).to_le_bytes(), &list.concat()].concat()
}

fn random_bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

const HIDDEN: u64 = 64;
const HEADS: u64 = 4;
const KV_HEADS: u64 = 2;
const HEAD_DIM: u64 = 16;
const INTERMEDIATE: u64 = 96;

impl Sample {
    /// A llama of one layer with Q4_1 matrices, a Q8_0 embedding, and the 256 byte tokens.
    fn llama() -> Self {
        let mut sample = Sample { keys: BTreeMap::new(), tensors: Vec::new() };
        sample.set_text("general.architecture", "llama");
        for (key, value) in [
            ("llama.block_count", 1),
            ("llama.context_length", 512),
            ("llama.embedding_length", HIDDEN as u32),
            ("llama.feed_forward_length", INTERMEDIATE as u32),
            ("llama.attention.head_count", HEADS as u32),
            ("llama.attention.head_count_kv", KV_HEADS as u32),
            ("tokenizer.ggml.bos_token_id", 0),
            ("tokenizer.ggml.eos_token_id", 1),
        ] {
            sample.set_int(key, value);
        }
        sample.set_float("llama.attention.layer_norm_rms_epsilon", 1e-5);
        sample.set_float("llama.rope.freq_base", 100_000.0);
        sample.set_text("tokenizer.ggml.model", "gpt2");
        sample.set_text("tokenizer.ggml.pre", "smollm");
        sample.set_text("tokenizer.chat_template", "{{ messages }}");
        let tokens = sample_tokens();
        sample.keys.insert("tokenizer.ggml.tokens".into(), (9, texts(tokens.iter().map(String::as_str))));
        let kinds: Vec<u8> = (0..tokens.len()).flat_map(|id| if id < 2 { 3i32 } else { 1 }.to_le_bytes()).collect();
        let kinds = [&5u32.to_le_bytes()[..], &(tokens.len() as u64).to_le_bytes(), &kinds].concat();
        sample.keys.insert("tokenizer.ggml.token_type".into(), (9, kinds));
        sample.keys.insert("tokenizer.ggml.merges".into(), (9, texts(["1 2", "a b"])));

        sample.add("token_embd.weight", &[HIDDEN, tokens.len() as u64], TensorType::Q8_0);
        sample.add("output_norm.weight", &[HIDDEN], TensorType::F32);
        for (name, columns, rows) in [
            ("attn_q", HIDDEN, HEADS * HEAD_DIM),
            ("attn_k", HIDDEN, KV_HEADS * HEAD_DIM),
            ("attn_v", HIDDEN, KV_HEADS * HEAD_DIM),
            ("attn_output", HEADS * HEAD_DIM, HIDDEN),
            ("ffn_gate", HIDDEN, INTERMEDIATE),
            ("ffn_up", HIDDEN, INTERMEDIATE),
            ("ffn_down", INTERMEDIATE, HIDDEN),
        ] {
            sample.add(&format!("blk.0.{name}.weight"), &[columns, rows], TensorType::Q4_1);
        }
        for name in ["attn_norm", "ffn_norm"] {
            sample.add(&format!("blk.0.{name}.weight"), &[HIDDEN], TensorType::F32);
        }
        sample
    }

    fn set_text(&mut self, key: &str, value: &str) {
        self.keys.insert(key.into(), (8, text(value)));
    }

    fn set_int(&mut self, key: &str, value: u32) {
        self.keys.insert(key.into(), (4, value.to_le_bytes().into()));
    }

    fn set_float(&mut self, key: &str, value: f32) {
        self.keys.insert(key.into(), (6, value.to_le_bytes().into()));
    }

    /// Adds a tensor, or replaces the one of this name; random codes, scales near 1/64.
    fn add(&mut self, name: &str, shape: &[u64], kind: TensorType) {
        let num_blocks = shape.iter().product::<u64>() as usize / kind.block_len();
        let mut bytes = random_bytes(num_blocks * kind.block_bytes(), name.len() as u64 * 7 + shape[0]);
        for block in bytes.chunks_exact_mut(kind.block_bytes()) {
            match kind {
                TensorType::F32 => *block.last_mut().unwrap() = 0x3f,
                TensorType::Q4_1 => (block[1], block[3]) = (0x24, 0xa4),
                _ => block[1] = 0x24,
            }
        }
        self.tensors.retain(|(other, ..)| other != name);
        self.tensors.push((name.into(), shape.into(), kind_id(kind), bytes));
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, (kind, value)) in &self.keys {
            out.extend([&text(key)[..], &kind.to_le_bytes(), value].concat());
        }
        let mut data = Vec::new();
        for (name, shape, kind, bytes) in &self.tensors {
            out.extend(text(name));
            out.extend((shape.len() as u32).to_le_bytes());
            out.extend(shape.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend_from_slice(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }

    fn values(&self, name: &str) -> Vec<f32> {
        let (_, shape, kind, bytes) = self.tensors.iter().find(|(other, ..)| other == name).unwrap();
        let mut values = vec![0.0; shape.iter().product::<u64>() as usize];
        dequantize(TensorType::from_id(*kind).unwrap(), bytes, &mut values);
        values
    }

    /// Imports into a new folder.
    fn import(&self, keep_quant: bool) -> Result<TempDir> {
        import_bytes(&self.to_bytes(), keep_quant)
    }

    fn error(&self) -> String {
        self.import(false).unwrap_err().to_string()
    }
}

fn kind_id(kind: TensorType) -> u32 {
    (0..64).find(|&id| TensorType::from_id(id) == Some(kind)).unwrap()
}

/// Two control tokens, the 256 letters that stand for bytes, and two merged tokens.
fn sample_tokens() -> Vec<String> {
    let mut letters = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect::<Vec<_>>();
    letters.sort_unstable();
    let mut tokens = vec!["<|im_start|>".to_owned(), "<|im_end|>".to_owned()];
    tokens.extend(letters.iter().map(char::to_string));
    tokens.extend(["12".into(), "ab".into()]);
    tokens
}

fn import_bytes(bytes: &[u8], keep_quant: bool) -> Result<TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    fs::write(&file, bytes).unwrap();
    let result = run(ImportArgs { file, dir: folder.path().join("1"), keep_quant, force: false });
    if result.is_err() {
        let left = fs::read_dir(folder.path().join("1")).map_or(0, Iterator::count);
        assert_eq!(left, 0, "a failed import leaves nothing behind");
    }
    result.map(|()| folder)
}

fn read_json(folder: &TempDir, name: &str) -> Json {
    serde_json::from_slice(&fs::read(folder.path().join("1").join(name)).unwrap()).unwrap()
}

fn bf16_values(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
}

fn rounded(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&value| bf16::from_f32(value).to_f32()).collect()
}

#[test]
fn a_file_becomes_a_checkpoint() {
    let sample = Sample::llama();
    let folder = sample.import(false).unwrap();

    let weights = fs::read(folder.path().join("1/model.safetensors")).unwrap();
    let weights = SafeTensors::deserialize(&weights).unwrap();
    let mut names = weights.names();
    names.sort_unstable();
    let layer = "model.layers.0.";
    let mut expected = vec!["model.embed_tokens.weight".to_owned(), "model.norm.weight".to_owned()];
    for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
        expected.push(format!("{layer}self_attn.{name}.weight"));
    }
    for name in ["gate_proj", "up_proj", "down_proj"] {
        expected.push(format!("{layer}mlp.{name}.weight"));
    }
    expected.extend(["input_layernorm", "post_attention_layernorm"].map(|name| format!("{layer}{name}.weight")));
    expected.sort_unstable();
    assert_eq!(names, expected);

    let down = weights.tensor("model.layers.0.mlp.down_proj.weight").unwrap();
    assert_eq!((down.dtype(), down.shape()), (Dtype::BF16, &[64, 96][..]));
    assert_eq!(bf16_values(down.data()), rounded(&sample.values("blk.0.ffn_down.weight")));

    // Row 1 of the first half of head 1 is stored third in that head.
    let q = bf16_values(weights.tensor("model.layers.0.self_attn.q_proj.weight").unwrap().data());
    let stored = sample.values("blk.0.attn_q.weight");
    assert_eq!(q[17 * 64..18 * 64], rounded(&stored[18 * 64..19 * 64]));

    let config = read_json(&folder, "config.json");
    for (key, value) in [
        ("model_type", serde_json::json!("llama")),
        ("rms_norm_eps", serde_json::json!(1e-5)),
        ("rope_theta", serde_json::json!(100_000.0)),
        ("rope_scaling", Json::Null),
        ("tie_word_embeddings", serde_json::json!(true)),
        ("attention_bias", serde_json::json!(false)),
        ("head_dim", serde_json::json!(16)),
        ("vocab_size", serde_json::json!(260)),
        ("eos_token_id", serde_json::json!(1)),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    let tokenizer_config = read_json(&folder, "tokenizer_config.json");
    assert_eq!(tokenizer_config["chat_template"], "{{ messages }}");
    assert_eq!(tokenizer_config["eos_token"], "<|im_end|>");
    assert_eq!(read_json(&folder, "generation_config.json")["eos_token_id"], 1);
}

#[test]
fn blocks_are_kept_on_request() {
    let mut sample = Sample::llama();
    sample.add("blk.0.attn_v.weight", &[HIDDEN, KV_HEADS * HEAD_DIM], TensorType::Q8_0);
    let folder = sample.import(true).unwrap();

    let weights = fs::read(folder.path().join("1/model.safetensors")).unwrap();
    let weights = SafeTensors::deserialize(&weights).unwrap();
    let facts = |name: &str| {
        let tensor = weights.tensor(name).unwrap();
        (tensor.dtype(), tensor.shape().to_vec())
    };
    assert_eq!(facts("model.embed_tokens.qweight"), (Dtype::I8, vec![260, 64]));
    assert_eq!(facts("model.embed_tokens.scales"), (Dtype::F16, vec![260, 2]));
    assert_eq!(facts("model.layers.0.mlp.down_proj.qweight"), (Dtype::U8, vec![64, 48]));
    assert_eq!(facts("model.layers.0.mlp.down_proj.mins"), (Dtype::F16, vec![64, 3]));
    assert_eq!(facts("model.norm.weight"), (Dtype::BF16, vec![64]));
    // q, k and v are one multiplication, and v is of another kind.
    assert_eq!(facts("model.layers.0.self_attn.q_proj.weight"), (Dtype::BF16, vec![64, 64]));

    let quantization = &read_json(&folder, "config.json")["quantization_config"];
    let converted = ["q_proj", "k_proj", "v_proj"].map(|name| format!("model.layers.0.self_attn.{name}"));
    let expected = serde_json::json!({
        "quant_method": "gguf_blocks",
        "group_size": 32,
        "modules_to_not_convert": converted,
    });
    assert_eq!(*quantization, expected);

    let (_, _, _, stored) = sample.tensors.iter().find(|(name, ..)| name == "token_embd.weight").unwrap();
    let scales: Vec<u8> = stored.chunks_exact(34).flat_map(|block| block[..2].to_vec()).collect();
    assert_eq!(weights.tensor("model.embed_tokens.scales").unwrap().data(), scales);
}

#[test]
fn digits_are_words_of_their_own_for_smollm_only() {
    let tokens = |pre: &str, text: &str| {
        let mut sample = Sample::llama();
        sample.set_text("tokenizer.ggml.pre", pre);
        let folder = sample.import(false).unwrap();
        let tokenizer = Tokenizer::from_file(folder.path().join("1/tokenizer.json")).unwrap();
        let encoding = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode(encoding.get_ids(), false).unwrap(), text, "{pre} gives the text back");
        encoding.get_tokens().join("|")
    };
    assert_eq!(tokens("smollm", "ab12 <|im_end|>"), "ab|1|2|Ġ|<|im_end|>");
    assert_eq!(tokens("gpt-2", "ab12"), "ab|12");
    assert_eq!(tokens("qwen2", "ab12"), "ab|1|2");
    assert_eq!(tokens("llama-bpe", "ab12"), "ab|12");
}

#[test]
fn a_beginning_is_added_where_the_file_says_so() {
    let mut sample = Sample::llama();
    sample.keys.insert("tokenizer.ggml.add_bos_token".into(), (7, vec![1]));
    let folder = sample.import(false).unwrap();
    let tokenizer = Tokenizer::from_file(folder.path().join("1/tokenizer.json")).unwrap();
    assert_eq!(tokenizer.encode("ab", true).unwrap().get_tokens().join("|"), "<|im_start|>|ab");
    assert_eq!(tokenizer.encode("ab", false).unwrap().get_tokens().join("|"), "ab");
}

#[test]
fn qwen2_has_biases_and_its_rows_stay() {
    let llama = Sample::llama();
    let mut sample = llama.clone();
    sample.keys = llama.keys.into_iter().map(|(key, value)| (key.replace("llama.", "qwen2."), value)).collect();
    sample.set_text("general.architecture", "qwen2");
    for (name, rows) in [("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", KV_HEADS)] {
        sample.add(&format!("blk.0.{name}.bias"), &[rows * HEAD_DIM], TensorType::F32);
    }
    let folder = sample.import(false).unwrap();
    let weights = fs::read(folder.path().join("1/model.safetensors")).unwrap();
    let weights = SafeTensors::deserialize(&weights).unwrap();
    for (name, from) in [("q_proj.weight", "attn_q.weight"), ("k_proj.bias", "attn_k.bias")] {
        let tensor = weights.tensor(&format!("model.layers.0.self_attn.{name}")).unwrap();
        assert_eq!(bf16_values(tensor.data()), rounded(&sample.values(&format!("blk.0.{from}"))), "{name}");
    }
    assert_eq!(read_json(&folder, "config.json")["architectures"][0], "Qwen2ForCausalLM");
}

#[test]
fn stretched_positions_keep_their_rule() {
    let scaling = |change: &dyn Fn(&mut Sample)| {
        let mut sample = Sample::llama();
        change(&mut sample);
        sample.import(false).map(|folder| read_json(&folder, "config.json")["rope_scaling"].to_string())
    };
    let linear = scaling(&|sample| {
        sample.set_text("llama.rope.scaling.type", "linear");
        sample.set_float("llama.rope.scaling.factor", 4.0);
    });
    assert_eq!(linear.unwrap(), r#"{"rope_type":"linear","factor":4.0}"#);
    let yarn = scaling(&|sample| {
        sample.set_text("llama.rope.scaling.type", "yarn");
        sample.set_float("llama.rope.scaling.factor", 2.0);
        sample.set_int("llama.rope.scaling.original_context_length", 256);
    });
    assert_eq!(yarn.unwrap(), r#"{"rope_type":"yarn","factor":2.0,"original_max_position_embeddings":256}"#);

    // Wavelengths are 2 pi 100000^(i / 8): turns in 8192 positions 1304, 309, 73, 17.4, 4.12, 0.98, 0.23, 0.055.
    let stretched = |stretch: [f32; 8]| {
        scaling(&move |sample| {
            sample.add("rope_freqs.weight", &[8], TensorType::F32);
            let bytes = stretch.iter().flat_map(|x| x.to_le_bytes()).collect();
            sample.tensors.last_mut().unwrap().3 = bytes;
        })
    };
    assert_eq!(
        stretched([1.0, 1.0, 1.0, 1.0, 1.0, 32.0, 32.0, 32.0]).unwrap(),
        r#"{"rope_type":"llama3","factor":32.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192}"#
    );
    assert_eq!(stretched([1.0; 8]).unwrap(), "null");
    let err = stretched([1.0, 1.0, 1.0, 1.0, 2.0, 32.0, 32.0, 32.0]).unwrap_err().to_string();
    assert!(err.starts_with("key rope_freqs.weight is a stretch of up to 32 of its own"), "{err}");
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let error = |change: &dyn Fn(&mut Sample)| {
        let mut sample = Sample::llama();
        change(&mut sample);
        sample.error()
    };
    for (change, expected) in [
        (
            (&|sample: &mut Sample| sample.set_text("general.architecture", "gemma")) as &dyn Fn(&mut Sample),
            r#"key general.architecture is "gemma", must be llama or qwen2"#,
        ),
        (
            &|sample| sample.set_text("tokenizer.ggml.pre", "tekken"),
            r#"key tokenizer.ggml.pre is "tekken", must be smollm, gpt-2, llama-bpe or qwen2"#,
        ),
        (
            &|sample| sample.set_text("tokenizer.ggml.model", "llama"),
            r#"key tokenizer.ggml.model is "llama", must be gpt2: only byte-level BPE is imported"#,
        ),
        (
            &|sample| sample.set_text("llama.rope.scaling.type", "longrope"),
            r#"key llama.rope.scaling.type is "longrope", must be none, linear or yarn"#,
        ),
        (
            &|sample| sample.set_int("llama.expert_count", 8),
            "key llama.expert_count is 8, must be absent: models with experts are not imported",
        ),
        (
            &|sample| sample.set_float("llama.block_count", 1.0),
            "key llama.block_count is 1, must be an integer from 0 to 4294967295",
        ),
        (
            &|sample| sample.keys.remove("llama.context_length").map_or((), drop),
            "the file has no key llama.context_length",
        ),
        (
            &|sample| sample.set_int("tokenizer.ggml.eos_token_id", 260),
            "key tokenizer.ggml.eos_token_id is 260, must be below 260, the number of tokens",
        ),
        (
            &|sample| sample.set_int("general.alignment", 0),
            "key general.alignment is 0, must be a power of two up to 1048576",
        ),
        (
            &|sample| sample.tensors.retain(|(name, ..)| name != "blk.0.ffn_up.weight"),
            "the file has no tensor blk.0.ffn_up.weight",
        ),
        (
            &|sample| sample.add("blk.0.ffn_up.weight", &[64, 64], TensorType::Q4_1),
            "tensor blk.0.ffn_up.weight has shape [64, 64], expected [96, 64]",
        ),
        (
            &|sample| sample.add("blk.0.attn_q_norm.weight", &[16], TensorType::F32),
            "tensor blk.0.attn_q_norm.weight has no place in a llama model",
        ),
    ] {
        assert_eq!(error(change), expected);
    }
    let unmerged = error(&|sample| {
        sample.keys.insert("tokenizer.ggml.merges".into(), (9, texts(["x yz"])));
    });
    assert!(unmerged.starts_with("the file's tokenizer does not work: "), "{unmerged}");
}

#[test]
fn a_file_cut_off_anywhere_is_refused_with_the_place() {
    let bytes = Sample::llama().to_bytes();
    let step = 97;
    for len in (0..bytes.len() - 1).step_by(step).chain([bytes.len() - 1]) {
        let err = import_bytes(&bytes[..len], false).unwrap_err();
        match err {
            ImportError::Truncated { len: at, .. } => assert_eq!(at, len as u64),
            ImportError::NotGguf { .. } => assert!(len < 4),
            // A count is held against what is left of the file.
            ImportError::Malformed { .. } => assert!(err.to_string().contains("in a file of this size"), "{err}"),
            other => panic!("{len} bytes: {other}"),
        }
    }
}

#[test]
fn numbers_that_lie_do_not_allocate() {
    let bytes = Sample::llama().to_bytes();
    let with = |at: usize, value: u64| {
        let mut broken = bytes.clone();
        broken[at..at + 8].copy_from_slice(&value.to_le_bytes());
        import_bytes(&broken, false).unwrap_err().to_string()
    };
    let error = with(8, u64::MAX);
    assert!(error.starts_with("the number of tensors at byte 8 is 18446744073709551615, must be at most "), "{error}");
    let error = with(16, 1 << 60);
    assert!(error.starts_with("the number of keys at byte 16 is 1152921504606846976"), "{error}");
    let error = with(24, u64::MAX);
    assert!(error.starts_with("the file is cut off: a key needs 18446744073709551615 bytes at byte 32"), "{error}");

    let mut sample = Sample::llama();
    let list = [&4u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat();
    sample.keys.insert("general.languages".into(), (9, list));
    assert!(sample.error().starts_with("the value of general.languages at byte "), "{}", sample.error());

    let mut sample = Sample::llama();
    sample.tensors[0].1 = vec![1 << 40, 1 << 40];
    assert!(sample.error().contains("tensor token_embd.weight at byte "), "{}", sample.error());
    assert!(sample.error().contains("must be not empty, with rows of whole blocks of 32"), "{}", sample.error());
    sample.tensors[0].1 = vec![33, 2];
    assert!(sample.error().contains("Q8_0 of shape [2, 33]"), "{}", sample.error());
    sample.tensors[0].2 = 10;
    assert!(sample.error().contains("of type 10, must be one of F32 (0)"), "{}", sample.error());
}

#[test]
fn other_files_are_told_apart() {
    let error = |bytes: &[u8]| import_bytes(bytes, false).unwrap_err().to_string();
    assert_eq!(error(b"PK\x03\x04 a wheel"), r#"not a GGUF file: it begins with PK\x03\x04, not with "GGUF""#);
    assert_eq!(error(b""), r#"not a GGUF file: it begins with , not with "GGUF""#);
    assert_eq!(error(b"GGUF\0\0\0\x03"), "the version at byte 4 is big-endian, must be 2 or 3, little-endian");
    assert_eq!(error(b"GGUF\x01\0\0\0"), "the version at byte 4 is 1, must be 2 or 3, little-endian");
}

#[test]
fn a_checkpoint_is_replaced_only_by_force() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let import = |force| run(ImportArgs { file: file.clone(), dir: folder.path().into(), keep_quant: false, force });
    fs::write(&file, Sample::llama().to_bytes()).unwrap();
    import(false).unwrap();
    let before = fs::read(folder.path().join("model.safetensors")).unwrap();

    assert!(import(false).unwrap_err().to_string().ends_with("or replace it with --force"));
    fs::write(&file, b"GGUF").unwrap();
    import(true).unwrap_err();
    assert_eq!(fs::read(folder.path().join("model.safetensors")).unwrap(), before, "a broken file replaces nothing");
    let mut longer = Sample::llama();
    longer.set_int("llama.context_length", 1024);
    fs::write(&file, longer.to_bytes()).unwrap();
    import(true).unwrap();
    assert!(fs::read_to_string(folder.path().join("config.json")).unwrap().contains("1024"));

    fs::write(folder.path().join(SHARD_INDEX), "{}").unwrap();
    assert!(import(true).unwrap_err().to_string().contains("belongs to another checkpoint"));
}

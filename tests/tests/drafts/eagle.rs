//! EAGLE heads: over what a base makes of tokens, and drafting on by themselves.

use std::collections::BTreeMap;

use drafthorse_tests::close::{self, argmax, distance};
use drafthorse_tests::drafts::{DraftGolden, Drafting, HIDDEN};
use drafthorse_tests::families;
use drafthorse_tests::tiny::{Golden, VOCAB};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A tensor of a checkpoint: its numbers, or bytes as they are.
#[derive(Clone)]
struct Part {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Part {
    fn floats(shape: &[usize], values: Vec<f32>) -> Self {
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        Part { dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }

    fn values(&self) -> Vec<f32> {
        self.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}

/// A golden's head, as a checkpoint that may be changed, and its base.
struct Head {
    golden: DraftGolden,
    base: TempDir,
    config: Value,
    tensors: BTreeMap<String, Part>,
    /// What is made of the hidden states that it reads.
    order: fn(&mut Vec<&[f32]>),
}

fn shapes(value: Value) -> BTreeMap<String, Vec<usize>> {
    serde_json::from_value(value).unwrap()
}

impl Head {
    fn read(name: &str) -> Self {
        let golden = DraftGolden::read(name);
        let of_base = shapes(golden.about("base_tensors")).into_iter().map(|(name, shape)| {
            let values = families::values(&name, shape.iter().product());
            (name, shape, values)
        });
        let base = families::write(&golden.about("base"), of_base);
        let mut tensors: BTreeMap<String, Part> = BTreeMap::new();
        for (name, shape) in shapes(golden.about("tensors")) {
            let values = families::values(&format!("draft.{name}"), shape.iter().product());
            tensors.insert(name, Part::floats(&shape, values));
        }
        if let Ok(d2t) = golden.tensors().tensor("d2t") {
            let (dtype, shape, bytes) = (d2t.dtype(), d2t.shape().to_vec(), d2t.data().to_vec());
            tensors.insert("d2t".into(), Part { dtype, shape, bytes });
            tensors.insert("t2d".into(), Part { dtype: Dtype::BOOL, shape: vec![VOCAB], bytes: vec![1; VOCAB] });
        }
        let config = golden.about("config");
        Head { golden, base, config, tensors, order: |_| () }
    }

    fn config(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    /// Every tensor whose name has `part` in it holds `number` alone.
    fn filled(mut self, part: &str, number: f32) -> Self {
        let named = self.tensors.iter_mut().filter(|(name, _)| name.contains(part));
        let filled =
            named.map(|(_, part)| *part = Part::floats(&part.shape, vec![number; part.values().len()])).count();
        assert!(filled > 0, "{part}");
        self
    }

    fn without(mut self, part: &str) -> Self {
        self.tensors.retain(|name, _| !name.contains(part));
        self
    }

    fn with(mut self, name: &str, part: Part) -> Self {
        self.tensors.insert(name.into(), part);
        self
    }

    /// All tensors under other names, and matrices turned if they are to be.
    fn renamed(mut self, name: impl Fn(&str) -> String, turn: bool) -> Self {
        let renamed = |(old, part): (&String, &Part)| match part.shape[..] {
            [rows, cols] if turn && part.dtype == Dtype::F32 && !old.contains("embed_tokens") => {
                let values = part.values();
                let turned = (0..rows * cols).map(|i| values[i % rows * cols + i / rows]).collect();
                (name(old), Part::floats(&[cols, rows], turned))
            }
            _ => (name(old), part.clone()),
        };
        self.tensors = self.tensors.iter().map(renamed).collect();
        self
    }

    fn checkpoint(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let views = self.tensors.iter().map(|(name, part)| {
            let view = TensorView::new(part.dtype, part.shape.clone(), &part.bytes).unwrap();
            (name, view)
        });
        serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
        std::fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        folder
    }

    fn load(&self) -> Drafting {
        Drafting::load(self.base.path(), self.checkpoint().path(), "eagle").unwrap()
    }

    /// All logits, and the drafts that come of them.
    fn run(&self) -> (Vec<f32>, Vec<i32>) {
        let (tokens, drafts) = (self.golden.ints("tokens"), self.golden.ints("drafts"));
        let mut drafting = self.load();
        let features = drafting.features(&tokens, self.order);
        assert_eq!(features.len() % (tokens.len() * HIDDEN), 0);
        let logits = drafting.logits(&tokens, &features, &drafts[..drafts.len() - 1], 0);
        let width = self.golden.floats("logits").len() / (tokens.len() - 1);
        let rows = logits.chunks(width).skip(tokens.len() - 2);
        let made = rows.map(|row| drafting.token(argmax(row))).collect();
        (logits, made)
    }

    fn logits(&self) -> Vec<f32> {
        self.run().0
    }

    /// How far it is from what torch says.
    fn far(&self) -> f64 {
        distance(&self.logits(), &self.golden.wanted()).relative
    }

    /// Why it cannot be loaded, with its folder left out.
    fn refusal(&self, method: &str) -> String {
        let folder = self.checkpoint();
        let loaded = Drafting::load(self.base.path(), folder.path(), method);
        loaded
            .err()
            .map_or("loaded".into(), |error| error.to_string().replace(&folder.path().display().to_string(), "DIR"))
    }
}

const NAMES: [&str; 3] = ["eagle", "eagle_bias", "eagle3"];

/// By the names of their goldens. The drafts that come of them are checked.
pub fn logits_of_all() -> Vec<(&'static str, Vec<f32>)> {
    let of_head = |name| {
        let head = Head::read(name);
        let (logits, drafts) = head.run();
        assert_eq!(drafts, head.golden.ints("drafts"), "{name}");
        (name, logits)
    };
    NAMES.into_iter().map(of_head).collect()
}

pub fn without() -> Vec<crate::Without> {
    let head = Head::read;
    let in_order = |order: fn(&mut Vec<&[f32]>)| Head { order, ..head("eagle3") };
    let another = || Part::floats(&[HIDDEN], families::values("another norm", HIDDEN));
    let mut all: Vec<crate::Without> = [
        ("eagle", "an embedding of its own", head("eagle").without("embed_tokens")),
        ("eagle", "attention", head("eagle").filled("o_proj", 0.0)),
        ("eagle", "the norm after attention", head("eagle").filled("post_attention_layernorm", 1.0)),
        ("eagle", "the mlp", head("eagle").filled("down_proj", 0.0)),
        ("eagle", "its rope base", head("eagle").config("rope_theta", json!(100.0))),
        ("eagle_bias", "the bias of fc", head("eagle_bias").filled("fc.bias", 0.0)),
        ("eagle3", "the order of layers", in_order(|parts| parts.swap(0, 2))),
        ("eagle3", "the second layer", in_order(|parts| parts[1] = parts[0])),
        ("eagle3", "the usual layers", head("eagle3").config("eagle_aux_hidden_state_layer_ids", json!([1, 3, 4]))),
        ("eagle3", "the norm of hidden states", head("eagle3").filled("hidden_norm", 1.0)),
        ("eagle3", "the norm of tokens", head("eagle3").filled("input_layernorm", 1.0)),
        ("eagle3", "the residual before its norm", head("eagle3").config("norm_before_residual", json!(true))),
        ("eagle3", "the last norm", head("eagle3").with("norm.weight", another())),
        ("eagle3", "its rope base", head("eagle3").config("rope_theta", json!(10_000.0))),
    ]
    .into_iter()
    .map(|(name, what, head)| (name, what, head.far()))
    .collect();
    for name in NAMES {
        // One position too far, and a key is seen of which nothing was written.
        let head = head(name);
        let (tokens, drafts) = (head.golden.ints("tokens"), head.golden.ints("drafts"));
        let mut drafting = head.load();
        let features = drafting.features(&tokens, head.order);
        let shifted = drafting.logits(&tokens, &features, &drafts[..3], 1);
        all.push((name, "its positions", distance(&shifted, &head.golden.wanted()).relative));
    }
    all
}

#[test]
fn draft_tokens_as_they_are_would_be_others() {
    let zeros = Part { dtype: Dtype::I64, shape: vec![40], bytes: vec![0; 320] };
    let (logits, drafts) = Head::read("eagle3").with("d2t", zeros).run();
    let head = Head::read("eagle3");
    assert_ne!(drafts, head.golden.ints("drafts"));
    assert!(distance(&logits, &head.golden.wanted()).relative < close::F32);
}

#[test]
fn eagle_1_has_no_norm_before_its_layer_whatever_is_stored() {
    let part = Part::floats(&[HIDDEN], families::values("norm", HIDDEN));
    assert!(Head::read("eagle").with("layers.0.input_layernorm.weight", part).far() < close::F32);
}

#[test]
fn heads_of_other_names_are_the_same() {
    let same = |name: &str, renamed: Head| {
        let want = Head::read(name).run();
        assert!(renamed.run() == want, "{name}");
    };
    for name in ["eagle", "eagle_bias"] {
        same(name, Head::read(name).renamed(|name| format!("model.{name}"), false));
        // As PaddleNLP has it: matrices turned.
        same(name, Head::read(name).renamed(|name| format!("llama.{name}"), true));
    }
    let root = |name: &str| ["lm_head", "d2t", "t2d"].iter().any(|part| name.starts_with(part));
    let in_model = |name: &str| if root(name) { name.to_owned() } else { format!("model.{name}") };
    same("eagle3", Head::read("eagle3").renamed(in_model, false));
    let numbered = |name: &str| name.replace("midlayer", "layers.0");
    same("eagle3", Head::read("eagle3").renamed(numbered, false));
    same("eagle3", Head::read("eagle3").renamed(|name| format!("model.{}", numbered(name)), false));
}

#[test]
fn a_config_names_the_layers_in_either_way() {
    let want = Head::read("eagle3").run();
    let key = "eagle_aux_hidden_state_layer_ids";
    for named in [json!([2, 3, 4]), json!([4, 2, 3])] {
        assert!(Head::read("eagle3").config(key, named).run() == want);
    }
    let outputs = json!({key: [1, 2, 3], "use_aux_hidden_state": true});
    assert!(Head::read("eagle3").config("eagle_config", outputs).run() == want);
}

#[test]
fn what_cannot_be_used_is_named() {
    let head = Head::read;
    let zeros = |shape: &[usize]| Part::floats(shape, vec![0.0; shape.iter().product()]);
    assert_eq!(
        head("eagle").refusal("mtp"),
        "draft DIR: it is an EAGLE head, which speculate_method eagle is for, not mtp"
    );
    assert_eq!(
        head("eagle3").refusal("mtp"),
        "draft DIR: it is an EAGLE-3 head, which speculate_method eagle is for, not mtp"
    );
    let mtp = head("eagle").renamed(|name| name.replace("fc.", "model.layers.7.eh_proj."), false);
    assert_eq!(mtp.refusal("eagle"), "draft DIR: it is an MTP module, which speculate_method mtp is for, not eagle");
    assert_eq!(head("eagle").without("fc").refusal("eagle"), "DIR has no tensor fc.weight: it is not an EAGLE head");
    assert_eq!(
        head("eagle").without("fc").refusal("mtp"),
        "DIR has no tensor NAME.eh_proj.weight: it is not an MTP module"
    );
    assert_eq!(
        head("eagle").config("vocab_size", json!(97)).refusal("eagle"),
        "draft DIR: vocab_size is 97, the base has 96: it is a draft for another model"
    );
    assert_eq!(
        head("eagle3").config("hidden_size", json!(128)).refusal("eagle"),
        "draft DIR: hidden_size is 128, the base has 64: it is a draft for another model"
    );
    assert_eq!(
        head("eagle").without("up_proj").without("o_proj").refusal("eagle"),
        "DIR: layers.0.self_attn.o_proj.weight is missing; layers.0.mlp.up_proj.weight is missing"
    );
    assert_eq!(
        head("eagle3").without("hidden_norm").without("input_layernorm").refusal("eagle"),
        "DIR: midlayer.input_layernorm.weight is missing; midlayer.hidden_norm.weight is missing"
    );
    assert_eq!(
        head("eagle").with("fc.weight", zeros(&[64, 100])).refusal("eagle"),
        "DIR: fc.weight has shape [64, 100], expected [64, 128]"
    );
    // Three layers' hidden states without what else makes an EAGLE-3 head.
    assert_eq!(
        head("eagle").with("fc.weight", zeros(&[64, 192])).refusal("eagle"),
        "DIR: fc.weight has shape [64, 192], expected [64, 128]"
    );
    assert_eq!(
        head("eagle3").with("fc.weight", zeros(&[64, 128])).refusal("eagle"),
        "DIR: fc.weight has shape [64, 128], expected [64, 192]"
    );
    assert_eq!(
        head("eagle").config("intermediate_size", json!(98)).refusal("eagle"),
        "DIR: layers.0.mlp.down_proj.weight has shape [64, 96], expected [64, 98]; \
         layers.0.mlp.gate_proj.weight has shape [96, 64], expected [98, 64]; \
         layers.0.mlp.up_proj.weight has shape [96, 64], expected [98, 64]"
    );
    assert_eq!(
        head("eagle").config("num_hidden_layers", json!(2)).refusal("eagle"),
        "config.json: num_hidden_layers is 2, supported: 1 in an EAGLE head"
    );
}

#[test]
fn layers_and_tokens_that_the_base_has_not_are_refused() {
    let head = || Head::read("eagle3");
    let key = "eagle_aux_hidden_state_layer_ids";
    let range = "supported: two and more, each once, inputs of layers up to 7: the base has so many";
    assert_eq!(
        head().config(key, json!([2, 3, 8])).refusal("eagle"),
        format!("config.json: {key} is inputs of 2, 3, 8, {range}")
    );
    assert_eq!(
        head().config("eagle_config", json!({key: [1, 2, 7]})).refusal("eagle"),
        format!("config.json: {key} is inputs of 2, 3, 8, {range}")
    );
    assert_eq!(
        head().config(key, json!([2, 2, 3])).refusal("eagle"),
        format!("config.json: {key} is inputs of 2, 2, 3, {range}")
    );
    assert_eq!(
        head().config(key, json!([2, -1, 3])).refusal("eagle"),
        format!("config.json: {key} is [2,-1,3], supported: a list of layers, counted from 0")
    );
    assert_eq!(
        head().config(key, json!([2, 7])).refusal("eagle"),
        "DIR: fc.weight has shape [64, 192], expected [64, 128]"
    );
    assert_eq!(
        head().config("norm_before_fc", json!(true)).refusal("eagle"),
        "config.json: norm_before_fc is true, supported: false"
    );
    let d2t = |last: i64| {
        let bytes = (0..40).flat_map(|i: i64| (if i == 39 { last } else { 1 }).to_le_bytes()).collect();
        head().with("d2t", Part { dtype: Dtype::I64, shape: vec![40], bytes })
    };
    assert_eq!(d2t(57).refusal("eagle"), "d2t[39] stands for token 96, expected 0 to below 96");
    assert_eq!(d2t(-40).refusal("eagle"), "d2t[39] stands for token -1, expected 0 to below 96");
    assert_eq!(d2t(56).refusal("eagle"), "loaded");
    assert_eq!(
        head().without("d2t").refusal("eagle"),
        "DIR: d2t is missing; lm_head.weight has shape [40, 64], expected [96, 64]"
    );
    assert_eq!(head().config("draft_vocab_size", json!(41)).refusal("eagle"), "DIR: d2t has shape [40], expected [41]");
    let t2d = Part { dtype: Dtype::BOOL, shape: vec![95], bytes: vec![1; 95] };
    assert_eq!(head().with("t2d", t2d).refusal("eagle"), "DIR: t2d has shape [95], expected [96]");
    // Without the usual layers, of a base that is too small for them.
    let base = Golden::read("untied").checkpoint(|_| ());
    assert_eq!(
        Head { base, ..head() }.refusal("eagle"),
        format!("config.json: {key} is missing, supported: layers to read: a base of 2 has not the usual ones")
    );
}

//! MTP modules: over given hidden states, and drafting on by themselves.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use drafthorse_tests::close::distance;
use drafthorse_tests::drafts::{DraftGolden, Drafting};
use drafthorse_tests::families::{self, Family};
use drafthorse_tests::tiny::Golden;
use safetensors::tensor::serialize_to_file;
use serde_json::{Value, json};
use tempfile::TempDir;

/// The module as a checkpoint of its own, with its config changed.
fn checkpoint(golden: &DraftGolden, change: impl FnOnce(&mut Value)) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut config = Golden::read("tied").config;
    change(&mut config);
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let of_module = golden.tensors();
    let of_module = of_module.tensors().into_iter().filter(|(name, _)| name.starts_with("model."));
    serialize_to_file(of_module, None, &folder.path().join("model.safetensors")).unwrap();
    folder
}

/// All logits: over the golden's pairs in chunks, then of the drafts that follow. Everything stands `shift` positions too far.
fn logits(golden: &DraftGolden, base: &Path, draft: &Path, shift: usize) -> Vec<f32> {
    let (tokens, hidden) = (golden.ints("tokens"), golden.floats("hidden"));
    Drafting::load(base, draft, "mtp").unwrap().logits(&tokens, &hidden, &golden.ints("drafts"), shift)
}

/// Logits of the module with a Llama layer.
fn llama(change: impl FnOnce(&mut Value), shift: usize) -> Vec<f32> {
    let golden = DraftGolden::read("mtp");
    let base = Golden::read("tied").checkpoint(|_| ());
    let draft = checkpoint(&golden, change);
    logits(&golden, base.path(), draft.path(), shift)
}

type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

/// DeepSeek's module, as it lies in the base's checkpoint: names, shapes, numbers.
fn deepseek_module(golden: &DraftGolden) -> Tensors {
    let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_value(golden.about("tensors")).unwrap();
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let values = families::values(&name, shape.iter().product());
        (name, shape, values)
    };
    shapes.into_iter().map(tensor).collect()
}

/// The module as PaddleNLP has it apart: other names, linear layers turned, one layer in the config.
fn as_paddle(tensors: Tensors) -> Tensors {
    let renamed = |(name, shape, values): (String, Vec<usize>, Vec<f32>)| {
        let name = name.strip_prefix("model.layers.3.").unwrap();
        let at = match name {
            "shared_head.norm.weight" => "norm.weight".to_owned(),
            "enorm.weight" | "hnorm.weight" | "eh_proj.weight" => name.to_owned(),
            _ => format!("layers.0.{name}"),
        };
        let name = format!("deepseek_v3_mtp.{at}");
        match shape[..] {
            [rows, cols] => {
                let turned = (0..rows * cols).map(|i| values[i % rows * cols + i / rows]).collect();
                (name, vec![cols, rows], turned)
            }
            _ => (name, shape, values),
        }
    };
    tensors.into_iter().map(renamed).collect()
}

/// Logits of DeepSeek's module, in the base's checkpoint and apart.
fn deepseek(change: impl Fn(&mut Value), tensor: impl Fn(&str, &mut [f32])) -> [Vec<f32>; 2] {
    let golden = DraftGolden::read("deepseek");
    let family = Family::read("deepseek_v3");
    let mut config = family.config.clone();
    config["num_nextn_predict_layers"] = json!(1);
    change(&mut config);
    let mut module = deepseek_module(&golden);
    module.iter_mut().for_each(|(name, _, values)| tensor(name, values));
    let of_base = family
        .shapes
        .iter()
        .map(|(name, shape)| (name.clone(), shape.clone(), families::values(name, shape.iter().product())));
    let base = families::write(&config, of_base.chain(module.clone()));
    let inside = logits(&golden, base.path(), base.path(), 0);
    config["num_hidden_layers"] = json!(1);
    let apart = families::write(&config, as_paddle(module).into_iter());
    [inside, logits(&golden, base.path(), apart.path(), 0)]
}

/// By the names of their goldens.
pub fn logits_of_all() -> Vec<(&'static str, Vec<f32>)> {
    let [inside, apart] = deepseek(|_| (), |_, _| ());
    assert!(inside == apart, "two names of one module");
    vec![("mtp", llama(|_| (), 0)), ("deepseek", inside)]
}

pub fn without() -> Vec<crate::Without> {
    let want = DraftGolden::read("mtp").wanted();
    let far = |what, got: Vec<f32>| ("mtp", what, distance(&got, &want).relative);
    let mut all = vec![
        far("its eps", llama(|config| config["rms_norm_eps"] = 0.1.into(), 0)),
        far("its rope base", llama(|config| config["rope_theta"] = 100.0.into(), 0)),
        // One position too far, and a key is seen of which nothing was written.
        far("its positions", llama(|_| (), 1)),
    ];
    let want = DraftGolden::read("deepseek").wanted();
    let mut far = |what, got: [Vec<f32>; 2]| all.push(("deepseek", what, distance(&got[0], &want).relative));
    far("routed scaling", deepseek(|config| config["routed_scaling_factor"] = json!(1.0), |_, _| ()));
    far("mscale_all_dim", deepseek(|config| config["rope_scaling"]["mscale_all_dim"] = json!(0.5), |_, _| ()));
    for (part, number) in [("enorm", 1.0), ("hnorm", 1.0), ("shared_head.norm", 1.0), ("e_score_correction_bias", 0.0)]
    {
        let tensor = move |name: &str, values: &mut [f32]| {
            if name.contains(part) {
                values.fill(number);
            }
        };
        far(part, deepseek(|_| (), tensor));
    }
    all
}

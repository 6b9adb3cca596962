//! DeepSeek's attention in both its forms, its checkpoints in 8-bit floats, and what is refused.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::fs;

use drafthorse_model::{LoadOptions, MlaForm};
use drafthorse_tests::close::{self, assert_close, distance};
use drafthorse_tests::families::{self, Family};
use drafthorse_tests::runner::Runner;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};
use tempfile::TempDir;

fn runner(folder: &TempDir, form: MlaForm, max_len: usize) -> Runner {
    let options = LoadOptions { mla_form: form, ..LoadOptions::default() };
    Runner::load(folder.path(), &options, max_len).unwrap()
}

#[test]
fn every_form_has_the_logits_of_transformers() {
    for name in ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3"] {
        let family = Family::read(name);
        let folder = family.checkpoint();
        let [absorbed, expanded, by_phase] = [MlaForm::Absorbed, MlaForm::Expanded, MlaForm::ByPhase].map(|form| {
            let mut runner = runner(&folder, form, family.tokens.len());
            let whole = runner.run(&family.tokens).unwrap();
            assert_close(&format!("{name}, {form:?}"), &whole, &family.logits, close::F32);
            runner.reset();
            let chunks = runner.run_in_chunks(&family.tokens, &[40, 1, 1, 5, 30, 1]).unwrap();
            assert_close(&format!("{name}, {form:?}, in chunks"), &chunks, &family.logits, close::F32);
            assert!(form == MlaForm::ByPhase || chunks == whole, "{name}, {form:?}: the bits of the whole");
            whole
        });
        let apart = distance(&absorbed, &expanded).relative;
        assert!(apart > 0.0 && apart < 1e-3, "{name}: {apart:e}");
        assert!(by_phase == expanded, "{name}: a prompt is expanded");
    }
}

/// All numbers of e4m3 from 0 up.
fn numbers() -> Vec<f32> {
    let number = |code: i32| match (code >> 3, (code & 7) as f32 / 8.0) {
        (0, mantissa) => mantissa / 64.0,
        (exponent, mantissa) => (1.0 + mantissa) * 2f32.powi(exponent - 7),
    };
    (0..127).map(number).collect()
}

/// Codes of a matrix, the scales of its blocks, and what they stand for.
fn quantize(values: &[f32], cols: usize) -> (Vec<u8>, Vec<f32>, Vec<f32>) {
    const BLOCK: usize = 128;
    let (numbers, across) = (numbers(), cols.div_ceil(BLOCK));
    let block = |i: usize| i / cols / BLOCK * across + i % cols / BLOCK;
    let mut scales = vec![0f32; (values.len() / cols).div_ceil(BLOCK) * across];
    for (i, value) in values.iter().enumerate() {
        scales[block(i)] = scales[block(i)].max(value.abs() / 448.0);
    }
    let code = |(i, value): (usize, &f32)| {
        let size = value.abs() / scales[block(i)];
        let above = numbers.partition_point(|&number| number < size).clamp(1, 126);
        let nearest = if size - numbers[above - 1] < numbers[above] - size { above - 1 } else { above };
        nearest as u8 | if *value < 0.0 { 128 } else { 0 }
    };
    let codes: Vec<u8> = values.iter().enumerate().map(code).collect();
    let dequantized = codes.iter().enumerate().map(|(i, code)| {
        let size = numbers[usize::from(code & 127)] * scales[block(i)];
        if code & 128 == 0 { size } else { -size }
    });
    let dequantized = dequantized.collect();
    (codes, scales, dequantized)
}

/// DeepSeek-V3 as published, in blocks of 8-bit floats; and the same in plain ones.
fn in_blocks(family: &Family) -> [TempDir; 2] {
    let mut stored: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    let mut plain = Vec::new();
    let bytes = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|value| value.to_le_bytes()).collect() };
    for (name, shape) in &family.shapes {
        let values = families::values(name, shape.iter().product());
        let is_linear = name.contains("_proj") && shape.len() == 2;
        if !is_linear {
            stored.push((name.clone(), Dtype::F32, shape.clone(), bytes(&values)));
            plain.push((name.clone(), shape.clone(), values));
            continue;
        }
        let (codes, scales, dequantized) = quantize(&values, shape[1]);
        let blocks = shape.iter().map(|size| size.div_ceil(128)).collect();
        stored.push((name.clone(), Dtype::F8_E4M3, shape.clone(), codes));
        stored.push((format!("{name}_scale_inv"), Dtype::F32, blocks, bytes(&scales)));
        plain.push((name.clone(), shape.clone(), dequantized));
    }
    let mut config = family.config.clone();
    let folder = families::write(&config, plain.into_iter());
    config["quantization_config"] = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128]});
    let quantized = tempfile::tempdir().unwrap();
    let views =
        stored.iter().map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    serialize_to_file(views, None, &quantized.path().join("model.safetensors")).unwrap();
    fs::write(quantized.path().join("config.json"), config.to_string()).unwrap();
    [quantized, folder]
}

#[test]
fn a_checkpoint_in_8_bit_floats_is_what_its_numbers_are() {
    let family = Family::read("deepseek_v3");
    let [quantized, plain] = in_blocks(&family);
    let [got, want] = [quantized, plain].map(|folder| {
        let mut runner = runner(&folder, MlaForm::Absorbed, family.tokens.len());
        let whole = runner.run(&family.tokens).unwrap();
        runner.reset();
        assert!(runner.run_in_chunks(&family.tokens, &[7, 1, 50, 1]).unwrap() == whole, "the bits of the whole");
        whole
    });
    assert_close("in blocks", &got, &want, close::F32);
    assert!(distance(&got, &family.logits).relative > 1e-3, "numbers were rounded");
}

#[test]
fn what_cannot_be_run_is_refused_by_name() {
    let family = Family::read("deepseek_v2");
    let refusal = |change: &dyn Fn(&mut Value)| {
        let folder = family.changed(change, |_, _| ());
        let error = Runner::load(folder.path(), &LoadOptions::default(), 8).err().unwrap().to_string();
        error.replace(&folder.path().display().to_string(), "DIR")
    };
    let set = |key: &'static str, value: Value| refusal(&move |config| config[key] = value.clone());
    assert_eq!(set("kv_lora_rank", json!(40)), "config.json: kv_lora_rank is 40, supported: multiples of 16");
    assert_eq!(set("q_lora_rank", json!("many")), r"config.json: q_lora_rank is many, supported: whole numbers from 0");
    assert_eq!(set("v_head_dim", json!(null)), "config.json has no v_head_dim");
    assert_eq!(
        set("topk_method", json!("best")),
        "config.json: topk_method is best, supported: greedy, group_limited_greedy, noaux_tc"
    );
    assert_eq!(set("scoring_func", json!("tanh")), "config.json: scoring_func is tanh, supported: softmax, sigmoid");
    assert_eq!(set("n_group", json!(null)), "config.json has no n_group");
    assert_eq!(
        set("rope_scaling", json!({"rope_type": "spiral"})),
        "config.json: rope_scaling.rope_type is spiral, supported: default, linear, dynamic, llama3, yarn"
    );
    assert_eq!(
        set("topk_method", json!("noaux_tc")),
        "DIR: model.layers.1.mlp.gate.e_score_correction_bias is missing; \
         model.layers.2.mlp.gate.e_score_correction_bias is missing"
    );
    let missing = set("n_routed_experts", json!(20));
    assert!(missing.contains("model.layers.1.mlp.experts.16.gate_proj.weight is missing"), "{missing}");
    let method = json!({"quant_method": "bitsandbytes"});
    assert_eq!(
        set("quantization_config", method),
        "config.json: quantization_config.quant_method is bitsandbytes, supported: gguf_blocks, fp8, awq, gptq"
    );
}

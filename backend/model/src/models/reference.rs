//! A Llama in f64 without a cache, a batch or a kernel: what the real one is compared with.

use crate::testing::Tiny;

/// The logits of all `tokens`.
pub(super) fn logits(tiny: &Tiny, tokens: &[i32]) -> Vec<f32> {
    let config = tiny.parsed();
    let (hidden, head_dim) = (config.hidden_size, config.head_dim);
    let group = config.num_heads / config.num_kv_heads;
    let eps = f64::from(config.rms_norm_eps);
    let embedding = matrix(tiny, "model.embed_tokens.weight", hidden);
    let mut residual: Vec<Vec<f64>> = tokens.iter().map(|&token| embedding[token as usize].clone()).collect();

    for layer in 0..config.num_layers {
        let at = format!("model.layers.{layer}");
        let x: Vec<_> =
            residual.iter().map(|row| norm(row, &vector(tiny, &format!("{at}.input_layernorm.weight")), eps)).collect();
        let project = |name: &str| linear(tiny, &format!("{at}.self_attn.{name}"), &x, hidden);
        let (mut q, mut k, v) = (project("q_proj"), project("k_proj"), project("v_proj"));
        for rows in [&mut q, &mut k] {
            for (position, row) in rows.iter_mut().enumerate() {
                row.chunks_mut(head_dim).for_each(|head| rotate(head, position, config.rope.theta));
            }
        }
        let mut attended = vec![vec![0.0; config.num_heads * head_dim]; tokens.len()];
        for t in 0..tokens.len() {
            for h in 0..config.num_heads {
                let (of_q, of_kv) =
                    (h * head_dim..(h + 1) * head_dim, h / group * head_dim..(h / group + 1) * head_dim);
                let score = |s: usize| dot(&q[t][of_q.clone()], &k[s][of_kv.clone()]) / (head_dim as f64).sqrt();
                let weights: Vec<f64> = (0..=t).map(|s| score(s).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (s, weight) in weights.iter().enumerate() {
                    for (y, v) in attended[t][of_q.clone()].iter_mut().zip(&v[s][of_kv.clone()]) {
                        *y += weight / total * v;
                    }
                }
            }
        }
        add(&mut residual, &linear(tiny, &format!("{at}.self_attn.o_proj"), &attended, config.num_heads * head_dim));

        let weight = vector(tiny, &format!("{at}.post_attention_layernorm.weight"));
        let x: Vec<_> = residual.iter().map(|row| norm(row, &weight, eps)).collect();
        let mut gate = linear(tiny, &format!("{at}.mlp.gate_proj"), &x, hidden);
        let up = linear(tiny, &format!("{at}.mlp.up_proj"), &x, hidden);
        for (gate, up) in gate.iter_mut().flatten().zip(up.iter().flatten()) {
            *gate = *gate / (1.0 + (-*gate).exp()) * up;
        }
        add(&mut residual, &linear(tiny, &format!("{at}.mlp.down_proj"), &gate, config.intermediate_size));
    }
    let weight = vector(tiny, "model.norm.weight");
    let x: Vec<_> = residual.iter().map(|row| norm(row, &weight, eps)).collect();
    let head = if config.tie_word_embeddings { "model.embed_tokens" } else { "lm_head" };
    linear(tiny, head, &x, hidden).into_iter().flatten().map(|logit| logit as f32).collect()
}

fn vector(tiny: &Tiny, name: &str) -> Vec<f64> {
    tiny.values(name).into_iter().map(f64::from).collect()
}

fn matrix(tiny: &Tiny, name: &str, cols: usize) -> Vec<Vec<f64>> {
    vector(tiny, name).chunks(cols).map(<[f64]>::to_vec).collect()
}

fn linear(tiny: &Tiny, name: &str, x: &[Vec<f64>], inputs: usize) -> Vec<Vec<f64>> {
    let weight = matrix(tiny, &format!("{name}.weight"), inputs);
    let bias = format!("{name}.bias");
    let bias = if tiny.tensors.contains_key(&bias) { vector(tiny, &bias) } else { vec![0.0; weight.len()] };
    x.iter().map(|x| weight.iter().zip(&bias).map(|(w, b)| dot(w, x) + b).collect()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

fn rotate(head: &mut [f64], position: usize, theta: f64) {
    let half = head.len() / 2;
    for i in 0..half {
        let angle = position as f64 * theta.powf(-(i as f64) / half as f64);
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * angle.cos() - b * angle.sin();
        head[i + half] = b * angle.cos() + a * angle.sin();
    }
}

fn add(residual: &mut [Vec<f64>], x: &[Vec<f64>]) {
    for (residual, x) in residual.iter_mut().flatten().zip(x.iter().flatten()) {
        *residual += x;
    }
}

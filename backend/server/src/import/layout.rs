//! Which tensor of a file becomes which tensor of a Hugging Face checkpoint.

use super::config::{Architecture, Config};
use super::error::{ImportError, Result};
use super::gguf::{Head, TensorInfo};

/// Stretches of the rotary frequencies; [`Config`] takes them in, the checkpoint has no place for them.
pub const ROPE_FREQS: &str = "rope_freqs.weight";

/// A tensor with its new name.
#[derive(Clone, Debug, PartialEq)]
pub struct Move<'a> {
    pub from: &'a TensorInfo,
    /// Without `.weight` or `.bias`: `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// `weight` or `bias`.
    pub field: &'static str,
    /// Whether its rows stand in llama.cpp's rotary order, and so must be put back, head by head.
    pub interleaved: bool,
    /// Modules with the same name here are multiplied together, so they must be stored alike; empty for those that stand alone.
    pub group: String,
}

/// All tensors that the model needs, in the order of its layers.
///
/// # Errors
/// If one is missing, has another shape than the keys say, or is left over.
pub fn moves<'a>(head: &'a Head, config: &Config) -> Result<Vec<Move<'a>>> {
    let mut plan = Plan { head, moves: Vec::new(), interleaved: config.architecture == Architecture::Llama };
    let Config { hidden, intermediate, vocab, .. } = *config;
    let (q_rows, kv_rows) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);

    plan.take("token_embd", "model.embed_tokens", "weight", &[vocab, hidden], "")?;
    for layer in 0..config.num_layers {
        let (from, to) = (format!("blk.{layer}"), format!("model.layers.{layer}"));
        let (attention, mlp) = (format!("{to}.self_attn"), format!("{to}.mlp"));
        plan.take(&format!("{from}.attn_norm"), &format!("{to}.input_layernorm"), "weight", &[hidden], "")?;
        // Qwen2's output has no bias even though its q, k and v have.
        let output_bias = config.attention_bias && config.architecture == Architecture::Llama;
        for (name, module, rows, columns, bias, group) in [
            ("attn_q", format!("{attention}.q_proj"), q_rows, hidden, config.attention_bias, "qkv"),
            ("attn_k", format!("{attention}.k_proj"), kv_rows, hidden, config.attention_bias, "qkv"),
            ("attn_v", format!("{attention}.v_proj"), kv_rows, hidden, config.attention_bias, "qkv"),
            ("attn_output", format!("{attention}.o_proj"), hidden, q_rows, output_bias, ""),
            ("ffn_gate", format!("{mlp}.gate_proj"), intermediate, hidden, config.mlp_bias, "gate_up"),
            ("ffn_up", format!("{mlp}.up_proj"), intermediate, hidden, config.mlp_bias, "gate_up"),
            ("ffn_down", format!("{mlp}.down_proj"), hidden, intermediate, config.mlp_bias, ""),
        ] {
            let group = if group.is_empty() { String::new() } else { format!("{to}.{group}") };
            let name = format!("{from}.{name}");
            plan.take(&name, &module, "weight", &[rows, columns], &group)?;
            if bias {
                plan.take(&name, &module, "bias", &[rows], "")?;
            }
        }
        plan.take(&format!("{from}.ffn_norm"), &format!("{to}.post_attention_layernorm"), "weight", &[hidden], "")?;
    }
    plan.take("output_norm", "model.norm", "weight", &[hidden], "")?;
    if !config.tied {
        plan.take("output", "lm_head", "weight", &[vocab, hidden], "")?;
    }
    plan.finish(config)
}

struct Plan<'a> {
    head: &'a Head,
    moves: Vec<Move<'a>>,
    interleaved: bool,
}

impl<'a> Plan<'a> {
    fn take(&mut self, name: &str, module: &str, field: &'static str, shape: &[u64], group: &str) -> Result<()> {
        let name = format!("{name}.{field}");
        let Some(from) = self.head.tensor(&name) else { return Err(ImportError::MissingTensor { name }) };
        if from.shape != shape {
            return Err(ImportError::TensorShape { name, got: from.shape.clone(), want: shape.into() });
        }
        let interleaved = self.interleaved && (module.ends_with("q_proj") || module.ends_with("k_proj"));
        self.moves.push(Move { from, module: module.into(), field, interleaved, group: group.into() });
        Ok(())
    }

    /// Refuses tensors that have no place: a model that ignored them would answer something else.
    fn finish(self, config: &Config) -> Result<Vec<Move<'a>>> {
        let taken: std::collections::HashSet<_> = self.moves.iter().map(|found| found.from.name.as_str()).collect();
        let surplus = |tensor: &&TensorInfo| tensor.name != ROPE_FREQS && !taken.contains(tensor.name.as_str());
        match self.head.tensors().iter().find(surplus) {
            None => Ok(self.moves),
            Some(tensor) => {
                Err(ImportError::SurplusTensor { name: tensor.name.clone(), architecture: config.architecture.name() })
            }
        }
    }
}

/// Undoes llama.cpp's order of the rows of q and k, in place: it stores row `j` and row `j + head_dim / 2` of a head side by
/// side, so that its rotation turns neighbours. `bytes` are whole heads of `head_dim` rows.
pub fn deinterleave(bytes: &mut [u8], head_dim: usize, row_bytes: usize) {
    let mut ordered = vec![0; head_dim * row_bytes];
    for head in bytes.chunks_exact_mut(head_dim * row_bytes) {
        for (stored, row) in head.chunks_exact(row_bytes).enumerate() {
            let place = stored % 2 * (head_dim / 2) + stored / 2;
            ordered[place * row_bytes..][..row_bytes].copy_from_slice(row);
        }
        head.copy_from_slice(&ordered);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_each_head_go_back_to_halves() {
        // One letter a row, two heads of six rows; stored as (a A b B c C) where the halves are (a b c) and (A B C).
        let mut rows = *b"aAbBcCxXyYzZ";
        deinterleave(&mut rows, 6, 1);
        assert_eq!(std::str::from_utf8(&rows).unwrap(), "abcABCxyzXYZ");

        let mut wide = *b"00112233";
        deinterleave(&mut wide, 4, 2);
        assert_eq!(std::str::from_utf8(&wide).unwrap(), "00221133");
    }
}

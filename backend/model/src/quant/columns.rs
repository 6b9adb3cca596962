//! 4-bit weights that are stored input by input: what AWQ and GPTQ share.
//!
//! For a layer NAME of `[out, in]`, with `group` neighbouring inputs that share a scale and a zero point, `w = scale * (q - zero)`:
//!
//! | tensor         | dtype  | AWQ               | GPTQ              |
//! |----------------|--------|-------------------|-------------------|
//! | `NAME.qweight` | I32    | `[in, out / 8]`   | `[in / 8, out]`   |
//! | `NAME.qzeros`  | I32    | `[in / group, out / 8]` | the same    |
//! | `NAME.scales`  | floats | `[in / group, out]`     | the same    |
//!
//! Eight values lie in a word, the first in its lowest bits. The kernels want rows of outputs, so a part is turned around in memory.

use drafthorse_kernels::ops::matmul_int4::{Int4Weight, Offset};

use super::GroupSize;
use super::bf16::Unquantized;
use super::scheme::{Part, QuantScheme, QuantWeight};
use super::stream::{Piece, load_mixed, pieces};
use crate::config::StoredQuantization;
use crate::error::{ModelError, Result};
use crate::weights::{Slice, StoredDtype};

/// Values of a word.
const WORD: usize = 8;

/// How words are filled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packing {
    /// Values of a word of `qweight` are neighbouring inputs of one output, else outputs of one input.
    pub(super) words_of_inputs: bool,
    /// Which of eight neighbouring outputs each value of a word is.
    pub(super) order: [usize; WORD],
    /// What is added to stored zero points; the sum is of four bits.
    pub(super) zero_offset: u8,
}

/// A scheme of this kind.
pub(super) struct Columns {
    pub(super) name: &'static str,
    pub(super) group: GroupSize,
    pub(super) packing: Packing,
}

impl Columns {
    /// `-1` is all of a row.
    pub(super) fn group(stored: &StoredQuantization) -> Result<GroupSize> {
        let size = stored.group_size.unwrap_or(-1);
        GroupSize::new(size).map_err(|_| stored.refuse("group_size", &size, "-1 (a whole row), 32, 64, 128"))
    }
}

impl QuantScheme for Columns {
    fn name(&self) -> &'static str {
        self.name
    }

    fn load_merged(&self, parts: &[Part<'_>], in_features: usize) -> Result<Box<dyn QuantWeight>> {
        let is_float = |part: &Part<'_>| !part.at.contains("qweight") && part.at.contains("weight");
        match parts.iter().filter(|part| is_float(part)).count() {
            0 => {}
            count if count == parts.len() => return Unquantized.load_merged(parts, in_features),
            _ => return load_mixed(self, parts, in_features),
        }
        let at = &parts[0].at;
        let group = self.group.checked(at.path(), in_features)?;
        let (pieces, [out, inputs]) = pieces(parts, in_features, if group < in_features { group } else { 1 })?;
        let stored_group = (group < inputs).then_some(group);
        let mut weight = Int4Weight::new(at.device(), out, inputs, stored_group, Offset::ZeroPoint)?;
        for piece in &pieces {
            self.read(piece, in_features, group, &mut weight)?;
        }
        Ok(Box::new(weight))
    }
}

impl Columns {
    fn read(&self, piece: &Piece<'_>, in_features: usize, group: usize, weight: &mut Int4Weight) -> Result<()> {
        let (at, out) = (&piece.part.at, piece.part.out_features);
        let (rows, cols) = (&piece.slice.rows, &piece.slice.cols);
        for (what, size) in [("out", out), ("in", in_features), ("out", rows.start), ("out", rows.end)] {
            if !size.is_multiple_of(WORD) {
                let (name, why) = (at.path().to_owned(), "values of a word");
                return Err(ModelError::NotMultiple { name, what, size, of: WORD, why });
            }
        }
        // GPTQ's: which group each input is of, known without `desc_act`.
        at.take_note("g_idx");
        let groups = in_features / group;
        let of_groups = cols.start / group..cols.end.div_ceil(group);
        let words = rows.start / WORD..rows.end / WORD;

        // `[out, groups]` of this rank.
        let num_groups = of_groups.len();
        let mut scales = vec![0.0; rows.len() * num_groups];
        if let Some(stored) = at.floats("scales", &[groups, out]) {
            let slice = Slice { rows: of_groups.clone(), cols: rows.clone() };
            let mut values = Vec::new();
            at.stream("scales", out, stored.bytes(), &slice, &mut |piece| {
                values.resize(piece.num_rows * piece.cols, 0.0);
                stored.to_f32(piece.bytes, &mut values);
                for (i, value) in values.iter().enumerate() {
                    scales[i % piece.cols * num_groups + piece.first + i / piece.cols] = *value;
                }
                Ok(())
            })?;
        }
        let mut zeros = vec![0.0; rows.len() * num_groups];
        if at.expect("qzeros", &[groups, out / WORD], StoredDtype::I32) {
            let slice = Slice { rows: of_groups, cols: words.clone() };
            at.stream("qzeros", out / WORD, 4, &slice, &mut |piece| {
                for (i, value) in values_of(piece.bytes) {
                    let (word, place) = (i / WORD % piece.cols, self.packing.order[i % WORD]);
                    let at = (word * WORD + place) * num_groups + piece.first + i / WORD / piece.cols;
                    zeros[at] = f32::from((value + self.packing.zero_offset) & 15);
                }
                Ok(())
            })?;
        }

        let inputs = cols.len();
        let (shape, slice) = match self.packing.words_of_inputs {
            true => ([in_features / WORD, out], Slice { rows: cols.start / WORD..cols.end / WORD, cols: rows.clone() }),
            false => ([in_features, out / WORD], Slice { rows: cols.clone(), cols: words }),
        };
        if !at.expect("qweight", &shape, StoredDtype::I32) || at.is_checking() {
            return Ok(());
        }
        let mut codes = vec![0u8; rows.len() * inputs];
        at.stream("qweight", shape[1], 4, &slice, &mut |piece| {
            for (i, value) in values_of(piece.bytes) {
                let (row, col) = (piece.first + i / WORD / piece.cols, i / WORD % piece.cols);
                let (input, output) = match self.packing.words_of_inputs {
                    true => (row * WORD + i % WORD, col),
                    false => (row, col * WORD + self.packing.order[i % WORD]),
                };
                codes[output * inputs + input] = value;
            }
            Ok(())
        })?;
        Ok(weight.write_rows(piece.first_row, &codes, &scales, &zeros)?)
    }
}

/// The values of little-endian words, in order.
fn values_of(bytes: &[u8]) -> impl Iterator<Item = (usize, u8)> {
    bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).enumerate()
}

#[cfg(test)]
mod tests {
    use drafthorse_kernels::DType;
    use safetensors::tensor::Dtype;

    use crate::testing::{Rig, Stored, Tiny, options, random, relative_error};

    /// Which of eight outputs each place of an AWQ word is.
    const AWQ: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

    fn words(shape: [usize; 2], value: impl Fn(usize, usize, usize) -> u8) -> Stored {
        let word = |row, col| (0..8).fold(0u32, |word, place| word | u32::from(value(row, col, place)) << (4 * place));
        let cells = (0..shape[0]).flat_map(|row| (0..shape[1]).map(move |col| (row, col)));
        let bytes = cells.flat_map(|(row, col)| word(row, col).to_le_bytes()).collect();
        Stored { dtype: Dtype::I32, shape: shape.to_vec(), bytes }
    }

    /// Stores a layer's weight in one of the formats, in groups of 32, and its floats in `plain`.
    fn quantize(format: &str, tiny: &mut Tiny, plain: &mut Tiny, layer: &str, seed: u64) {
        let shape = tiny.tensors.remove(&format!("{layer}.weight")).unwrap().shape;
        let [out, inputs] = shape[..] else { panic!("{layer} is no matrix") };
        let groups = inputs / 32;
        let numbers =
            |len: usize, seed: u64| -> Vec<u8> { random(len, seed).iter().map(|v| ((v + 1.0) * 7.99) as u8).collect() };
        // Codes by output and input, the others by group and output.
        let (codes, zeros) = (numbers(out * inputs, seed), numbers(out * groups, seed + 1));
        let scales = Stored::floats(
            Dtype::F16,
            &[groups, out],
            &random(out * groups, seed + 2).iter().map(|v| 0.03 + 0.01 * v).collect::<Vec<_>>(),
        );
        let code = |output: usize, input: usize| codes[output * inputs + input];
        let zero = |group: usize, output: usize| zeros[group * out + output];
        let (qweight, qzeros) = match format {
            "awq" => (
                words([inputs, out / 8], |input, col, place| code(col * 8 + AWQ[place], input)),
                words([groups, out / 8], |group, col, place| zero(group, col * 8 + AWQ[place])),
            ),
            _ => {
                // The first version of the format stores one less.
                let less = if format == "gptq" { 15 } else { 0 };
                (
                    words([inputs / 8, out], |row, output, place| code(output, row * 8 + place)),
                    words([groups, out / 8], |group, col, place| (zero(group, col * 8 + place) + less) & 15),
                )
            }
        };
        let scale = scales.values();
        let value = |i: usize| {
            let (output, input) = (i / inputs, i % inputs);
            let group = input / 32;
            scale[group * out + output] * (f32::from(codes[i]) - f32::from(zero(group, output)))
        };
        let values: Vec<f32> = (0..out * inputs).map(value).collect();
        plain.tensors.insert(format!("{layer}.weight"), Stored::floats(Dtype::F32, &shape, &values));
        for (name, tensor) in [("qweight", qweight), ("qzeros", qzeros), ("scales", scales)] {
            tiny.tensors.insert(format!("{layer}.{name}"), tensor);
        }
    }

    fn config(format: &str) -> String {
        let keys = match format {
            "awq" => r#""quant_method": "awq", "version": "GEMM", "zero_point": true"#.to_owned(),
            _ => format!(r#""quant_method": "gptq", "desc_act": false, "sym": false, "checkpoint_format": "{format}""#),
        };
        format!(r#"{{"quantization_config": {{{keys}, "bits": 4, "group_size": 32}}}}"#)
    }

    /// A model in which nearly all layers are quantized, one of a merged three is not; and the same in floats.
    fn models(format: &str) -> [Tiny; 2] {
        let mut tiny = Tiny::new(Dtype::F32, &config(format));
        let mut plain = tiny.clone();
        plain.config.remove("quantization_config");
        let layers: Vec<String> =
            tiny.tensors.keys().filter_map(|name| name.strip_suffix(".weight")).map(Into::into).collect();
        let wanted = |layer: &&String| layer.contains("proj") && *layer != "model.layers.1.self_attn.v_proj";
        for (seed, layer) in layers.iter().filter(wanted).enumerate() {
            quantize(format, &mut tiny, &mut plain, layer, 200 + 10 * seed as u64);
        }
        [tiny, plain]
    }

    #[test]
    fn every_packing_is_the_weights_that_were_packed() {
        let tokens = [3, 14, 15, 89, 26, 5];
        let run = |tiny: &Tiny| Rig::new(tiny.write().path(), &options(DType::F32, "none"), 6).step(&tokens, 0);
        for format in ["awq", "gptq", "gptq_v2"] {
            let [tiny, plain] = models(format);
            let error = relative_error(&run(&tiny), &run(&plain));
            assert!(error < 1e-5, "{format}: {error}");
        }
        // Zero points that are off by one would show.
        let [mut tiny, plain] = models("gptq");
        tiny.config = models("gptq_v2")[0].config.clone();
        assert!(relative_error(&run(&tiny), &run(&plain)) > 1e-2);
    }

    #[test]
    fn what_cannot_be_loaded_is_refused_by_name() {
        let refusal = |keys: &str| {
            let tiny = Tiny::new(Dtype::F32, &format!(r#"{{"quantization_config": {{{keys}}}}}"#));
            crate::load(tiny.write().path(), &options(DType::F32, "none")).err().unwrap().to_string()
        };
        let key = "config.json: quantization_config.";
        let awq = r#""quant_method": "awq""#;
        assert_eq!(refusal(&format!(r#"{awq}, "bits": 8"#)), format!("{key}bits is 8, supported: 4"));
        assert_eq!(refusal(&format!(r#"{awq}, "version": "gemv""#)), format!("{key}version is gemv, supported: gemm"));
        assert_eq!(
            refusal(&format!(r#"{awq}, "zero_point": false"#)),
            format!("{key}zero_point is false, supported: true")
        );
        assert_eq!(
            refusal(&format!(r#"{awq}, "group_size": 48"#)),
            format!("{key}group_size is 48, supported: -1 (a whole row), 32, 64, 128")
        );
        let gptq = r#""quant_method": "gptq""#;
        assert_eq!(
            refusal(&format!(r#"{gptq}, "desc_act": true"#)),
            format!("{key}desc_act is true, supported: false")
        );
        assert_eq!(
            refusal(&format!(r#"{gptq}, "checkpoint_format": "marlin""#)),
            format!("{key}checkpoint_format is marlin, supported: gptq, gptq_v2")
        );
        let [mut tiny, _] = models("awq");
        tiny.tensors.remove("model.layers.0.mlp.down_proj.scales");
        tiny.tensors.remove("model.layers.0.mlp.down_proj.qzeros");
        let error = crate::load(tiny.write().path(), &options(DType::F32, "none")).err().unwrap().to_string();
        assert!(error.ends_with(
            "model.layers.0.mlp.down_proj.scales is missing; model.layers.0.mlp.down_proj.qzeros is missing"
        ));
    }
}

//! Weights that an import kept as the GGUF file had them: Q4_0, Q4_1 and Q8_0 blocks of 32 inputs, without a second rounding.
//!
//! For a quantized layer NAME of `[out, in]`, the checkpoint holds:
//!
//! | tensor         | dtype | shape           | of |
//! |----------------|-------|-----------------|----|
//! | `NAME.qweight` | U8    | `[out, in / 2]` | Q4_0, Q4_1: input 2j in the low half of byte j, 2j + 1 in the high |
//! | `NAME.qweight` | I8    | `[out, in]`     | Q8_0 |
//! | `NAME.scales`  | F16   | `[out, in / 32]`| all: `w = scale * q`, for Q4_0 `scale * (q - 8)` |
//! | `NAME.mins`    | F16   | `[out, in / 32]`| Q4_1: `w = scale * q + min` |
//!
//! Every other layer has its `NAME.weight`.

use drafthorse_kernels::ops::matmul_f32::F32Weight;
use drafthorse_kernels::ops::matmul_int4::{Int4Weight, Offset};
use drafthorse_kernels::ops::matmul_int8::Int8Weight;

use super::bf16::Unquantized;
use super::scheme::{Part, QuantScheme, QuantWeight};
use super::stream::{Piece, pieces};
use crate::config::StoredQuantization;
use crate::error::{ModelError, Result};
use crate::weights::{Loader, Slice, Stored, StoredDtype};

/// Weights of a block.
const BLOCK: usize = 32;

/// What stands for zero in Q4_0.
const CENTER: f32 = 8.0;

pub(super) struct GgufBlocks {
    /// Layers that were not quantized.
    unquantized: Vec<String>,
}

/// How one layer is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocks {
    Int4 { has_mins: bool },
    Int8,
    None,
}

impl GgufBlocks {
    pub(super) const NAME: &'static str = "gguf_blocks";

    pub(super) fn new(stored: &StoredQuantization) -> Result<Self> {
        match stored.group_size {
            None => Ok(GgufBlocks { unquantized: stored.unquantized.clone() }),
            Some(size) if size == BLOCK as i64 => Ok(GgufBlocks { unquantized: stored.unquantized.clone() }),
            Some(other) => Err(ModelError::Unsupported {
                key: "quantization_config.group_size".into(),
                value: other.to_string(),
                supported: BLOCK.to_string(),
            }),
        }
    }

    fn blocks_of(&self, at: &Loader<'_>) -> Blocks {
        let has_no_blocks = self.unquantized.iter().any(|name| name == at.path()) || at.contains("weight");
        match at.dtype_of("qweight") {
            None if has_no_blocks => Blocks::None,
            Some(StoredDtype::I8) => Blocks::Int8,
            // What is missing altogether is reported as missing 4-bit blocks.
            _ => Blocks::Int4 { has_mins: at.contains("mins") },
        }
    }
}

impl QuantScheme for GgufBlocks {
    fn name(&self) -> &'static str {
        GgufBlocks::NAME
    }

    fn load_merged(&self, parts: &[Part<'_>], in_features: usize) -> Result<Box<dyn QuantWeight>> {
        let formats: Vec<Blocks> = parts.iter().map(|part| self.blocks_of(&part.at)).collect();
        if formats.iter().all(|&blocks| blocks == Blocks::None) {
            return Unquantized.load_merged(parts, in_features);
        }
        let is_int4 = |blocks: &Blocks| matches!(blocks, Blocks::Int4 { .. });
        if formats.iter().all(is_int4) {
            let any_mins = formats.contains(&Blocks::Int4 { has_mins: true });
            return load_int4(parts, in_features, if any_mins { Offset::Min } else { Offset::Symmetric });
        }
        if formats.iter().all(|&blocks| blocks == Blocks::Int8) {
            return load_int8(parts, in_features);
        }
        load_mixed(parts, &formats, in_features)
    }
}

fn load_int4(parts: &[Part<'_>], in_features: usize, offset: Offset) -> Result<Box<dyn QuantWeight>> {
    let (pieces, [out, inputs]) = pieces(parts, in_features, BLOCK)?;
    let mut weight = Int4Weight::new(parts[0].at.device(), out, inputs, Some(BLOCK), offset)?;
    let stores_offsets = offset == Offset::Min;
    for piece in &pieces {
        read_int4(piece, in_features, &mut |first, codes, scales, mins| {
            let mins = if stores_offsets { mins } else { &[] };
            Ok(weight.write_rows(first, codes, scales, mins)?)
        })?;
    }
    Ok(Box::new(weight))
}

fn load_int8(parts: &[Part<'_>], in_features: usize) -> Result<Box<dyn QuantWeight>> {
    let (pieces, [out, inputs]) = pieces(parts, in_features, BLOCK)?;
    let mut weight = Int8Weight::new(parts[0].at.device(), out, inputs, Some(BLOCK))?;
    for piece in &pieces {
        read_int8(piece, in_features, &mut |first, codes, scales| Ok(weight.write_rows(first, codes, scales)?))?;
    }
    Ok(Box::new(weight))
}

/// Parts that are stored differently become one f32 weight: exact, but as large as f32 is.
fn load_mixed(parts: &[Part<'_>], formats: &[Blocks], in_features: usize) -> Result<Box<dyn QuantWeight>> {
    let (pieces, [out, inputs]) = pieces(parts, in_features, BLOCK)?;
    let layer = parts[0].at.path();
    tracing::warn!(layer, ?formats, "parts of one layer are stored differently, they are kept as float32");
    let mut weight = F32Weight::new(parts[0].at.device(), out, inputs)?;
    let mut values = Vec::new();
    for (piece, format) in pieces.iter().zip(formats) {
        match format {
            Blocks::Int4 { .. } => read_int4(piece, in_features, &mut |first, codes, scales, mins| {
                values.clear();
                for (i, block) in codes.chunks(BLOCK).enumerate() {
                    values.extend(block.iter().map(|&q| scales[i] * f32::from(q) + mins[i]));
                }
                Ok(weight.write_rows(first, &values)?)
            })?,
            Blocks::Int8 => read_int8(piece, in_features, &mut |first, codes, scales| {
                values.clear();
                for (block, scale) in codes.chunks(BLOCK).zip(scales) {
                    values.extend(block.iter().map(|&q| scale * f32::from(q)));
                }
                Ok(weight.write_rows(first, &values)?)
            })?,
            Blocks::None => {
                let at = &piece.part.at;
                let Some(stored) = at.floats("weight", &[piece.part.out_features, in_features]) else { continue };
                at.stream("weight", in_features, stored.bytes(), &piece.slice, &mut |rows| {
                    values.resize(rows.num_rows * rows.cols, 0.0);
                    stored.to_f32(rows.bytes, &mut values);
                    Ok(weight.write_rows(piece.first_row + rows.first, &values)?)
                })?;
            }
        }
    }
    Ok(Box::new(weight))
}

/// Streams codes from 0 to 15, their scales and their minima; the latter from the scales if none are stored.
fn read_int4(
    piece: &Piece<'_>,
    in_features: usize,
    each: &mut dyn FnMut(usize, &[u8], &[f32], &[f32]) -> Result<()>,
) -> Result<()> {
    let (at, out) = (&piece.part.at, piece.part.out_features);
    let groups = piece.slice.cols.len() / BLOCK;
    let scales = group_numbers(piece, "scales", in_features)?;
    let mins = if at.contains("mins") {
        group_numbers(piece, "mins", in_features)?
    } else {
        scales.iter().map(|scale| -CENTER * scale).collect()
    };
    if !at.expect("qweight", &[out, in_features / 2], StoredDtype::U8) {
        return Ok(());
    }
    let bytes = narrowed(&piece.slice, 2);
    let mut codes = Vec::new();
    at.stream("qweight", in_features / 2, 1, &bytes, &mut |rows| {
        codes.clear();
        codes.extend(rows.bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]));
        let of_rows = rows.first * groups..(rows.first + rows.num_rows) * groups;
        each(piece.first_row + rows.first, &codes, &scales[of_rows.clone()], &mins[of_rows])
    })
}

/// Streams codes and their scales.
fn read_int8(
    piece: &Piece<'_>,
    in_features: usize,
    each: &mut dyn FnMut(usize, &[i8], &[f32]) -> Result<()>,
) -> Result<()> {
    let (at, out) = (&piece.part.at, piece.part.out_features);
    let groups = piece.slice.cols.len() / BLOCK;
    let scales = group_numbers(piece, "scales", in_features)?;
    if !at.expect("qweight", &[out, in_features], StoredDtype::I8) {
        return Ok(());
    }
    let mut codes = Vec::new();
    at.stream("qweight", in_features, 1, &piece.slice, &mut |rows| {
        codes.clear();
        codes.extend(rows.bytes.iter().map(|byte| byte.cast_signed()));
        let of_rows = rows.first * groups..(rows.first + rows.num_rows) * groups;
        each(piece.first_row + rows.first, &codes, &scales[of_rows])
    })
}

/// This rank's scales or minima, one for each block.
fn group_numbers(piece: &Piece<'_>, tensor: &str, in_features: usize) -> Result<Vec<f32>> {
    let (at, out) = (&piece.part.at, piece.part.out_features);
    let slice = narrowed(&piece.slice, BLOCK);
    let mut numbers = vec![0.0; slice.rows.len() * slice.cols.len()];
    if !at.expect(tensor, &[out, in_features / BLOCK], StoredDtype::F16) {
        return Ok(numbers);
    }
    at.stream(tensor, in_features / BLOCK, Stored::F16.bytes(), &slice, &mut |rows| {
        let of_rows = &mut numbers[rows.first * rows.cols..][..rows.num_rows * rows.cols];
        Stored::F16.to_f32(rows.bytes, of_rows);
        Ok(())
    })?;
    Ok(numbers)
}

/// The same part of a tensor whose elements each stand for `by` inputs.
fn narrowed(slice: &Slice, by: usize) -> Slice {
    Slice { rows: slice.rows.clone(), cols: slice.cols.start / by..slice.cols.end / by }
}

#[cfg(test)]
mod tests {
    use drafthorse_kernels::DType;
    use safetensors::tensor::Dtype;

    use crate::testing::{Rig, Stored, Tiny, options, random, relative_error};

    const CONFIG: &str = r#"{"quantization_config": {"quant_method": "gguf_blocks", "group_size": 32,
        "modules_to_not_convert": ["lm_head"]}}"#;

    /// Replaces a layer's weight by blocks, and gives back what these stand for.
    fn quantize(tiny: &mut Tiny, layer: &str, format: &str, seed: u64) {
        let weight = tiny.tensors.remove(&format!("{layer}.weight")).unwrap();
        let [out, inputs] = weight.shape[..] else { panic!("{layer} is no matrix") };
        let half = |values: Vec<f32>| Stored::floats(Dtype::F16, &[out, inputs / 32], &values);
        let scales = random(out * inputs / 32, seed).iter().map(|v| 0.02 + 0.01 * v).collect();
        tiny.tensors.insert(format!("{layer}.scales"), half(scales));
        let codes = random(out * inputs, seed + 1).into_iter();
        if format == "q8_0" {
            let bytes = codes.map(|v| ((v * 127.0) as i8).cast_unsigned()).collect();
            let qweight = Stored { dtype: Dtype::I8, shape: vec![out, inputs], bytes };
            tiny.tensors.insert(format!("{layer}.qweight"), qweight);
            return;
        }
        if format == "q4_1" {
            let mins = random(out * inputs / 32, seed + 2).iter().map(|v| -0.2 + 0.1 * v).collect();
            tiny.tensors.insert(format!("{layer}.mins"), half(mins));
        }
        let codes: Vec<u8> = codes.map(|v| ((v + 1.0) * 7.99) as u8).collect();
        let bytes = codes.as_chunks().0.iter().map(|[low, high]| low | high << 4).collect();
        let qweight = Stored { dtype: Dtype::U8, shape: vec![out, inputs / 2], bytes };
        tiny.tensors.insert(format!("{layer}.qweight"), qweight);
    }

    /// The same checkpoint with floats in place of blocks.
    fn dequantized(tiny: &Tiny) -> Tiny {
        let mut plain = tiny.clone();
        plain.config.remove("quantization_config");
        for (name, qweight) in &tiny.tensors {
            let Some(layer) = name.strip_suffix(".qweight") else { continue };
            let scales = tiny.values(&format!("{layer}.scales"));
            let mins = tiny.tensors.get(&format!("{layer}.mins")).map(Stored::values);
            let codes: Vec<f32> = match qweight.dtype {
                Dtype::I8 => qweight.bytes.iter().map(|b| f32::from(b.cast_signed())).collect(),
                _ => qweight.bytes.iter().flat_map(|b| [f32::from(b & 15), f32::from(b >> 4)]).collect(),
            };
            let center = if qweight.dtype == Dtype::I8 { 0.0 } else { -8.0 };
            let min = |i: usize| mins.as_ref().map_or(center * scales[i], |mins| mins[i]);
            let values: Vec<f32> = codes.iter().enumerate().map(|(i, q)| scales[i / 32] * q + min(i / 32)).collect();
            let shape = [scales.len() * 32 / 64, 64];
            let shape = if layer.ends_with("down_proj") { [64, 96] } else { shape };
            for part in ["qweight", "scales", "mins"] {
                plain.tensors.remove(&format!("{layer}.{part}"));
            }
            plain.tensors.insert(format!("{layer}.weight"), Stored::floats(Dtype::F32, &shape, &values));
        }
        plain
    }

    #[test]
    fn blocks_are_what_they_stand_for_without_a_second_rounding() {
        let mut tiny = Tiny::new(Dtype::F32, CONFIG);
        let layers: Vec<String> =
            tiny.tensors.keys().filter_map(|name| name.strip_suffix(".weight")).map(Into::into).collect();
        for (seed, layer) in layers.iter().filter(|layer| layer.contains("proj")).enumerate() {
            // q Q4_1, k Q4_0 and v Q8_0 in layer 0: one merged weight out of three formats; all alike or nearly in layer 1.
            let format = match layer.as_str() {
                "model.layers.0.self_attn.v_proj" | "model.layers.0.mlp.down_proj" => "q8_0",
                "model.layers.0.self_attn.k_proj" | "model.layers.1.self_attn.k_proj" => "q4_0",
                "model.layers.0.self_attn.o_proj" => "q4_0",
                _ => "q4_1",
            };
            quantize(&mut tiny, layer, format, 100 + 10 * seed as u64);
        }
        quantize(&mut tiny, "model.embed_tokens", "q8_0", 7);

        let tokens = [3, 14, 15, 89, 26, 5];
        let run = |tiny: &Tiny| Rig::new(tiny.write().path(), &options(DType::F32, "none"), 6).step(&tokens, 0);
        let error = relative_error(&run(&tiny), &run(&dequantized(&tiny)));
        assert!(error < 1e-5, "{error}");
    }

    #[test]
    fn what_is_missing_of_a_block_is_named() {
        let mut tiny = Tiny::new(Dtype::F32, CONFIG);
        quantize(&mut tiny, "model.layers.0.mlp.down_proj", "q4_1", 1);
        tiny.tensors.remove("model.layers.0.mlp.down_proj.scales");
        tiny.tensors.remove("model.layers.1.mlp.down_proj.weight");
        let Err(err) = crate::load(tiny.write().path(), &options(DType::F32, "none")) else { panic!("loaded") };
        let (_, message) =
            err.to_string().split_once(": ").map(|(dir, rest)| (dir.to_owned(), rest.to_owned())).unwrap();
        assert_eq!(
            message,
            "model.layers.0.mlp.down_proj.scales is missing; model.layers.1.mlp.down_proj.scales is missing; \
             model.layers.1.mlp.down_proj.qweight is missing"
        );
        let mut tiny = Tiny::new(Dtype::F32, &CONFIG.replace("32", "64"));
        quantize(&mut tiny, "model.layers.0.mlp.down_proj", "q4_1", 1);
        let Err(err) = crate::load(tiny.write().path(), &options(DType::F32, "none")) else { panic!("loaded") };
        assert_eq!(err.to_string(), "config.json: quantization_config.group_size is 64, supported: 32");
    }
}

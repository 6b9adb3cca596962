//! DeepSeek's native checkpoints: 8-bit floats (e4m3) with a scale for each block of 128 x 128 weights.
//!
//! Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3. For a layer NAME of `[out, in]`:
//!
//! | tensor                  | dtype   | shape                          | |
//! |-------------------------|---------|--------------------------------|-|
//! | `NAME.weight`           | F8_E4M3 | `[out, in]`                    | |
//! | `NAME.weight_scale_inv` | floats  | `[out / 128, in / 128]`, up    | what weights are multiplied with, despite its name |
//!
//! Layers whose weight is of plain floats are as they are: head, embedding, router. Activations are not quantized.

use drafthorse_kernels::ops::matmul_f32::F32Weight;
use drafthorse_kernels::ops::matmul_fp8::Fp8Weight;

use super::bf16::Unquantized;
use super::scheme::{Part, QuantScheme, QuantWeight};
use super::stream::{Piece, load_mixed, pieces};
use crate::config::StoredQuantization;
use crate::error::Result;
use crate::weights::{Slice, StoredDtype};

/// Rows and columns of a block.
const BLOCK: usize = 128;

pub(super) struct BlockFp8;

impl BlockFp8 {
    pub(super) const NAME: &'static str = "fp8";

    pub(super) fn new(stored: &StoredQuantization) -> Result<Self> {
        stored.expect("fmt", stored.fmt.as_deref().unwrap_or("e4m3"), &["e4m3"])?;
        stored.expect("activation_scheme", stored.activation_scheme.as_deref().unwrap_or("dynamic"), &["dynamic"])?;
        let block = match &stored.weight_block_size {
            Some(size) => format!("{size:?}"),
            None => "missing".to_owned(),
        };
        stored.expect("weight_block_size", &block, &["[128, 128]"])?;
        Ok(BlockFp8)
    }
}

impl QuantScheme for BlockFp8 {
    fn name(&self) -> &'static str {
        BlockFp8::NAME
    }

    fn load_merged(&self, parts: &[Part<'_>], in_features: usize) -> Result<Box<dyn QuantWeight>> {
        let is_fp8 = |part: &Part<'_>| part.at.dtype_of("weight") == Some(StoredDtype::F8E4M3);
        match parts.iter().filter(|part| is_fp8(part)).count() {
            0 => return Unquantized.load_merged(parts, in_features),
            count if count < parts.len() => return load_mixed(self, parts, in_features),
            _ => {}
        }
        // Ranks cut between blocks; alone, a last block may be smaller.
        let group = if parts[0].at.place().world > 1 { BLOCK } else { 1 };
        let (pieces, [out, inputs]) = pieces(parts, in_features, group)?;
        let device = parts[0].at.device();
        if inputs > BLOCK && !inputs.is_multiple_of(BLOCK) {
            return load_dequantized(&pieces, in_features, [out, inputs]);
        }
        let mut weight = Fp8Weight::new(device, out, inputs, (inputs > BLOCK).then_some(BLOCK))?;
        for piece in &pieces {
            read(piece, in_features, &mut |first, codes, scales| Ok(weight.write_rows(first, codes, scales)?))?;
        }
        Ok(Box::new(weight))
    }
}

/// A weight whose rows end within a block has no kernel: it is kept as floats, exactly.
fn load_dequantized(
    pieces: &[Piece<'_>],
    in_features: usize,
    [out, inputs]: [usize; 2],
) -> Result<Box<dyn QuantWeight>> {
    let device = pieces[0].part.at.device();
    let mut weight = F32Weight::new(device, out, inputs)?;
    for piece in pieces {
        // One row of blocks, filled up with zeros, dequantizes as any.
        let padded = inputs.next_multiple_of(BLOCK);
        let mut values = Vec::new();
        read(piece, in_features, &mut |first, codes, scales| {
            let num_rows = codes.len() / inputs;
            let mut rows = Fp8Weight::new(device, num_rows, padded, Some(BLOCK))?;
            let mut filled = vec![0; num_rows * padded];
            for (filled, codes) in filled.chunks_mut(padded).zip(codes.chunks(inputs)) {
                filled[..inputs].copy_from_slice(codes);
            }
            rows.write_rows(0, &filled, scales)?;
            let mut row = vec![0.0; padded];
            values.clear();
            for i in 0..num_rows {
                rows.read_row(i, &mut row);
                values.extend_from_slice(&row[..inputs]);
            }
            Ok(weight.write_rows(first, &values)?)
        })?;
    }
    Ok(Box::new(weight))
}

/// Streams codes and, for each row, the scales of its blocks.
fn read(piece: &Piece<'_>, in_features: usize, each: &mut dyn FnMut(usize, &[u8], &[f32]) -> Result<()>) -> Result<()> {
    let (at, out) = (&piece.part.at, piece.part.out_features);
    let of_blocks = [out.div_ceil(BLOCK), in_features.div_ceil(BLOCK)];
    let columns = piece.slice.cols.start / BLOCK..piece.slice.cols.end.div_ceil(BLOCK);
    let mut scales = Vec::new();
    if let Some(stored) = at.floats("weight_scale_inv", &of_blocks) {
        let slice = Slice { rows: 0..of_blocks[0], cols: columns.clone() };
        scales.resize(of_blocks[0] * columns.len(), 0.0);
        at.stream("weight_scale_inv", of_blocks[1], stored.bytes(), &slice, &mut |rows| {
            stored.to_f32(rows.bytes, &mut scales[rows.first * rows.cols..][..rows.num_rows * rows.cols]);
            Ok(())
        })?;
    }
    if !at.expect("weight", &[out, in_features], StoredDtype::F8E4M3) {
        return Ok(());
    }
    let mut of_rows = Vec::new();
    at.stream("weight", in_features, 1, &piece.slice, &mut |rows| {
        of_rows.clear();
        for row in rows.first..rows.first + rows.num_rows {
            let block = (piece.slice.rows.start + row) / BLOCK;
            of_rows.extend_from_slice(&scales[block * columns.len()..][..columns.len()]);
        }
        each(piece.first_row + rows.first, rows.bytes, &of_rows)
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use drafthorse_kernels::{DType, Device};
    use safetensors::SafeTensors;
    use safetensors::tensor::Dtype;

    use crate::quant::{Part, schemes};
    use crate::testing::{Rig, Stored, Tiny, options, random, relative_error};
    use crate::weights::{Checkpoint, LoadContext, Place, Shard};

    const CONFIG: &str =
        r#"{"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}"#;

    /// A layer's weight as its kernel sees it, on one rank.
    fn dequantized(tiny: &Tiny, layer: &str, [out, inputs]: [usize; 2], shard: Shard, place: Place) -> Vec<f32> {
        let (dir, config) = (tiny.write(), tiny.parsed());
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let schemes = schemes(None, config.quantization.as_ref()).unwrap();
        let mut context = LoadContext::new(&checkpoint, &config, &schemes, &Device::Cpu, DType::F32);
        context.place = place;
        let part = Part { at: context.root().at(layer), out_features: out, shard };
        schemes.linear.load(part, inputs).unwrap().dequantize().unwrap().to_vec().unwrap()
    }

    /// Weights in e4m3 with the scales of their blocks, and what torch makes of them.
    fn golden(name: &str) -> [Stored; 3] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/quant/fp8.safetensors");
        let bytes = std::fs::read(path).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        ["weight", "weight_scale_inv", "dequantized"].map(|part| {
            let tensor = tensors.tensor(&format!("{name}.{part}")).unwrap();
            Stored { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), bytes: tensor.data().to_vec() }
        })
    }

    #[test]
    fn weights_have_the_bits_that_torch_gives_them() {
        for name in ["whole", "ragged", "small"] {
            let [weight, scales, want] = golden(name);
            let dims = [weight.shape[0], weight.shape[1]];
            let mut tiny = Tiny::new(Dtype::F32, CONFIG);
            tiny.tensors.insert("layer.weight".into(), weight);
            tiny.tensors.insert("layer.weight_scale_inv".into(), scales);
            let got = dequantized(&tiny, "layer", dims, Shard::Replicated, Place::ALONE);
            let want = want.values();
            assert!(got.iter().zip(&want).all(|(got, want)| got.to_bits() == want.to_bits()), "{name}");
            if name == "whole" {
                for rank in 0..2 {
                    let place = Place { rank, world: 2 };
                    let rows = dequantized(&tiny, "layer", dims, Shard::Out, place);
                    assert_eq!(rows, want[rank * want.len() / 2..(rank + 1) * want.len() / 2], "rows of {rank}");
                    let cols = dequantized(&tiny, "layer", dims, Shard::In, place);
                    let half = dims[1] / 2;
                    let of_rank = |row: &[f32]| row[rank * half..(rank + 1) * half].to_vec();
                    assert_eq!(cols, want.chunks(dims[1]).flat_map(of_rank).collect::<Vec<_>>(), "columns of {rank}");
                }
            }
        }
    }

    /// Turns a layer of floats to e4m3 by rounding towards zero; floats in its place are as good as its blocks.
    fn quantize(tiny: &mut Tiny, plain: &mut Tiny, layer: &str, seed: u64) {
        let name = format!("{layer}.weight");
        let shape = tiny.tensors[&name].shape.clone();
        let codes: Vec<u8> =
            random(shape[0] * shape[1], seed).iter().map(|v| ((v + 1.0) * 119.0) as u8 % 119).collect();
        let signs = random(codes.len(), seed + 1);
        let codes: Vec<u8> =
            codes.iter().zip(signs).map(|(code, sign)| if sign < 0.0 { code | 128 } else { *code }).collect();
        let scale = 0.002;
        let number = |code: u8| {
            let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
            let size = if exponent == 0 { mantissa / 64.0 } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
            scale * if code & 128 == 0 { size } else { -size }
        };
        let values: Vec<f32> = codes.iter().map(|&code| number(code)).collect();
        plain.tensors.insert(name.clone(), Stored::floats(Dtype::F32, &shape, &values));
        let blocks = [shape[0].div_ceil(128), shape[1].div_ceil(128)];
        let scales = Stored::floats(Dtype::F32, &blocks, &vec![scale; blocks[0] * blocks[1]]);
        tiny.tensors.insert(format!("{layer}.weight_scale_inv"), scales);
        tiny.tensors.insert(name, Stored { dtype: Dtype::F8_E4M3, shape, bytes: codes });
    }

    #[test]
    fn a_model_in_blocks_is_the_model_in_floats() {
        let mut tiny = Tiny::new(Dtype::F32, CONFIG);
        let mut plain = tiny.clone();
        plain.config.remove("quantization_config");
        for (seed, layer) in
            ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"].iter().enumerate()
        {
            for i in 0..2 {
                quantize(&mut tiny, &mut plain, &format!("model.layers.{i}.{layer}"), (seed * 20 + i * 2) as u64);
            }
        }
        let tokens = [3, 14, 15, 89, 26, 5];
        let run = |tiny: &Tiny| Rig::new(tiny.write().path(), &options(DType::F32, "none"), 6).step(&tokens, 0);
        let error = relative_error(&run(&tiny), &run(&plain));
        assert!(error < 1e-5, "{error}");
    }

    #[test]
    fn what_cannot_be_loaded_is_refused_by_name() {
        let refusal = |changes: &str| {
            let tiny = Tiny::new(Dtype::F32, changes);
            crate::load(tiny.write().path(), &options(DType::F32, "none")).err().unwrap().to_string()
        };
        let config = |keys: &str| refusal(&format!(r#"{{"quantization_config": {{"quant_method": "fp8"{keys}}}}}"#));
        let key = "config.json: quantization_config.";
        assert_eq!(config(""), format!("{key}weight_block_size is missing, supported: [128, 128]"));
        assert_eq!(
            config(r#", "weight_block_size": [64, 64]"#),
            format!("{key}weight_block_size is [64, 64], supported: [128, 128]")
        );
        assert_eq!(config(r#", "fmt": "e5m2""#), format!("{key}fmt is e5m2, supported: e4m3"));
        assert_eq!(
            config(r#", "activation_scheme": "static""#),
            format!("{key}activation_scheme is static, supported: dynamic")
        );
        let named = r#", "weight_block_size": [128, 128], "modules_to_not_convert": ["mlp.grate"]"#;
        assert!(config(named).starts_with(&format!("{key}modules_to_not_convert is mlp.grate, supported: names")));

        // Codes without scales, and scales of too few blocks.
        let (mut tiny, mut plain) = (Tiny::new(Dtype::F32, CONFIG), Tiny::new(Dtype::F32, CONFIG));
        for layer in ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"] {
            quantize(&mut tiny, &mut plain, layer, 3);
        }
        tiny.tensors.remove("model.layers.0.mlp.down_proj.weight_scale_inv");
        let scales = Stored::floats(Dtype::F32, &[2, 1], &[1.0; 2]);
        tiny.tensors.insert("model.layers.1.mlp.down_proj.weight_scale_inv".into(), scales);
        let error = crate::load(tiny.write().path(), &options(DType::F32, "none")).err().unwrap().to_string();
        assert!(error.ends_with(
            "model.layers.0.mlp.down_proj.weight_scale_inv is missing; \
             model.layers.1.mlp.down_proj.weight_scale_inv has shape [2, 1], expected [1, 1]"
        ));
    }
}

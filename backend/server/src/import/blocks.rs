//! What a checkpoint keeps of a quantized block when it is not turned into bf16: codes, scales and minimums, unchanged.
//!
//! | block | `qweight` | `scales`, `mins` |
//! |-------|-----------|------------------|
//! | Q4_0  | U8 `[out, in / 2]`, value `2j` in the low nibble, `2j + 1` in the high one; `w = scale * (q - 8)` | F16 `[out, in / 32]`, none |
//! | Q4_1  | likewise; `w = scale * q + min` | F16 `[out, in / 32]` each |
//! | Q8_0  | I8 `[out, in]`; `w = scale * q` | F16 `[out, in / 32]`, none |

use super::dequant::{TensorType, nibble};

/// A part of a kept tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Codes,
    Scales,
    Mins,
}

/// What a type's blocks are cut into; nothing if they cannot be kept.
pub fn parts(kind: TensorType) -> &'static [Part] {
    match kind {
        TensorType::Q4_0 | TensorType::Q8_0 => &[Part::Codes, Part::Scales],
        TensorType::Q4_1 => &[Part::Codes, Part::Scales, Part::Mins],
        _ => &[],
    }
}

/// Bytes that `part` keeps of one block of 32.
pub fn part_bytes(kind: TensorType, part: Part) -> usize {
    match (part, kind) {
        (Part::Codes, TensorType::Q8_0) => 32,
        (Part::Codes, _) => 16,
        (Part::Scales | Part::Mins, _) => 2,
    }
}

/// Appends `part` of whole blocks to `out`.
pub fn extract(kind: TensorType, part: Part, blocks: &[u8], out: &mut Vec<u8>) {
    for block in blocks.chunks_exact(kind.block_bytes()) {
        match (part, kind) {
            (Part::Scales, _) => out.extend_from_slice(&block[..2]),
            (Part::Mins, _) => out.extend_from_slice(&block[2..4]),
            (Part::Codes, TensorType::Q8_0) => out.extend_from_slice(&block[2..]),
            (Part::Codes, _) => {
                let codes = &block[block.len() - 16..];
                out.extend((0..16).map(|j| nibble(codes, 2 * j) | nibble(codes, 2 * j + 1) << 4));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::dequant::dequantize;
    use half::f16;
    use safetensors::SafeTensors;

    const GOLDEN: &[u8] = include_bytes!("golden.safetensors");

    fn halves(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
    }

    #[test]
    fn kept_parts_give_the_same_values_as_the_blocks() {
        let golden = SafeTensors::deserialize(GOLDEN).unwrap();
        for kind in [TensorType::Q4_0, TensorType::Q4_1, TensorType::Q8_0] {
            let blocks = golden.tensor(&format!("{}.blocks", kind.name())).unwrap();
            let mut expected = vec![0.0; blocks.data().len() / kind.block_bytes() * 32];
            dequantize(kind, blocks.data(), &mut expected);

            let [mut codes, mut scales, mut mins] = [const { Vec::new() }; 3];
            for &part in parts(kind) {
                let out = match part {
                    Part::Codes => &mut codes,
                    Part::Scales => &mut scales,
                    Part::Mins => &mut mins,
                };
                extract(kind, part, blocks.data(), out);
                assert_eq!(out.len(), expected.len() / 32 * part_bytes(kind, part));
            }
            let (scales, mins) = (halves(&scales), halves(&mins));
            let value = |i: usize| match kind {
                TensorType::Q8_0 => scales[i / 32] * f32::from(codes[i] as i8),
                _ => {
                    let code = f32::from(codes[i / 2] >> (i % 2 * 4) & 15);
                    match mins.get(i / 32) {
                        Some(min) => scales[i / 32] * code + min,
                        None => scales[i / 32] * (code - 8.0),
                    }
                }
            };
            let values: Vec<f32> = (0..expected.len()).map(value).collect();
            assert_eq!(values, expected, "{}", kind.name());
        }
    }
}

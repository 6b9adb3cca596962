//! GGML's block formats, block by block, to `f32`.
//!
//! The order of roundings is that of the `gguf` Python package, so that all values equal its own bit for bit: scale times
//! code, rounded, then plus or minus the minimum, rounded again (no fused multiply-add).

use half::{bf16, f16};

/// How a tensor's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

use TensorType::{Bf16, F16, F32, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};

const ALL: [TensorType; 11] = [F32, F16, Bf16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4K, Q5K, Q6K];

impl TensorType {
    /// GGML's number, name, elements a block, bytes a block.
    const fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
            F32 => (0, "F32", 1, 4),
            F16 => (1, "F16", 1, 2),
            Bf16 => (30, "BF16", 1, 2),
            Q4_0 => (2, "Q4_0", 32, 2 + 16),
            Q4_1 => (3, "Q4_1", 32, 2 + 2 + 16),
            Q5_0 => (6, "Q5_0", 32, 2 + 4 + 16),
            Q5_1 => (7, "Q5_1", 32, 2 + 2 + 4 + 16),
            Q8_0 => (8, "Q8_0", 32, 2 + 32),
            Q4K => (12, "Q4_K", 256, 2 + 2 + 12 + 128),
            Q5K => (13, "Q5_K", 256, 2 + 2 + 12 + 32 + 128),
            Q6K => (14, "Q6_K", 256, 128 + 64 + 16 + 2),
        }
    }

    pub fn from_id(id: u32) -> Option<Self> {
        ALL.into_iter().find(|kind| kind.facts().0 == id)
    }

    pub fn name(self) -> &'static str {
        self.facts().1
    }

    /// All that can be read, for an error message.
    pub fn names() -> String {
        let named: Vec<_> = ALL.iter().map(|kind| format!("{} ({})", kind.name(), kind.facts().0)).collect();
        format!("one of {}", named.join(" "))
    }

    /// Elements that share a block.
    pub fn block_len(self) -> usize {
        self.facts().2
    }

    pub fn block_bytes(self) -> usize {
        self.facts().3
    }
}

/// Writes the values of whole blocks.
///
/// # Panics
/// If `bytes` and `values` do not hold the same whole number of blocks.
pub fn dequantize(kind: TensorType, bytes: &[u8], values: &mut [f32]) {
    let (block_len, block_bytes) = (kind.block_len(), kind.block_bytes());
    assert!(bytes.len().is_multiple_of(block_bytes), "{} bytes of {}", bytes.len(), kind.name());
    assert_eq!(bytes.len() / block_bytes * block_len, values.len(), "values of {}", kind.name());
    let decode = match kind {
        F32 => |b: &[u8], v: &mut [f32]| v[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        F16 => |b: &[u8], v: &mut [f32]| v[0] = half_at(b, 0),
        Bf16 => |b: &[u8], v: &mut [f32]| v[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        Q4_0 => q4_0,
        Q4_1 => q4_1,
        Q5_0 => q5_0,
        Q5_1 => q5_1,
        Q8_0 => q8_0,
        Q4K => q4_k,
        Q5K => q5_k,
        Q6K => q6_k,
    };
    for (block, values) in bytes.chunks_exact(block_bytes).zip(values.chunks_exact_mut(block_len)) {
        decode(block, values);
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Code `i` of 32 nibbles in 16 bytes: the low nibbles are the first half, the high ones the second.
pub fn nibble(codes: &[u8], i: usize) -> u8 {
    (codes[i % 16] >> (i / 16 * 4)) & 15
}

/// The fifth bit of code `i`, in its place.
fn fifth_bit(bits: &[u8], i: usize) -> u8 {
    (bits[i / 8] >> (i % 8) & 1) << 4
}

fn q4_0(block: &[u8], values: &mut [f32]) {
    let scale = half_at(block, 0);
    for (i, value) in values.iter_mut().enumerate() {
        *value = scale * (f32::from(nibble(&block[2..], i)) - 8.0);
    }
}

fn q4_1(block: &[u8], values: &mut [f32]) {
    let (scale, min) = (half_at(block, 0), half_at(block, 2));
    for (i, value) in values.iter_mut().enumerate() {
        *value = scale * f32::from(nibble(&block[4..], i)) + min;
    }
}

fn q5_0(block: &[u8], values: &mut [f32]) {
    let scale = half_at(block, 0);
    for (i, value) in values.iter_mut().enumerate() {
        let code = nibble(&block[6..], i) | fifth_bit(&block[2..], i);
        *value = scale * (f32::from(code) - 16.0);
    }
}

fn q5_1(block: &[u8], values: &mut [f32]) {
    let (scale, min) = (half_at(block, 0), half_at(block, 2));
    for (i, value) in values.iter_mut().enumerate() {
        let code = nibble(&block[8..], i) | fifth_bit(&block[4..], i);
        *value = scale * f32::from(code) + min;
    }
}

fn q8_0(block: &[u8], values: &mut [f32]) {
    let scale = half_at(block, 0);
    for (value, &code) in values.iter_mut().zip(&block[2..]) {
        *value = scale * f32::from(code as i8);
    }
}

/// The six-bit scale and minimum of sub-block `i` of 8, packed into 12 bytes: the first four in the low six bits of bytes
/// 0..4 and 4..8; of the others the low four bits in bytes 8..12, the high two on top of the first eight bytes.
fn scale_and_min(packed: &[u8], i: usize) -> (f32, f32) {
    let (scale, min) = if i < 4 {
        (packed[i] & 63, packed[i + 4] & 63)
    } else {
        ((packed[i + 4] & 15) | (packed[i - 4] >> 6 << 4), (packed[i + 4] >> 4) | (packed[i] >> 6 << 4))
    };
    (f32::from(scale), f32::from(min))
}

/// Code `i` of 32 in sub-block `sub` of 8: a pair of sub-blocks shares 32 bytes, low nibbles first.
fn k_nibble(codes: &[u8], sub: usize, i: usize) -> u8 {
    (codes[sub / 2 * 32 + i] >> (sub % 2 * 4)) & 15
}

fn q4_k(block: &[u8], values: &mut [f32]) {
    let (scale, min) = (half_at(block, 0), half_at(block, 2));
    let (packed, codes) = block[4..].split_at(12);
    for (sub, values) in values.chunks_exact_mut(32).enumerate() {
        let (sub_scale, sub_min) = scale_and_min(packed, sub);
        let (sub_scale, sub_min) = (scale * sub_scale, min * sub_min);
        for (i, value) in values.iter_mut().enumerate() {
            *value = sub_scale * f32::from(k_nibble(codes, sub, i)) - sub_min;
        }
    }
}

fn q5_k(block: &[u8], values: &mut [f32]) {
    let (scale, min) = (half_at(block, 0), half_at(block, 2));
    let (packed, rest) = block[4..].split_at(12);
    let (fifth_bits, codes) = rest.split_at(32);
    for (sub, values) in values.chunks_exact_mut(32).enumerate() {
        let (sub_scale, sub_min) = scale_and_min(packed, sub);
        let (sub_scale, sub_min) = (scale * sub_scale, min * sub_min);
        for (i, value) in values.iter_mut().enumerate() {
            let code = k_nibble(codes, sub, i) | (fifth_bits[i] >> sub & 1) << 4;
            *value = sub_scale * f32::from(code) - sub_min;
        }
    }
}

/// Two halves of 128 values; in each, the low four bits of values 0..64 and 64..128 share 64 bytes, and the high two bits
/// of the four runs of 32 share 32 bytes. A scale holds for 16 values.
fn q6_k(block: &[u8], values: &mut [f32]) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, scale) = rest.split_at(16);
    let scale = half_at(scale, 0);
    for (i, value) in values.iter_mut().enumerate() {
        let (half, run, at) = (i / 128, i % 128 / 32, i % 32);
        let low = (low[half * 64 + run % 2 * 32 + at] >> (run / 2 * 4)) & 15;
        let high = (high[half * 32 + at] >> (run * 2)) & 3;
        let sub_scale = scale * f32::from(scales[i / 16] as i8);
        *value = sub_scale * (f32::from(low | high << 4) - 32.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    /// Random blocks of every type and what the `gguf` package makes of them; see `goldens.py`.
    const GOLDEN: &[u8] = include_bytes!("golden.safetensors");

    #[test]
    fn every_type_equals_the_gguf_package_bit_for_bit() {
        let golden = SafeTensors::deserialize(GOLDEN).unwrap();
        for kind in ALL {
            let blocks = golden.tensor(&format!("{}.blocks", kind.name())).unwrap();
            let expected = golden.tensor(&format!("{}.values", kind.name())).unwrap();
            let expected: Vec<u32> =
                expected.data().chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            let mut values = vec![0.0; expected.len()];
            dequantize(kind, blocks.data(), &mut values);
            let bits: Vec<u32> = values.iter().map(|v| v.to_bits()).collect();
            assert!(values.len() >= 128 && values.iter().any(|&v| v != values[0]), "{} has data", kind.name());
            assert_eq!(bits, expected, "{}", kind.name());
        }
    }

    #[test]
    fn types_are_found_by_their_number() {
        assert_eq!(TensorType::from_id(3), Some(Q4_1));
        assert_eq!(TensorType::from_id(10), None, "Q2_K is not read");
        assert!(TensorType::names().starts_with("one of F32 (0) F16 (1) BF16 (30)"), "{}", TensorType::names());
    }
}

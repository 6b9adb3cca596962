//! Element types of tensors, and how the CPU reads and rounds them.

use std::fmt;

use half::{bf16, f16};

/// What a tensor's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    F16,
    BF16,
    I32,
    I8,
    U8,
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinities.
    E4M3,
    /// Eight unsigned 4-bit integers in a little-endian u32, the first in the lowest bits.
    Int4x8,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 | DType::Int4x8 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::I8 | DType::U8 | DType::E4M3 => 1,
        }
    }

    /// The name that settings and `config.json` use.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            DType::I32 => "int32",
            DType::I8 => "int8",
            DType::U8 => "uint8",
            DType::E4M3 => "float8_e4m3fn",
            DType::Int4x8 => "int4x8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that a tensor's memory may be read as.
///
/// # Safety
/// Every bit pattern of `DTYPE.bytes()` bytes must be a value of the type, and the type must have exactly that size.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    const DTYPE: DType;
}

// SAFETY: plain numbers, each of the size its DType names, all bit patterns valid.
unsafe impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
// SAFETY: as above; `f16` is a transparent u16.
unsafe impl Element for f16 {
    const DTYPE: DType = DType::F16;
}
// SAFETY: as above; `bf16` is a transparent u16.
unsafe impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}
// SAFETY: as above.
unsafe impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
// SAFETY: as above.
unsafe impl Element for i8 {
    const DTYPE: DType = DType::I8;
}
// SAFETY: as above.
unsafe impl Element for u8 {
    const DTYPE: DType = DType::U8;
}
// SAFETY: as above; eight nibbles fill a u32.
unsafe impl Element for u32 {
    const DTYPE: DType = DType::Int4x8;
}

/// An element that activations are stored in. Arithmetic is always in f32; a store rounds to nearest, ties to even.
pub trait Float: Element {
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;
}

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
}

/// Runs `$body` with `$T` bound to the Rust type of an activation dtype, or returns the op's dtype error.
#[macro_export]
macro_rules! with_float {
    ($op:expr, $arg:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            dtype => return Err($crate::KernelError::DType { op: $op, arg: $arg, dtype }),
        }
    };
}

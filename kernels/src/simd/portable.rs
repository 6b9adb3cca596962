//! Arrays and plain loops, which the compiler turns into what vectors the target surely has.

use half::f16;

use super::{F32x16, LANES};

#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn from_fn(f: impl Fn(usize) -> f32) -> Self {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = f(i);
        }
        Portable(out)
    }
}

impl F32x16 for Portable {
    type Words = [u32; LANES];

    // On x86 this path is for tests, and needs no large tiles.
    const FIT: usize = if cfg!(target_arch = "x86_64") { 1 } else { 8 };

    #[inline(always)]
    unsafe fn zero() -> Self {
        Portable([0.0; LANES])
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Portable([value; LANES])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller gives sixteen floats.
        Portable(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller gives room for sixteen floats.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        Self::from_fn(|i| self.0[i] * b.0[i])
    }

    // Not inlined on x86, where each lane is a call: sixteen of them at every use would be much code.
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        Self::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i]))
    }

    #[inline(always)]
    unsafe fn fold(self) -> f32 {
        crate::math::fold(self.0)
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller gives sixteen f16.
        let halves = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Self::from_fn(|i| f16::from_bits(halves[i]).to_f32())
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        // SAFETY: the caller gives sixteen i8.
        let bytes = unsafe { from.cast::<[i8; LANES]>().read_unaligned() };
        Self::from_fn(|i| f32::from(bytes[i]))
    }

    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> Self {
        // SAFETY: the caller gives sixteen bytes.
        let bytes = unsafe { from.cast::<[u8; LANES]>().read_unaligned() };
        // The sign to the top, exponent and mantissa to where f32 has the like: the exponents count from 120 apart.
        Self::from_fn(|i| f32::from_bits(u32::from(bytes[i] & 0x80) << 24 | u32::from(bytes[i] & 0x7F) << 20))
    }

    #[inline(always)]
    unsafe fn load_words(from: *const u8) -> Self::Words {
        // SAFETY: the caller gives sixteen words.
        unsafe { from.cast::<Self::Words>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn bf16_low(words: Self::Words) -> Self {
        Self::from_fn(|i| f32::from_bits(words[i] << 16))
    }

    #[inline(always)]
    unsafe fn bf16_high(words: Self::Words) -> Self {
        Self::from_fn(|i| f32::from_bits(words[i] & 0xFFFF_0000))
    }

    #[inline(always)]
    unsafe fn masked(words: Self::Words, mask: u32) -> Self {
        Self::from_fn(|i| (words[i] & mask) as i32 as f32)
    }

    #[inline(always)]
    unsafe fn shift_4(words: Self::Words) -> Self::Words {
        words.map(|word| word >> 4)
    }

    #[inline(always)]
    unsafe fn before(self, pointer: *const u8) -> (Self, *const u8) {
        (self, pointer)
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}

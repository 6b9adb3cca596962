//! Sixteen f32 at a time, in whatever registers this CPU has: one AVX-512 register, two AVX, or an array that the compiler
//! spreads over NEON or SSE.
//!
//! A [`Kernel`] is written once over [`F32x16`] and compiled once a [`Level`]. All levels compute the same bits: products and
//! sums are fused multiply-adds of single lanes, never sums across lanes.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use std::sync::OnceLock;

/// Lanes of an [`F32x16`].
pub(crate) const LANES: usize = 16;

/// Instructions to compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// What the compiler may assume: NEON on 64-bit Arm; on x86 slow, since fused multiply-add is then a library call.
    Portable,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512F.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The widest of this CPU, or what the environment variable `DRAFTHORSE_SIMD` names, if the CPU has it.
    pub(crate) fn best() -> Level {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| {
            let available = Level::available();
            let wanted = std::env::var("DRAFTHORSE_SIMD").ok();
            let named = available.iter().find(|level| wanted.as_deref() == Some(level.name()));
            if let (Some(wanted), None) = (&wanted, named) {
                tracing::warn!(%wanted, "DRAFTHORSE_SIMD names nothing that this CPU has");
            }
            *named.or(available.last()).unwrap_or(&Level::Portable)
        })
    }

    /// As in `DRAFTHORSE_SIMD`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
        }
    }

    /// All that this CPU has, the widest last.
    pub(crate) fn available() -> Vec<Level> {
        let mut levels = vec![Level::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            if avx2 {
                levels.push(Level::Avx2);
            }
            if avx2 && is_x86_feature_detected!("avx512f") {
                levels.push(Level::Avx512);
            }
        }
        levels
    }

    /// Runs `kernel` with these instructions.
    ///
    /// # Safety
    /// The CPU must have them ([`best`](Self::best) and [`available`](Self::available) see to it), and what the kernel itself
    /// asks for must hold.
    #[inline(always)]
    pub(crate) unsafe fn run<K: Kernel>(self, kernel: K) {
        // SAFETY: passed on to the caller.
        unsafe {
            match self {
                Level::Portable => kernel.run::<portable::Portable>(),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => avx2::run(kernel),
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => avx512::run(kernel),
            }
        }
    }

    /// [`F32x16::FIT`] of these instructions.
    pub(crate) const fn fit(self) -> usize {
        match self {
            Level::Portable => portable::Portable::FIT,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::Avx2::FIT,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::Avx512::FIT,
        }
    }
}

/// A computation that does not know its instructions.
pub(crate) trait Kernel {
    /// Must be `#[inline(always)]`, and so must all that it calls: only then is it compiled for the level it runs at.
    ///
    /// # Safety
    /// The CPU must have the instructions of `V`; the kernel's type says what else.
    unsafe fn run<V: F32x16>(self);
}

/// Sixteen f32.
///
/// # Safety
/// All functions need the instructions of the implementor; those with pointers read or write sixteen elements there, at any
/// alignment.
pub(crate) trait F32x16: Copy {
    /// Sixteen u32.
    type Words: Copy;

    /// How many of these the registers hold.
    const FIT: usize;

    unsafe fn zero() -> Self;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn mul(self, b: Self) -> Self;
    /// `self * b + c`, rounded once.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;

    /// The sum of the lanes as [`math::fold`](crate::math::fold) adds them.
    unsafe fn fold(self) -> f32;

    /// Widens f16.
    unsafe fn load_f16(from: *const u8) -> Self;
    /// Converts i8.
    unsafe fn load_i8(from: *const u8) -> Self;
    /// Converts e4m3, divided by 2^120; the codes that are no numbers become 480.
    unsafe fn load_e4m3(from: *const u8) -> Self;

    unsafe fn load_words(from: *const u8) -> Self::Words;
    /// The bf16 in the low halves, widened.
    unsafe fn bf16_low(words: Self::Words) -> Self;
    /// The bf16 in the high halves, widened.
    unsafe fn bf16_high(words: Self::Words) -> Self;
    /// `words & mask` as numbers; `mask` must not have the top bit.
    unsafe fn masked(words: Self::Words, mask: u32) -> Self;
    /// Shifts each word right by 4 bits.
    unsafe fn shift_4(words: Self::Words) -> Self::Words;

    /// Both as they were, but to the compiler the pointer is known only once `self` is: what is read through it is read after.
    unsafe fn before(self, pointer: *const u8) -> (Self, *const u8);

    /// Asks for the cache line at an address, valid or not, to be brought near.
    unsafe fn prefetch(from: *const u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every function of the trait on fixed input, results concatenated.
    struct All<'a> {
        bytes: &'a [u8; 64],
        floats: &'a [f32; 16],
        out: &'a mut Vec<f32>,
    }

    impl Kernel for All<'_> {
        #[inline(always)]
        unsafe fn run<V: F32x16>(self) {
            let bytes = self.bytes.as_ptr();
            let mut push = [0.0f32; 16];
            // SAFETY: 64 bytes and 16 floats to read, 16 to write.
            unsafe {
                let x = V::load(self.floats.as_ptr());
                let words = V::load_words(bytes);
                V::prefetch(bytes);
                for value in [
                    V::zero(),
                    V::splat(-1.5),
                    x,
                    x.mul(V::splat(0.1)),
                    x.mul_add(x, V::splat(1e-3)),
                    V::load_f16(bytes),
                    V::load_i8(bytes),
                    V::load_e4m3(bytes),
                    V::bf16_low(words),
                    V::bf16_high(words),
                    V::masked(words, 0xF0),
                    V::masked(V::shift_4(words), 0x0F00_0000),
                    V::splat(x.mul(V::load_i8(bytes)).fold()),
                ] {
                    value.store(push.as_mut_ptr());
                    self.out.extend(push);
                }
            }
        }
    }

    #[test]
    fn all_levels_compute_the_same_bits() {
        let bytes: [u8; 64] = std::array::from_fn(|i| (i * 37 % 251) as u8);
        let floats: [f32; 16] = std::array::from_fn(|i| (i as f32 - 7.3) * 0.37);
        let run = |level: Level| {
            let mut out = Vec::new();
            // SAFETY: the level is available.
            unsafe { level.run(All { bytes: &bytes, floats: &floats, out: &mut out }) };
            out.iter().map(|f| f.to_bits()).collect::<Vec<_>>()
        };
        let portable = run(Level::Portable);
        assert_eq!(portable.len(), 13 * 16);
        assert_eq!(f32::from_bits(portable[4 * 16]), floats[0].mul_add(floats[0], 1e-3));
        for level in Level::available() {
            assert_eq!(run(level), portable, "{level:?}");
        }
    }
}

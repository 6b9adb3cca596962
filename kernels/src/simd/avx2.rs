//! Two AVX registers; needs AVX2, FMA and F16C.

use std::arch::asm;
use std::arch::x86_64::*;

use super::{F32x16, Kernel};

/// Compiles `kernel` for these instructions and runs it.
///
/// # Safety
/// As [`Kernel::run`].
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) {
    // SAFETY: passed on to the caller.
    unsafe { kernel.run::<Avx2>() }
}

#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

// SAFETY of the blocks below: the caller has the instructions and gives valid pointers, as the trait demands.
impl F32x16 for Avx2 {
    type Words = (__m256i, __m256i);

    const FIT: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: see above.
        unsafe { Avx2(_mm256_setzero_ps(), _mm256_setzero_ps()) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: see above.
        unsafe { Avx2(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: see above.
        unsafe { Avx2(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Avx2(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: see above.
        unsafe { Avx2(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
    }

    #[inline(always)]
    unsafe fn fold(self) -> f32 {
        // SAFETY: see above.
        unsafe { fold_8(_mm256_add_ps(self.0, self.1)) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            let from = from.cast::<__m128i>();
            Avx2(_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from.add(1))))
        }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8).cast()));
            Avx2(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            // From the top byte, shifted down by four with the sign drawn out: what is between sign and exponent is then cleared.
            let mask = _mm256_set1_epi32(0x87F0_0000_u32 as i32);
            let widen = |bytes| {
                let top = _mm256_slli_epi32::<24>(_mm256_cvtepu8_epi32(bytes));
                _mm256_castsi256_ps(_mm256_and_si256(_mm256_srai_epi32::<4>(top), mask))
            };
            Avx2(widen(_mm_loadl_epi64(from.cast())), widen(_mm_loadl_epi64(from.add(8).cast())))
        }
    }

    #[inline(always)]
    unsafe fn load_words(from: *const u8) -> Self::Words {
        // SAFETY: see above.
        unsafe {
            let from = from.cast::<__m256i>();
            (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)))
        }
    }

    #[inline(always)]
    unsafe fn bf16_low(words: Self::Words) -> Self {
        // SAFETY: see above.
        unsafe {
            Avx2(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words.0)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words.1)),
            )
        }
    }

    #[inline(always)]
    unsafe fn bf16_high(words: Self::Words) -> Self {
        // SAFETY: see above.
        unsafe {
            let mask = _mm256_set1_epi32(0xFFFF_0000_u32 as i32);
            Avx2(
                _mm256_castsi256_ps(_mm256_and_si256(words.0, mask)),
                _mm256_castsi256_ps(_mm256_and_si256(words.1, mask)),
            )
        }
    }

    #[inline(always)]
    unsafe fn masked(words: Self::Words, mask: u32) -> Self {
        // SAFETY: see above.
        unsafe {
            let mask = _mm256_set1_epi32(mask as i32);
            Avx2(
                _mm256_cvtepi32_ps(_mm256_and_si256(words.0, mask)),
                _mm256_cvtepi32_ps(_mm256_and_si256(words.1, mask)),
            )
        }
    }

    #[inline(always)]
    unsafe fn shift_4(words: Self::Words) -> Self::Words {
        // SAFETY: see above.
        unsafe { (_mm256_srli_epi32::<4>(words.0), _mm256_srli_epi32::<4>(words.1)) }
    }

    #[inline]
    #[target_feature(enable = "avx")]
    #[expect(clippy::pointers_in_nomem_asm_block, reason = "no instruction, so nothing is read or written")]
    unsafe fn before(mut self, mut pointer: *const u8) -> (Self, *const u8) {
        // SAFETY: no instruction.
        unsafe {
            asm!("/* {0} {1} {2} */", inout(reg) pointer, inout(ymm_reg) self.0, inout(ymm_reg) self.1,
                options(pure, nomem, nostack, preserves_flags));
        }
        (self, pointer)
    }

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        // SAFETY: see above; a prefetch of a bad address does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }
}

/// Halves are added until one is left.
///
/// # Safety
/// The CPU must have AVX.
#[inline(always)]
pub(super) unsafe fn fold_8(eight: __m256) -> f32 {
    // SAFETY: as the caller promises.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

//! One AVX-512 register; needs AVX-512F.

use std::arch::asm;
use std::arch::x86_64::*;

use super::avx2::fold_8;
use super::{F32x16, Kernel};

/// Compiles `kernel` for these instructions and runs it.
///
/// # Safety
/// As [`Kernel::run`].
#[inline(never)]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) {
    // SAFETY: passed on to the caller.
    unsafe { kernel.run::<Avx512>() }
}

#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

// SAFETY of the blocks below: the caller has the instructions and gives valid pointers, as the trait demands.
impl F32x16 for Avx512 {
    type Words = __m512i;

    const FIT: usize = 32;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: see above.
        unsafe { Avx512(_mm512_setzero_ps()) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: see above.
        unsafe { Avx512(_mm512_set1_ps(value)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: see above.
        unsafe { Avx512(_mm512_loadu_ps(from)) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: see above.
        unsafe { Avx512(_mm512_mul_ps(self.0, b.0)) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: see above.
        unsafe { Avx512(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }

    #[inline(always)]
    unsafe fn fold(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0)));
            fold_8(_mm256_add_ps(_mm512_castps512_ps256(self.0), high))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        // SAFETY: see above.
        unsafe { Avx512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))) }
    }

    #[inline(always)]
    unsafe fn load_e4m3(from: *const u8) -> Self {
        // SAFETY: see above.
        unsafe {
            // As with AVX2.
            let mask = _mm512_set1_epi32(0x87F0_0000_u32 as i32);
            let top = _mm512_slli_epi32::<24>(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())));
            Avx512(_mm512_castsi512_ps(_mm512_and_si512(_mm512_srai_epi32::<4>(top), mask)))
        }
    }

    #[inline(always)]
    unsafe fn load_words(from: *const u8) -> Self::Words {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn bf16_low(words: Self::Words) -> Self {
        // SAFETY: see above.
        unsafe { Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))) }
    }

    #[inline(always)]
    unsafe fn bf16_high(words: Self::Words) -> Self {
        // SAFETY: see above.
        unsafe {
            let mask = _mm512_set1_epi32(0xFFFF_0000_u32 as i32);
            Avx512(_mm512_castsi512_ps(_mm512_and_si512(words, mask)))
        }
    }

    #[inline(always)]
    unsafe fn masked(words: Self::Words, mask: u32) -> Self {
        // SAFETY: see above.
        unsafe { Avx512(_mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(mask as i32)))) }
    }

    #[inline(always)]
    unsafe fn shift_4(words: Self::Words) -> Self::Words {
        // SAFETY: see above.
        unsafe { _mm512_srli_epi32::<4>(words) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    #[expect(clippy::pointers_in_nomem_asm_block, reason = "no instruction, so nothing is read or written")]
    unsafe fn before(mut self, mut pointer: *const u8) -> (Self, *const u8) {
        // SAFETY: no instruction.
        unsafe {
            asm!("/* {0} {1} */", inout(reg) pointer, inout(zmm_reg) self.0, options(pure, nomem, nostack, preserves_flags));
        }
        (self, pointer)
    }

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        // SAFETY: see above; a prefetch of a bad address does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }
}

//! Counter-based random numbers: any number of the stream at once, from key and counter alone.
//!
//! Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", Philox4x32-10.

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// The golden ratio and sqrt(3) - 1, as fractions of 2^32.
const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// Four random words.
pub(super) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [a, b] = [0, 1].map(|i| u64::from(MULTIPLIERS[i]) * u64::from(counter[2 * i]));
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

/// The number in [0, 1) that belongs to a position of a sequence with this seed: 53 bits of words 0 and 1.
pub(super) fn uniform(seed: [u32; 2], position: u32) -> f64 {
    let [high, low, ..] = philox([position, 0, 0, 0], seed);
    let bits = u64::from(high) << 32 | u64::from(low);
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // The three vectors published with the authors' library.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(counter, [0xa409_3822, 0x299f_31d0]), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn numbers_are_spread_evenly() {
        let mut buckets = [0u32; 16];
        for position in 0..160_000 {
            let u = uniform([7, 0], position);
            assert!((0.0..1.0).contains(&u));
            buckets[(u * 16.0) as usize] += 1;
        }
        // 10,000 expected, standard deviation 97.
        assert!(buckets.iter().all(|n| n.abs_diff(10_000) < 500), "{buckets:?}");
    }
}

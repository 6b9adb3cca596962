use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

const PLAIN: RowParams = RowParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: [5, 6], position: 0 };

/// Samples rows of one length, each its own way.
fn run(rows: &[(Vec<f32>, RowParams)]) -> Vec<i32> {
    let (device, num, vocab) = (&Device::Cpu, rows.len(), rows[0].0.len());
    let floats = |value: &dyn Fn(&RowParams) -> f32| {
        let values: Vec<f32> = rows.iter().map(|row| value(&row.1)).collect();
        Tensor::from_slice(device, "floats", &values, [num]).unwrap()
    };
    let ints = |value: &dyn Fn(&RowParams) -> i32| {
        let values: Vec<i32> = rows.iter().map(|row| value(&row.1)).collect();
        Tensor::from_slice(device, "ints", &values, [num]).unwrap()
    };
    let logits: Vec<f32> = rows.iter().flat_map(|row| row.0.iter().copied()).collect();
    let logits = Tensor::from_slice(device, "logits", &logits, [num, vocab]).unwrap();
    let seeds: Vec<i32> = rows.iter().flat_map(|row| row.1.seed.map(|half| half as i32)).collect();
    let params = SampleRows {
        temperature: &floats(&|row| row.temperature),
        top_k: &ints(&|row| row.top_k),
        top_p: &floats(&|row| row.top_p),
        min_p: &floats(&|row| row.min_p),
        seed: &Tensor::from_slice(device, "seed", &seeds, [num, 2]).unwrap(),
        position: &ints(&|row| row.position),
    };
    let mut ids = Tensor::zeros(device, "ids", [num], DType::I32).unwrap();
    let workspace = Workspace::new(device, workspace_bytes(vocab)).unwrap();
    sample(&logits, &params, &mut ids, &workspace).unwrap();
    ids.to_vec().unwrap()
}

#[test]
fn greedy_takes_the_first_of_the_likeliest() {
    let greedy = RowParams { temperature: 0.0, ..PLAIN };
    for vocab in [1, 5, 64, 65, 1000] {
        for at in [0, vocab / 2, vocab - 1] {
            let mut logits = vec![-1.0; vocab];
            logits[at] = 2.0;
            logits[vocab - 1] = 2.0;
            assert_eq!(run(&[(logits, greedy)]), [at as i32]);
        }
    }
}

#[test]
fn a_bad_row_fails_alone() {
    let good = vec![0.0, 3.0, 1.0];
    let greedy = RowParams { temperature: 0.0, ..PLAIN };
    for params in [PLAIN, greedy, RowParams { top_k: 2, top_p: 0.9, ..PLAIN }] {
        let alone = run(&[(good.clone(), params)]);
        for bad in [f32::NAN, f32::INFINITY] {
            let ids = run(&[(good.clone(), params), (vec![0.0, bad, 1.0], params), (good.clone(), params)]);
            assert_eq!(ids, [alone[0], FAILED, alone[0]]);
        }
        assert_eq!(run(&[(vec![f32::NEG_INFINITY; 3], params)]), [FAILED]);
    }
}

#[test]
fn masked_tokens_are_never_picked() {
    let logits = vec![f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.5, f32::NEG_INFINITY];
    for position in 0..200 {
        for params in [PLAIN, RowParams { top_k: 4, ..PLAIN }, RowParams { top_p: 0.999, temperature: 50.0, ..PLAIN }] {
            assert!([1, 3].contains(&run(&[(logits.clone(), RowParams { position, ..params })])[0]));
        }
    }
}

#[test]
fn agrees_with_sorting() {
    let mut rng = StdRng::seed_from_u64(11);
    for case in 0..1500 {
        let vocab = [2, 17, 64, 200, 1500, 5000][case % 6];
        let spread = [0.5f32, 4.0, 20.0][rng.random_range(0..3)];
        // Every third case has few distinct logits: many ties.
        let step = if case % 3 == 0 { 0.5 } else { 0.0 };
        let logits: Vec<f32> = (0..vocab)
            .map(|_| {
                let logit = rng.random_range(-spread..spread);
                if rng.random_range(0..10) == 0 {
                    f32::NEG_INFINITY
                } else if step > 0.0 {
                    (logit / step).round() * step
                } else {
                    logit
                }
            })
            .chain([0.0])
            .collect();
        let row = RowParams {
            temperature: [0.3, 1.0, 2.5][rng.random_range(0..3)],
            top_k: [0, 1, 3, 40, 1200, 100_000][rng.random_range(0..6)],
            top_p: [1.0, 0.999, 0.9, 0.3, 1e-6][rng.random_range(0..5)],
            min_p: [0.0, 0.0, 0.01, 0.5, 1.0][rng.random_range(0..5)],
            seed: [rng.random(), rng.random()],
            position: rng.random_range(0..100_000),
        };
        assert_eq!(run(&[(logits.clone(), row)]), [cpu::sample(&logits, row)], "case {case}: vocab {vocab}, {row:?}");
    }
}

/// Draws many tokens and compares their counts with the law: masses of the kept tokens, computed by hand.
fn assert_law(logits: &[f32], params: RowParams, masses: &[f64]) {
    const DRAWS: usize = 40_000;
    let mut counts = vec![0usize; logits.len()];
    for start in (0..DRAWS).step_by(1000) {
        let rows: Vec<(Vec<f32>, RowParams)> = (start..start + 1000)
            .map(|position| (logits.to_vec(), RowParams { position: position as i32, ..params }))
            .collect();
        run(&rows).into_iter().for_each(|id| counts[id as usize] += 1);
    }
    let total: f64 = masses.iter().sum();
    let mut chi_square = 0.0;
    for (count, mass) in counts.iter().zip(masses) {
        let expected = DRAWS as f64 * mass / total;
        if *mass == 0.0 {
            assert_eq!(*count, 0, "{params:?} picked what it must not: {counts:?}");
        } else {
            chi_square += (*count as f64 - expected).powi(2) / expected;
        }
    }
    // Five degrees of freedom at most: above 25.7 one time in ten thousand, and the seed is fixed.
    assert!(chi_square < 25.7, "{params:?}: chi-square {chi_square}, {counts:?}");
}

#[test]
fn draws_follow_the_law() {
    // Probabilities 0.4, 0.1, 0.25, 0.05, 0.1, 0.1 at temperature 1.
    let logits: Vec<f32> = [8.0f32, 2.0, 5.0, 1.0, 2.0, 2.0].iter().map(|p| p.ln()).collect();
    assert_law(&logits, PLAIN, &[8.0, 2.0, 5.0, 1.0, 2.0, 2.0]);
    let square = RowParams { temperature: 0.5, ..PLAIN };
    assert_law(&logits, square, &[64.0, 4.0, 25.0, 1.0, 4.0, 4.0]);
    let two = RowParams { top_k: 2, ..PLAIN };
    assert_law(&logits, two, &[8.0, 0.0, 5.0, 0.0, 0.0, 0.0]);
    let three = RowParams { top_k: 3, ..PLAIN };
    assert_law(&logits, three, &[8.0, 2.0, 5.0, 0.0, 2.0, 2.0]);
    let nucleus = RowParams { top_p: 0.6, ..PLAIN };
    assert_law(&logits, nucleus, &[8.0, 0.0, 5.0, 0.0, 0.0, 0.0]);
    // 0.4 + 0.25 are 0.65: the three of 0.1 come in together, the last does not.
    let wider = RowParams { top_p: 0.7, ..PLAIN };
    assert_law(&logits, wider, &[8.0, 2.0, 5.0, 0.0, 2.0, 2.0]);
    let likely = RowParams { min_p: 0.2, ..PLAIN };
    assert_law(&logits, likely, &[8.0, 2.0, 5.0, 0.0, 2.0, 2.0]);
    // min_p leaves 8, 5 and the 2s, top_k two of them, and of those top_p the first: 8 of 13 are over 0.6.
    let all = RowParams { min_p: 0.2, top_k: 2, top_p: 0.6, ..PLAIN };
    assert_law(&logits, all, &[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    let masked: Vec<f32> = [8.0f32.ln(), f32::NEG_INFINITY, 5.0f32.ln()].into();
    assert_law(&masked, PLAIN, &[8.0, 0.0, 5.0]);
}

#[test]
fn a_row_is_the_same_in_any_batch_and_changes_with_seed_and_position() {
    let mut rng = StdRng::seed_from_u64(12);
    let logits: Vec<f32> = (0..3000).map(|_| rng.random_range(-1.0f32..1.0)).collect();
    let rows: Vec<(Vec<f32>, RowParams)> =
        (0..40).map(|i| (logits.clone(), RowParams { seed: [i, i / 7], position: 3 * i as i32, ..PLAIN })).collect();
    let together = run(&rows);
    for (row, &id) in rows.iter().zip(&together) {
        assert_eq!(run(std::slice::from_ref(row)), [id]);
    }
    let mut distinct = together.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert!(distinct.len() > 35, "{} of 40 differ", distinct.len());
    for change in [RowParams { seed: [0, 1], ..rows[0].1 }, RowParams { position: 1, ..rows[0].1 }] {
        assert_ne!(run(&[(logits.clone(), change)]), [together[0]]);
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let device = &Device::Cpu;
    let floats = Tensor::zeros(device, "floats", [2], DType::F32).unwrap();
    let ints = Tensor::zeros(device, "ints", [2], DType::I32).unwrap();
    let seed = Tensor::zeros(device, "seed", [2, 1], DType::I32).unwrap();
    let logits = Tensor::zeros(device, "logits", [2, 8], DType::F32).unwrap();
    let rows =
        SampleRows { temperature: &floats, top_k: &ints, top_p: &floats, min_p: &floats, seed: &seed, position: &ints };
    let mut ids = Tensor::zeros(device, "ids", [2], DType::I32).unwrap();
    let workspace = Workspace::new(device, workspace_bytes(8)).unwrap();
    let err = sample(&logits, &rows, &mut ids, &workspace).unwrap_err();
    assert_eq!(err.to_string(), "sample: seed has shape [2, 1], expected [2, 2]");
}

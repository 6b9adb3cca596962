//! A drafter that is a copy of its base is always right: each step brings all drafts and one token more.
//!
//! Why it is a copy to the last bit, see [`pairs::copied`]. The CPU's bits do not depend on who else is in a step, so neither does this.

use drafthorse_control::{SamplingParams, TokenId};
use drafthorse_tests::pairs::{self, UNSEEN};
use drafthorse_tests::tiny::VOCAB;
use drafthorse_worker::SpeculateConfig;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::{MANY_BLOCKS, MAX_LEN, answers, drafts, engine};

const PROMPTS: usize = 16;

/// Prompts that begin with `first`, of all lengths up to a chunk and more.
fn prompts(first: TokenId) -> Vec<Vec<TokenId>> {
    let mut random = StdRng::seed_from_u64(5);
    let mut prompt = |len| [first].into_iter().chain((0..len).map(|_| random.random_range(2..VOCAB as u32))).collect();
    (0..PROMPTS).map(|i| prompt(1 + 3 * i)).collect()
}

fn sampling(max_tokens: usize, temperature: f32) -> SamplingParams {
    SamplingParams { max_tokens: max_tokens as u32, temperature, seed: 11, ..SamplingParams::default() }
}

/// The tokens of each step where all drafts hold: the prompt's, then as many as may be.
fn all_held(num_tokens: usize, num_drafts: usize) -> Vec<usize> {
    let (whole, rest) = ((num_tokens - 1) / (num_drafts + 1), (num_tokens - 1) % (num_drafts + 1));
    let steps = [1].into_iter().chain(std::iter::repeat_n(num_drafts + 1, whole));
    steps.chain((rest > 0).then_some(rest)).collect()
}

#[test]
fn a_copy_of_the_base_accepts_all_its_drafts_alone_and_in_company() {
    let pair = pairs::copied();
    let plain = engine(&pair, SpeculateConfig::default(), MANY_BLOCKS);
    let lengths = |i: usize| 25 + i % 7;
    let requests = |temperature| {
        prompts(UNSEEN).into_iter().enumerate().map(move |(i, prompt)| (prompt, sampling(lengths(i), temperature)))
    };
    let greedy = answers(&plain, requests(0.0));
    let seeded = answers(&plain, requests(0.8));
    assert!(greedy.iter().zip(&seeded).all(|(greedy, seeded)| greedy.text != seeded.text));
    let mut said: Vec<TokenId> = greedy.iter().flat_map(|answer| answer.text.clone()).collect();
    said.sort_unstable();
    said.dedup();
    assert!(said.len() > VOCAB / 2, "only {} tokens are ever said", said.len());

    for num_drafts in [1, 3, 5] {
        let engine = engine(&pair, drafts(&pair, num_drafts as u32, false), MANY_BLOCKS);
        let together = answers(&engine, requests(0.0));
        let alone: Vec<_> = requests(0.0).map(|request| answers(&engine, [request]).remove(0)).collect();
        for (i, want) in greedy.iter().enumerate() {
            for answer in [&together[i], &alone[i]] {
                assert_eq!(answer.text, want.text, "{num_drafts} drafts, prompt {i}");
                assert_eq!(answer.steps, all_held(lengths(i), num_drafts), "{num_drafts} drafts, prompt {i}");
                assert_eq!(answer.usage.drafts_accepted, answer.usage.drafts_verified);
            }
        }
        let sampled = answers(&engine, requests(0.8));
        let refused = |answer: &super::Answer| answer.usage.drafts_verified - answer.usage.drafts_accepted;
        assert!(sampled.iter().map(refused).sum::<u32>() > 0, "drafts are the likeliest tokens");
        for (i, (answer, want)) in sampled.iter().zip(&seeded).enumerate() {
            assert_eq!(answer.text, want.text, "{num_drafts} drafts, prompt {i}, sampled");
        }
    }
}

#[test]
fn it_is_not_a_copy_where_the_first_token_is_seen() {
    let pair = pairs::copied();
    let engine = engine(&pair, drafts(&pair, 3, false), MANY_BLOCKS);
    let max_tokens = MAX_LEN as usize - 3 * PROMPTS;
    let answers = answers(&engine, prompts(UNSEEN + 1).into_iter().map(|prompt| (prompt, sampling(max_tokens, 0.0))));
    let refused = answers.iter().filter(|answer| answer.usage.drafts_accepted < answer.usage.drafts_verified).count();
    assert!(refused > PROMPTS / 2, "{refused} of {PROMPTS} have drafts that did not hold");
}

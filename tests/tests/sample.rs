//! The sample model against transformers in f32 on its dequantized weights.
//!
//! Needs `make model`; without it each test says that it was skipped.

use drafthorse_model::LoadOptions;
use drafthorse_tests::close::{self, argmax, log_softmax};
use drafthorse_tests::runner::Runner;
use drafthorse_tests::sample::{self, Prompt};

/// Longest prompt with its answer.
const MAX_LEN: usize = 256;

#[test]
fn the_best_tokens_after_a_prompt_and_their_probabilities() {
    let Some(folder) = sample::folder_or_say_why_not() else { return };
    let mut runner = Runner::load(&folder, &LoadOptions::default(), MAX_LEN).unwrap();
    for prompt in sample::prompts() {
        runner.reset();
        let logits = runner.run(&prompt.ids).unwrap();
        let vocab = logits.len() / prompt.ids.len();
        let logprobs = log_softmax(&logits[logits.len() - vocab..]);
        for &(id, want) in &prompt.top {
            let got = logprobs[id as usize];
            assert!((got - want).abs() < close::LOGPROB, "{:?}: token {id} has {got}, not {want}", prompt.text);
        }
        let (last, want) = prompt.top[4];
        let better = logprobs.iter().filter(|&&logprob| logprob > want + close::LOGPROB).count();
        assert!(better <= 4, "{:?}: {better} tokens are better than {last}", prompt.text);
    }
}

#[test]
fn greedy_text_is_the_same_up_to_a_near_tie() {
    let Some(folder) = sample::folder_or_say_why_not() else { return };
    let mut runner = Runner::load(&folder, &LoadOptions::default(), MAX_LEN).unwrap();
    for prompt in sample::prompts() {
        runner.reset();
        let logits = runner.run(&prompt.ids).unwrap();
        let vocab = logits.len() / prompt.ids.len();
        let mut next = argmax(&logits[logits.len() - vocab..]) as u32;
        // After a near-tie the golden's token is taken, so that all that follows is checked, too.
        for (i, &want) in prompt.greedy_ids.iter().enumerate() {
            check(&prompt, i, next, want);
            next = argmax(&runner.run(&[want]).unwrap()) as u32;
        }
    }
}

fn check(prompt: &Prompt, i: usize, got: u32, want: u32) {
    let margin = prompt.margins[i];
    assert!(got == want || margin < close::NEAR_TIE, "{:?}: token {i} is {got}, not {want}, by {margin}", prompt.text);
}

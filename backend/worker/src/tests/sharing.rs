//! Blocks that several sequences read: cached prefixes, copies on write, forks.

use drafthorse_control::{Admit, BlockId, Row, SamplingParams, Slot, Step, TokenId, Wants};

use super::fake_engine;

const PROMPT: [TokenId; 10] = [5, 6, 7, 8, 9, 10, 11, 12, 40, 41];

fn admit(slot: u32, num_cached: u32, blocks: &[u32]) -> Admit {
    Admit {
        slot: Slot(slot),
        tokens: PROMPT.to_vec(),
        num_prompt: 10,
        num_cached,
        blocks: blocks.iter().copied().map(BlockId).collect(),
        sampling: SamplingParams { max_tokens: 5, ..SamplingParams::default() },
        grammar: None,
        fork_of: None,
        adapter: None,
    }
}

fn row(slot: u32, num_tokens: u32, new_blocks: &[u32]) -> Row {
    let new_blocks = new_blocks.iter().copied().map(BlockId).collect();
    Row { slot: Slot(slot), num_tokens, num_drafts: 0, new_blocks, wants: Wants::default() }
}

/// The tokens of slot 0, which computes the whole prompt in blocks 0, 1 and 2 of four tokens, and of slot 1, which is
/// admitted as `second` says in the step after, after the `copies`, with its first row.
fn both(second: Admit, first_row: Row, copies: &[(u32, u32)]) -> [Vec<TokenId>; 2] {
    let mut engine = fake_engine(None);
    let mut step = Step { id: 1, admit: vec![admit(0, 0, &[0, 1, 2])], rows: vec![row(0, 10, &[])], ..Step::default() };
    let mut tokens = [engine.step(&step)[0].accepted.clone(), vec![]];
    step = Step { id: 2, admit: vec![second], rows: vec![row(0, 1, &[3]), first_row], ..Step::default() };
    step.copies = copies.iter().map(|&(from, to)| (BlockId(from), BlockId(to))).collect();
    while tokens[1].len() < 5 {
        for (row, result) in step.rows.iter().zip(engine.step(&step)) {
            tokens[row.slot.0 as usize].extend(result.accepted);
        }
        step = Step { id: step.id + 1, rows: vec![row(0, 1, &[]), row(1, 1, &[])], ..Step::default() };
    }
    tokens
}

#[test]
fn a_cached_prefix_needs_no_second_run() {
    let [first, second] = both(admit(1, 8, &[0, 1]), row(1, 2, &[10, 11]), &[]);
    assert_eq!(first.len(), 5);
    assert_eq!(first, second);
}

#[test]
fn a_copied_block_is_written_without_harm_to_the_first() {
    // The last, half full block is shared up to its ninth token; then each goes its own way.
    let mut second = admit(1, 9, &[0, 1, 20]);
    second.sampling.logit_bias = vec![(60, 50.0)];
    second.fork_of = Some(Slot(0));
    let [first, biased] = both(second, row(1, 1, &[21]), &[(2, 20)]);
    assert_eq!(biased, [60; 5]);
    let [alone, _] = both(admit(1, 0, &[30, 31, 32]), row(1, 10, &[33]), &[]);
    assert_eq!(first, alone);
}

#[test]
fn without_the_copy_the_prefix_is_not_there() {
    let [first, second] = both(admit(1, 9, &[0, 1, 20]), row(1, 1, &[21]), &[]);
    assert_ne!(first, second);
}

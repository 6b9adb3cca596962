//! How often the drafts of the sample pair hold, counted as `model_repository/mtp/1/README.md` counts.

use std::env;
use std::ops::Range;
use std::path::{Path, PathBuf};

use drafthorse::text::chat::Chat;
use drafthorse::text::{ChatTemplate, Tokenizer};
use drafthorse_control::{
    Admit, BlockId, ChannelLink, Link, Row, RowResult, SamplingParams, Slot, Step, TokenId, Wants,
};
use drafthorse_tests::sample;
use drafthorse_worker::{SpeculateConfig, WorkerConfig};
use serde_json::json;

/// The first 32 prompts of the README's set: no conversation that the module was trained on begins with one.
const PROMPTS: [&str; 32] = [
    "What is gravity?",
    "Write a short story about a lighthouse keeper.",
    "How do I bake bread at home?",
    "Explain photosynthesis to a child.",
    "Give me five tips for better sleep.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Summarize the plot of Romeo and Juliet.",
    "What are the benefits of exercise?",
    "Describe the water cycle.",
    "How does a car engine work?",
    "Write an email asking for a day off.",
    "What is machine learning?",
    "List three famous scientists and what they discovered.",
    "How can I save money each month?",
    "Explain supply and demand.",
    "Write a poem about autumn leaves.",
    "What causes earthquakes?",
    "Plan a weekend trip to the mountains.",
    "How do vaccines work?",
    "What is the capital of France and what is it known for?",
    "Write a haiku about the sea.",
    "Explain recursion with an example.",
    "Who was Marie Curie?",
    "How do I remove a coffee stain?",
    "What is the difference between weather and climate?",
    "Suggest a name for a small bakery.",
    "Describe a healthy breakfast.",
    "What is a black hole?",
    "Write a product description for a wooden chair.",
    "How do bees make honey?",
    "What should I see in Rome?",
];

/// What the README says of them, by how many drafts hold at once, over all tokens of the base.
const WANTED: [f64; DRAFTS] = [0.728, 0.541, 0.411];
const POSITIONS: usize = 4875;

const DRAFTS: usize = 3;
const MAX_ANSWER: usize = 192;
const END: TokenId = 2;
const BLOCK_SIZE: usize = 16;
/// Positions that are looked at in one step; each has a slot besides that of the answer.
const AT_ONCE: usize = 15;
/// Blocks of the longest prompt with its answer, and of what stands behind a shared beginning.
const BLOCKS: u32 = 24;
const TAIL_BLOCKS: u32 = 2;

struct Rank {
    link: ChannelLink,
    last_step: u64,
}

fn row(slot: u32, num_tokens: usize, num_drafts: usize) -> Row {
    let (num_tokens, num_drafts) = (num_tokens as u32, num_drafts as u32);
    Row { slot: Slot(slot), num_tokens, num_drafts, new_blocks: vec![], wants: Wants::default() }
}

impl Rank {
    fn start(base: &Path, draft: &Path) -> Self {
        let speculate = SpeculateConfig {
            method: "mtp".into(),
            max_draft_token_num: DRAFTS as u32,
            adaptive: false,
            draft_dir: Some(draft.into()),
            ..SpeculateConfig::default()
        };
        let config = WorkerConfig {
            model_dir: base.into(),
            max_num_seqs: 1 + AT_ONCE as u32,
            block_size: BLOCK_SIZE as u32,
            kv_cache_bytes: 64 << 20,
            speculate,
            ..WorkerConfig::default()
        };
        let (ready, link) = drafthorse_worker::spawn(config, Box::new(|_| {})).unwrap();
        assert!(ready.num_blocks >= BLOCKS + AT_ONCE as u32 * TAIL_BLOCKS);
        Rank { link, last_step: 0 }
    }

    fn run(&mut self, step: Step) -> Vec<RowResult> {
        self.last_step += 1;
        self.link.send(&Step { id: self.last_step, ..step }).unwrap();
        self.link.recv().unwrap().rows
    }

    /// A prompt and its greedy answer, whose KV stays in the first blocks.
    fn answer(&mut self, prompt: &[TokenId]) -> Vec<TokenId> {
        let sampling =
            SamplingParams { max_tokens: MAX_ANSWER as u32, stop_tokens: vec![END], ..SamplingParams::default() };
        let admit = admit(0, prompt, prompt.len(), 0, (0..BLOCKS).collect(), sampling);
        let mut rows = self.run(Step { admit: vec![admit], rows: vec![row(0, prompt.len(), 0)], ..Step::default() });
        let mut all = prompt.to_vec();
        loop {
            all.extend(&rows[0].accepted);
            if rows[0].ended.is_some() {
                break;
            }
            let num_drafts = rows[0].num_drafts as usize;
            rows = self.run(Step { rows: vec![row(0, 1 + num_drafts, num_drafts)], ..Step::default() });
        }
        self.run(Step { release: vec![Slot(0)], ..Step::default() });
        all
    }

    /// How many drafts hold after the first `len` of `all`, for each of `lens`.
    fn held(&mut self, all: &[TokenId], num_prompt: usize, lens: Range<usize>) -> Vec<usize> {
        // The rank samples the last of them itself, and drafts what comes after it.
        let cached = |len: usize| (len - 2) / BLOCK_SIZE * BLOCK_SIZE;
        let slots = || (1..).zip(lens.clone());
        let admits = slots().map(|(slot, len)| {
            let own = BLOCKS + (slot - 1) * TAIL_BLOCKS;
            let blocks = (0..(cached(len) / BLOCK_SIZE) as u32).chain(own..own + TAIL_BLOCKS).collect();
            let sampling = SamplingParams { max_tokens: 2 * MAX_ANSWER as u32, ..SamplingParams::default() };
            admit(slot, &all[..len - 1], num_prompt, cached(len), blocks, sampling)
        });
        let rows = slots().map(|(slot, len)| row(slot, len - 1 - cached(len), 0));
        let results = self.run(Step { admit: admits.collect(), rows: rows.collect(), ..Step::default() });
        for (result, len) in results.iter().zip(lens.clone()) {
            assert_eq!((&result.accepted[..], result.num_drafts as usize), (&all[len - 1..len], DRAFTS));
        }
        let rows = slots().map(|(slot, _)| row(slot, 1 + DRAFTS, DRAFTS)).collect();
        let results = self.run(Step { rows, ..Step::default() });
        self.run(Step { release: slots().map(|(slot, _)| Slot(slot)).collect(), ..Step::default() });
        results.iter().map(|result| result.accepted.len() - 1).collect()
    }
}

fn admit(
    slot: u32,
    tokens: &[TokenId],
    num_prompt: usize,
    num_cached: usize,
    blocks: Vec<u32>,
    sampling: SamplingParams,
) -> Admit {
    Admit {
        slot: Slot(slot),
        tokens: tokens.to_vec(),
        num_prompt: num_prompt as u32,
        num_cached: num_cached as u32,
        blocks: blocks.into_iter().map(BlockId).collect(),
        sampling,
        grammar: None,
        fork_of: None,
        adapter: None,
    }
}

/// By number of drafts, the share of positions at which they all hold, and how many positions there are.
fn accepted_prefixes(base: &Path, draft: &Path, prompts: &[&str]) -> ([f64; DRAFTS], usize) {
    let tokenizer = Tokenizer::from_dir(base).unwrap();
    let template = ChatTemplate::from_dir(base).unwrap().unwrap();
    let mut rank = Rank::start(base, draft);
    let (mut counts, mut positions) = ([0; DRAFTS], 0);
    for prompt in prompts {
        let messages = vec![json!({"role": "user", "content": prompt})];
        let text = template.render(&Chat { messages, add_generation_prompt: true, ..Chat::default() }).unwrap();
        let prompt = tokenizer.encode_now(&text, false).unwrap();
        let all = rank.answer(&prompt);
        // From the answer's first token on, as long as all drafts lie inside it.
        let lens = prompt.len() + 1..all.len() - DRAFTS + 1;
        for first in lens.clone().step_by(AT_ONCE) {
            for held in rank.held(&all, prompt.len(), first..lens.end.min(first + AT_ONCE)) {
                positions += 1;
                counts.iter_mut().take(held).for_each(|count| *count += 1);
            }
        }
    }
    (counts.map(|count| f64::from(count) / positions as f64), positions)
}

/// `DRAFT_DIR` names another draft, such as one without `d2t`, which the README counts.
#[test]
#[ignore = "takes minutes, and the sample model"]
fn the_sample_pairs_drafts_hold_as_often_as_is_said() {
    let base = sample::folder().unwrap();
    let beside = base.join("../../mtp/1");
    let draft = env::var_os("DRAFT_DIR").map_or(beside, PathBuf::from);
    let (shares, positions) = accepted_prefixes(&base, &draft, &PROMPTS);
    println!("{positions} positions, {shares:.4?}, the README says {POSITIONS} and {WANTED:?}");
    for (share, wanted) in shares.iter().zip(WANTED) {
        assert!((share - wanted).abs() < 0.02, "{shares:.4?} for {WANTED:?}");
    }
}

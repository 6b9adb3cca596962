//! What ends a rank, and what it says then.

use drafthorse_control::{AdapterId, Admit, BlockId, Link, Row, SamplingParams, Slot, Step, Wants};
use drafthorse_kernels::Tensor;
use drafthorse_model::{Forward, KvLayer, Model, StepSize};

use super::engine::{Engine, small};
use super::fake::{self, FakeModel};
use super::{fake_engine, rank};
use crate::config::WorkerConfig;
use crate::error::WorkerError;
use crate::load::Network;
use crate::rank::{spawn, spawn_with};

fn admit(slot: u32) -> Admit {
    Admit {
        slot: Slot(slot),
        tokens: vec![5, 6, 7],
        num_prompt: 3,
        num_cached: 0,
        blocks: vec![BlockId(0)],
        sampling: SamplingParams::default(),
        grammar: None,
        fork_of: None,
        adapter: None,
    }
}

fn row(slot: u32, num_tokens: u32, num_drafts: u32) -> Row {
    Row { slot: Slot(slot), num_tokens, num_drafts, new_blocks: vec![], wants: Wants::default() }
}

/// What the rank dies of when step 2 is `change`d; step 1 ran three tokens in slot 1.
fn dies_of(change: impl FnOnce(&mut Step)) -> String {
    let mut engine = fake_engine(None);
    engine.step(&Step { id: 1, admit: vec![admit(1)], rows: vec![row(1, 3, 0)], ..Step::default() });
    let mut step = Step { id: 2, rows: vec![row(1, 1, 0)], ..Step::default() };
    change(&mut step);
    let reason = engine.try_step(&step).unwrap_err();
    let after = engine.try_step(&Step { id: 3, ..Step::default() }).unwrap_err();
    assert_eq!(after, "rank 0 has stopped");
    reason.strip_prefix("rank 0 failed: ").unwrap().to_owned()
}

#[test]
fn a_step_out_of_order_ends_the_rank() {
    assert_eq!(dies_of(|step| step.id = 3), "step 3 came, expected step 2");
    assert_eq!(dies_of(|step| step.id = 1), "step 1 came, expected step 2");
}

#[test]
fn a_step_that_does_not_fit_its_slots_is_named() {
    assert_eq!(dies_of(|s| s.rows[0].slot = Slot(2)), "step 2, slot 2: slot is 2, must be taken by a sequence");
    assert_eq!(dies_of(|s| s.rows[0].slot = Slot(8)), "step 2, slot 8: slot is 8, must be below 8");
    assert_eq!(dies_of(|s| s.release = vec![Slot(3)]), "step 2, slot 3: slot is 3, must be taken by a sequence");
    assert_eq!(
        dies_of(|s| s.admit = vec![admit(1)]),
        "step 2, slot 1: slot is 1, must be empty before a sequence is admitted"
    );
    assert_eq!(
        dies_of(|s| s.rows[0].num_tokens = 2),
        "step 2, slot 1: num_tokens less num_drafts is 2, must be 1 to 1, what is not computed yet"
    );
    assert_eq!(
        dies_of(|s| s.rows[0].num_tokens = 0),
        "step 2, slot 1: num_tokens less num_drafts is 0, must be 1 to 1, what is not computed yet"
    );
    assert_eq!(dies_of(|s| s.rows.push(row(1, 1, 0))), "step 2, slot 1: rows is 2, must be one a slot");
    assert_eq!(
        dies_of(|s| s.rows[0].new_blocks = vec![BlockId(1 << 20)]),
        "step 2, slot 1: block is 1048576, must be below 32768"
    );
    assert_eq!(
        dies_of(|s| s.copies = vec![(BlockId(0), BlockId(1 << 20))]),
        "KV block is 1048576, below 32768 is possible"
    );
}

#[test]
fn a_sequence_that_cannot_run_is_named() {
    let admitted = |change: fn(&mut Admit)| {
        dies_of(|step| {
            let mut admit = admit(4);
            change(&mut admit);
            step.admit = vec![admit];
            step.rows.push(row(4, 3, 0));
        })
    };
    assert_eq!(admitted(|a| a.tokens = vec![5; 256]), "step 2, slot 4: tokens is 256, must be 1 to 255");
    assert_eq!(admitted(|a| a.num_prompt = 4), "step 2, slot 4: num_prompt is 4, must be 1 to the 3 tokens");
    assert_eq!(admitted(|a| a.tokens[1] = 97), "step 2, slot 4: token is 97, must be below 97");
    assert_eq!(
        admitted(|a| a.num_cached = 3),
        "step 2, slot 4: num_cached is 3, must be below the 3 tokens and inside 1 blocks"
    );
    assert_eq!(
        admitted(|a| a.blocks = vec![]),
        "step 2, slot 4: KV length is 3, must be at most 4 in each of its 0 blocks"
    );
    assert_eq!(
        admitted(|a| a.adapter = Some(AdapterId(1))),
        "step 2, slot 4: an adapter is not supported by this worker"
    );
}

#[test]
fn rows_that_were_on_their_way_when_their_sequence_ended_are_inert() {
    let mut engine = fake_engine(None);
    let mut ends = admit(1);
    ends.sampling.max_tokens = 1;
    let result = engine.step(&Step { id: 1, admit: vec![ends], rows: vec![row(1, 3, 0)], ..Step::default() });
    assert!(result[0].ended.is_some());
    let result = engine.step(&Step { id: 2, rows: vec![row(1, 3, 2)], ..Step::default() });
    assert_eq!(result, [Default::default()]);
}

/// Panics in its first step.
struct Bomb;

impl Model for Bomb {
    fn forward(&self, _: &mut Forward<'_>) -> drafthorse_model::Result<Tensor> {
        panic!("boom");
    }
    fn logits(&self, hidden: &Tensor, cx: &mut Forward<'_>) -> drafthorse_model::Result<Tensor> {
        FakeModel::default().logits(hidden, cx)
    }
    fn kv_layers(&self) -> Vec<KvLayer> {
        FakeModel::default().kv_layers()
    }
    fn workspace_bytes(&self, step: StepSize) -> usize {
        FakeModel::default().workspace_bytes(step)
    }
}

#[test]
fn a_panic_travels_up_as_the_ranks_reason() {
    let network = || Network { model: Box::new(Bomb), ..fake::network() };
    let mut engine = Engine::new(rank(small(), network, None));
    let step = Step { id: 1, admit: vec![admit(0)], rows: vec![row(0, 3, 0)], ..Step::default() };
    assert_eq!(engine.try_step(&step).unwrap_err(), "rank 0 failed: the rank panicked: boom");
    let made = spawn_with(|| panic!("no {}", "model"));
    assert_eq!(made.unwrap_err().to_string(), "the rank panicked: no model");
}

#[test]
fn the_thread_ends_with_its_link() {
    struct Told(std::sync::mpsc::Sender<()>);
    impl Drop for Told {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }
    /// Says when it is dropped.
    struct Mortal(#[expect(dead_code, reason = "held for its Drop")] Told);
    impl Model for Mortal {
        fn forward(&self, cx: &mut Forward<'_>) -> drafthorse_model::Result<Tensor> {
            FakeModel::default().forward(cx)
        }
        fn logits(&self, hidden: &Tensor, cx: &mut Forward<'_>) -> drafthorse_model::Result<Tensor> {
            FakeModel::default().logits(hidden, cx)
        }
        fn kv_layers(&self) -> Vec<KvLayer> {
            FakeModel::default().kv_layers()
        }
        fn workspace_bytes(&self, step: StepSize) -> usize {
            FakeModel::default().workspace_bytes(step)
        }
    }
    let (sender, dropped) = std::sync::mpsc::channel();
    let network = || Network { model: Box::new(Mortal(Told(sender))), ..fake::network() };
    let (_, mut link) = rank(small(), network, None);
    link.send(&Step { id: 1, ..Step::default() }).unwrap();
    assert_eq!(link.recv().unwrap().id, 1);
    drop(link);
    dropped.recv().unwrap();
}

#[test]
fn what_cannot_load_is_an_error_before_the_first_step() {
    let config = WorkerConfig { model_dir: "no/such/folder".into(), ..WorkerConfig::default() };
    assert!(matches!(spawn(config, Box::new(|_| {})), Err(WorkerError::Model(_))));
    let config = WorkerConfig { max_num_seqs: 0, ..small() };
    assert!(matches!(spawn(config, Box::new(|_| {})), Err(WorkerError::Setting { field: "max_num_seqs", .. })));
}

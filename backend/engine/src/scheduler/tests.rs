//! A script in, the steps out as text.

mod player;

use proptest::prelude::*;

use player::{Player, play};

#[test]
fn a_long_prompt_is_cut_to_the_budget_and_decodes_go_first() {
    assert_eq!(
        play("tokens=8", "add a 10+3; add b 9+2; step 5"),
        "\
1  a:8
2  a:2  b:6
3  a:1  b:3
4  a:1  b:1
   a length 3
   b length 2
"
    );
}

#[test]
fn drafts_take_what_the_budget_leaves_after_everyone_has_a_token() {
    assert_eq!(
        play("tokens=8 seqs=3 drafts=4", "add a 2+9; add b 2+9; add c 2+9; step 4"),
        "\
1  a:2  b:2  c:2
2  a:1+1  b:1+1  c:1+3
3  a:1+3  b:1+1  c:1+1
4  a:1+3  b:1+2  c:1
"
    );
}

#[test]
fn a_request_gets_no_more_drafts_than_it_wants() {
    let steps = "\
1  a:2  b:2  c:2
2  a:1+1  b:1  c:1+3
";
    assert_eq!(play("drafts=3", "add a 2+9 drafts=1; add b 2+9 drafts=0; add c 2+9 drafts=7; step 2"), steps);
}

#[test]
fn no_draft_is_verified_past_the_last_token() {
    assert_eq!(
        play("drafts=4", "add a 2+3; step 3"),
        "\
1  a:2
2  a:1+1
   a length 3
"
    );
}

#[test]
fn a_prompt_is_cut_where_tiles_are_full() {
    // With the stream's token 256, though there is time for some more; the rest of a prompt is taken whole.
    assert_eq!(
        play("blocks=300 step_ms=400 token_ms=1", "add a 2+30; step 2; add b 700+2; add c 100+2; step 6; cancel a"),
        "\
1  a:2
2  a:1
3  a:1  b:255
4  a:1  c:100  b:155
5  a:1  c:1  b:290
   c length 2
6  -c  a:1  b:1
   b length 2
7  -b  a:1
8  a:1
   a the request was cancelled
"
    );
}

#[test]
fn a_long_prompt_leaves_those_behind_it_half_of_the_time_and_a_better_priority_all() {
    assert_eq!(
        play("tokens=20 blocks=200", "add a 100+1; step 1; add b 30+1; add c 6+1; step 3; add d 25+1 p=1; step 3; run"),
        "\
1  a:20
2  b:10  a:10
3  c:6  b:4  a:10
   c length 1
4  -c  b:10  a:10
5  d:20
6  d:5  b:6  a:9
   d length 1
   b length 1
7  -d  -b  a:20
   a length 1
"
    );
}

#[test]
fn chunks_leave_a_stream_its_pace() {
    assert_eq!(
        play(
            "ms=10 token_ms=1 step_ms=60",
            "add a 2+9; step 3; add b 100+2; step 5; cancel a; cancel b; add c 390+1; step 1"
        ),
        "\
1  a:2
2  a:1
3  a:1
4  a:1  b:36
5  a:1  b:36
6  a:1  b:28
7  a:1  b:1
   b length 2
8  -b  a:1
   a the request was cancelled
9  -a  c:390
   c length 1
"
    );
}

#[test]
fn who_finds_no_blocks_takes_them_from_the_last_which_comes_back() {
    assert_eq!(
        play("blocks=5 cache=0", "add a 7+9; add b 7+6; step 13"),
        "\
1  a:7  b:7
2  a:1  b:1
3  a:1
4  a:1
5  a:1
6  a:1
7  -b  a:1
8  a:1
9  a:1
   a length 9
10  -a  b:9
11  b:1
12  b:1
13  b:1
   b length 6
"
    );
}

#[test]
fn the_lower_level_is_preempted_though_it_is_older() {
    assert_eq!(
        play("blocks=5 cache=0", "add a 7+9 p=3; add b 7+6 p=1; step 4; run"),
        "\
1  b:7  a:7
2  b:1  a:1
3  b:1
4  b:1
   b length 6
   a length 9
"
    );
}

#[test]
fn a_preempted_sequence_finds_in_the_cache_what_nobody_took() {
    assert_eq!(
        play("blocks=8", "add a 7+9; add b 15+6; step 3; run"),
        "\
1  a:7  b:15
2  a:1  b:1
3  a:1  b:1
   b length 6
   a length 9
"
    );
}

#[test]
fn drafts_are_dropped_before_anyone_is_preempted() {
    assert_eq!(
        play("blocks=5 drafts=4 cache=0", "add a 7+9; add b 7+2; step 3"),
        "\
1  a:7  b:7
2  a:1+4  b:1
   b length 2
3  -b  a:1+2
"
    );
}

#[test]
fn admission_waits_for_the_blocks_of_the_whole_prompt_and_nobody_overtakes() {
    assert_eq!(
        play("blocks=8 cache=0", "add a 8+3; add b 24+1; add c 4+1; step 5"),
        "\
1  a:8
2  a:1
3  a:1
   a length 3
4  -a  b:24  c:4
   b length 1
   c length 1
"
    );
}

#[test]
fn the_first_level_is_admitted_first_and_equals_in_order() {
    assert_eq!(
        play("seqs=1", "add a 4+1; add b 4+1; add c 4+1 p=9; add d 4+1 p=1; add e 4+1 p=8; step 5"),
        "\
1  d:4
   d length 1
2  -d  a:4
   a length 1
3  -a  b:4
   b length 1
4  -b  e:4
   e length 1
5  -e  c:4
   c length 1
"
    );
}

#[test]
fn a_prompt_that_begins_alike_skips_what_is_cached() {
    assert_eq!(
        play(
            "",
            "add a 9+4; step 1; add b 13+1 like=a; add c 8+1 like=a; add d 9+1 like=a salt=5; step 1; run; blocks"
        ),
        "\
1  a:9
2  a:1  b:5(8 cached)  c:4(4 cached)  d:9
   b length 1
   c length 1
   d length 1
   a length 4
100 free, 6 cached
"
    );
}

#[test]
fn a_prefix_is_found_only_after_the_step_that_wrote_it() {
    assert_eq!(
        play("depth=2", "add a 9+1; plan; add b 9+1 like=a; plan; commit; add c 9+1 like=a; plan"),
        "\
1  a:9
2  b:9
   a length 1
3  -a  c:1(8 cached)
"
    );
}

#[test]
fn prompt_logprobs_are_not_skipped_for_a_cached_prefix_nor_told_twice() {
    assert_eq!(
        play("tokens=4 blocks=7", "add a 9+1; step 3; add b 9+9 like=a logprobs; add c 9+9 logprobs; step 9; run"),
        "\
1  a:4
2  a:4
3  a:1
   a length 1
4  -a  b:4
5  c:2  b:2
6  c:2  b:2
7  b:1  c:3
8  b:1  c:2
9  b:1  c:1
10  b:1  c:1
11  b:1  c:1
12  b:1
   b length 9
   c length 9
"
    );
}

#[test]
fn a_cancel_frees_its_blocks_at_once_or_after_the_steps_in_flight() {
    assert_eq!(
        play("cache=0", "add a 9+9; step 2; blocks; cancel a; blocks"),
        "\
1  a:9
2  a:1
97 free, 0 cached
   a the request was cancelled
100 free, 0 cached
"
    );
    assert_eq!(
        play("cache=0 depth=2", "add a 9+9; plan; plan; cancel a; blocks; commit; blocks; commit; blocks"),
        "\
1  a:9
2  a:1
   a the request was cancelled
97 free, 0 cached
97 free, 0 cached
100 free, 0 cached
"
    );
}

#[test]
fn a_row_planned_after_its_sequence_ended_is_ignored() {
    assert_eq!(
        play("depth=2", "add a 5+9 stop=2; step 2; add b 5+1; step 2"),
        "\
1  a:5
2  a:1
3  a:1
   a stop 2
4  -a  b:5
   b length 1
"
    );
}

#[test]
fn with_two_steps_in_flight_drafts_are_planned_as_a_limit() {
    assert_eq!(
        play("depth=2 drafts=2", "add a 5+9; step 6"),
        "\
1  a:5
2  a:1+2
3  a:1+2
4  a:1+2
5  a:1
6  a:1
   a length 9
"
    );
}

#[test]
fn where_drafts_are_made_on_the_host_steps_run_ahead_only_while_there_are_none() {
    // Two steps in a row have left none, so 4 is planned behind 3; drafts of b have come with 5, and 7 waits for 6.
    assert_eq!(
        play("depth=2 drafts=2 host=1", "add a 3+40 drafts=0; step 3; add b 3+6; step 3; cancel b; step 3"),
        "\
1  a:3
2  a:1
3  a:1
4  a:1
5  a:1  b:3
6  a:1  b:1+2
   b the request was cancelled
7  -b  a:1
8  a:1
9  a:1
10  a:1
"
    );
}

#[test]
fn blocks_that_a_step_in_flight_may_write_are_waited_for() {
    assert_eq!(
        play("depth=2 blocks=5 cache=0", "add a 7+9; add b 7+6; step 7; run"),
        "\
1  a:7  b:7
2  a:1  b:1
3  a:1
4  a:1
5  a:1
6  a:1
7  -b  a:1
8  a:1
   a length 9
   b length 6
"
    );
}

#[test]
fn waits_and_deadlines_end_requests() {
    assert_eq!(
        play(
            "seqs=1 ms=10",
            "add a 4+9 queue=5 deadline=45; add b 4+5 queue=25; add c 4+5 deadline=15; add d 4+1 queue=1000; step 6"
        ),
        "\
1  a:4
2  a:1
   c the request's deadline has passed
3  a:1
   b the request waited 30ms in the queue, its limit is 25ms
4  a:1
5  a:1
   a the request's deadline has passed
6  -a  d:4
   d length 1
"
    );
}

#[test]
fn a_stop_string_ends_a_request_well_and_trims_it() {
    assert_eq!(
        play("", "add a 4+9; step 5; finish a 3; finish a 2; cancel a; step 1"),
        "\
1  a:4
2  a:1
3  a:1
4  a:1
5  a:1
   a stop 3
"
    );
}

#[derive(Clone, Debug)]
enum Action {
    Add { prompt: u32, output: u32, like: u8, options: String },
    Plan,
    Commit,
    Cancel(usize),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        2 => (1..40u32, 1..24u32, 0..4u8, 0..3u32, prop_oneof![6 => Just(""), 2 => Just(" logprobs"), 1 => Just(" stop=1")])
            .prop_map(|(prompt, output, like, level, more)| {
                Action::Add { prompt, output, like, options: format!("p={level}{more}") }
            }),
        4 => Just(Action::Plan),
        4 => Just(Action::Commit),
        1 => (0..20usize).prop_map(Action::Cancel),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// The player checks the text of each request and that all blocks come back; the rank checks the steps.
    #[test]
    fn any_script_gives_every_request_its_text(
        actions in prop::collection::vec(action(), 1..150),
        depth in 1..3u32,
        drafts in 0..4u32,
        blocks in 16..40u32,
        cache in 0..2u32,
        host in 0..2u32,
        tokens in 4..30u32,
    ) {
        let mut player = Player::new(&format!(
            "depth={depth} drafts={drafts} host={host} blocks={blocks} cache={cache} tokens={tokens} ms=1"
        ));
        let mut names = (b'a'..=b'z').map(|letter| (letter as char).to_string());
        for action in actions {
            match action {
                Action::Add { prompt, output, like, options } => {
                    let Some(name) = names.next() else { continue };
                    let like = (b'a' + like) as char;
                    player.play_command(&format!("add {name} {prompt}+{output} like={like} {options}"));
                }
                Action::Plan if player.can_plan() => player.play_command("plan"),
                Action::Plan | Action::Commit => player.play_command("commit"),
                Action::Cancel(nth) => {
                    let name = ((b'a' + nth as u8) as char).to_string();
                    if player.knows(&name) {
                        player.play_command(&format!("cancel {name}"));
                    }
                }
            }
        }
        player.finish();
    }
}

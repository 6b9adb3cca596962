//! Stop strings: found in the text however tokens cut it, and never handed out.
//!
//! The text is matched byte by byte, so what is found does not depend on how many bytes come at once: the stop string that is
//! complete first wins, and of several that end at the same byte the longest.
//! Source: Knuth, Morris and Pratt 1977, "Fast pattern matching in strings".

/// Watches one sequence's text for its stop strings.
#[derive(Clone, Debug)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
    include_stop_str: bool,
    /// Text that may be the start of a stop string.
    held: String,
    /// Bytes handed out so far.
    num_released: usize,
}

/// A stop string was found: the text has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopMatch {
    /// Which one of the list.
    pub index: usize,
    /// Length of the whole text, in bytes, with what is trimmed taken off.
    pub text_bytes: usize,
}

#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// For each length of a match: the next shorter start of the pattern that the matched text ends with.
    shorter: Vec<usize>,
    /// How many bytes of the pattern the text ends with.
    matched: usize,
}

impl StopStrings {
    /// Empty strings match nothing. `include_stop_str` leaves a stop string that is found at the end of the text.
    pub fn new(patterns: &[String], include_stop_str: bool) -> Self {
        let patterns = patterns.iter().map(|pattern| Pattern::new(pattern.as_bytes())).collect();
        StopStrings { patterns, include_stop_str, held: String::new(), num_released: 0 }
    }

    /// Takes the next piece of text and appends to `text` what is no part of a stop string.
    pub fn push(&mut self, piece: &str, text: &mut String) -> Option<StopMatch> {
        if self.patterns.is_empty() {
            self.num_released += piece.len();
            text.push_str(piece);
            return None;
        }
        let piece_start = self.held.len();
        self.held.push_str(piece);
        for (at, &byte) in piece.as_bytes().iter().enumerate() {
            let ended = self.patterns.iter_mut().map(|pattern| pattern.next(byte).then_some(pattern.bytes.len()));
            let found = ended.enumerate().filter_map(|(index, len)| Some((len?, index)));
            let longest = found.max_by_key(|&(len, _)| len);
            if let Some((len, index)) = longest {
                let end = piece_start + at + 1;
                self.release(if self.include_stop_str { end } else { end - len }, text);
                self.held.clear();
                return Some(StopMatch { index, text_bytes: self.num_released });
            }
        }
        let may_be_stop = self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0);
        self.release(self.held.len() - may_be_stop, text);
        None
    }

    /// Text that no stop string is looked for in, because the sequence must not end yet.
    pub fn pass(&mut self, piece: &str, text: &mut String) {
        self.num_released += piece.len();
        text.push_str(piece);
    }

    /// Appends what was held: no text comes any more.
    pub fn finish(&mut self, text: &mut String) {
        self.release(self.held.len(), text);
    }

    /// Bytes handed out so far.
    pub fn num_released(&self) -> usize {
        self.num_released
    }

    fn release(&mut self, bytes: usize, text: &mut String) {
        text.extend(self.held.drain(..bytes));
        self.num_released += bytes;
    }
}

impl Pattern {
    fn new(bytes: &[u8]) -> Self {
        let mut shorter = vec![0; bytes.len() + 1];
        let mut matched = 0;
        for at in 1..bytes.len() {
            while matched > 0 && bytes[at] != bytes[matched] {
                matched = shorter[matched];
            }
            matched += usize::from(bytes[at] == bytes[matched]);
            shorter[at + 1] = matched;
        }
        Pattern { bytes: bytes.to_vec(), shorter, matched: 0 }
    }

    /// True if the text ends with the pattern now.
    fn next(&mut self, byte: u8) -> bool {
        if self.bytes.is_empty() {
            return false;
        }
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.shorter[self.matched];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pushes pieces separated by `|` and shows what each released; ` #n` after the piece in which stop string n was found.
    fn play(stop: &[&str], include: bool, pieces: &str) -> String {
        let stop: Vec<String> = stop.iter().map(ToString::to_string).collect();
        let mut strings = StopStrings::new(&stop, include);
        let mut log = Vec::new();
        for piece in pieces.split('|') {
            let mut text = String::new();
            if let Some(found) = strings.push(piece, &mut text) {
                log.push(format!("{text} #{}", found.index));
                return log.join("|");
            }
            log.push(text);
        }
        let mut text = String::new();
        strings.finish(&mut text);
        log.push(text);
        log.join("|")
    }

    #[test]
    fn no_part_of_a_stop_string_is_released() {
        assert_eq!(play(&["END"], false, "a E|N|D b"), "a || #0");
        assert_eq!(play(&["END"], false, "a E|N|T b"), "a ||ENT b|", "held until it is something else");
        assert_eq!(play(&["END"], false, "a EN"), "a |EN", "handed out at the end");
        assert_eq!(play(&["END"], true, "a E|N|D b"), "a ||END #0");
        assert_eq!(play(&["aab"], false, "aaa|ab"), "a|a #0", "a start inside a start");
        assert_eq!(play(&["。"], false, "你好|。x"), "你好| #0");
        assert_eq!(play(&[], false, "a|b"), "a|b|");
    }

    #[test]
    fn the_first_complete_wins_and_then_the_longest() {
        assert_eq!(play(&["abc", "b"], false, "xabcd"), "xa #1");
        assert_eq!(play(&["c", "abc"], false, "xabcd"), "x #1");
        assert_eq!(play(&["\n\n", "\n"], false, "line\n\n"), "line #1");
    }

    proptest! {
        /// Cutting the text elsewhere changes neither the text that is released nor what is found.
        #[test]
        fn pieces_do_not_matter(
            text in "[ab]{0,30}", stop in prop::collection::vec("[ab]{1,4}", 0..4), include in any::<bool>(), cut in 1usize..5
        ) {
            let stop: Vec<&str> = stop.iter().map(String::as_str).collect();
            let cut: Vec<String> = text.as_bytes().chunks(cut).map(|c| String::from_utf8_lossy(c).into_owned()).collect();
            prop_assert_eq!(play(&stop, include, &cut.join("|")).replace('|', ""), play(&stop, include, &text).replace('|', ""));
            let first = stop.iter().filter_map(|s| text.find(s).map(|at| (at + s.len(), at))).min();
            let want = match first {
                Some((end, _)) if include => &text[..end],
                Some((_, start)) => &text[..start],
                None => &text[..],
            };
            let got = play(&stop, include, &text).replace('|', "");
            prop_assert_eq!(got.split(" #").next().unwrap(), want);
        }
    }
}

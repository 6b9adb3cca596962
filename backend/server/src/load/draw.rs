//! What is left to chance: moments, lengths and words.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::{Ask, Load, Parameters};

/// How long something is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    Fixed(u32),
    /// Any of these, both ends among them, equally often.
    Uniform(u32, u32),
    /// Many short and few long ones, of this mean; at most 10 times it.
    Exponential(u32),
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|&n| n > 0);
        let lengths = match (text.split_once('-'), text.strip_prefix("exp:")) {
            (_, Some(mean)) => number(mean).map(Lengths::Exponential),
            (Some((least, most)), None) => number(least).zip(number(most)).map(|(l, m)| Lengths::Uniform(l, m)),
            (None, None) => number(text).map(Lengths::Fixed),
        };
        match lengths {
            Some(Lengths::Uniform(least, most)) if least > most => Err(format!("{least} is more than {most}")),
            Some(lengths) => Ok(lengths),
            None => Err("must be a number above 0, a range such as 64-256, or exp:128 for a mean".into()),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lengths::Fixed(n) => write!(f, "{n}"),
            Lengths::Uniform(least, most) => write!(f, "{least}-{most}"),
            Lengths::Exponential(mean) => write!(f, "exp:{mean}"),
        }
    }
}

/// Short words that most tokenizers know with the space before them.
const WORDS: &str = "the of and to in is that for it as was with on be by at this from have or an they which one you were all her she there would their \
    we him been has when who will no more if out so up said what its about than into them can only other time new some could these two may first then do any \
    like my now over such our man me even most made after also did many before must through back years where much your way well down should because long each";

pub(super) struct Dice {
    random: StdRng,
    words: Vec<&'static str>,
}

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Dice { random: StdRng::seed_from_u64(seed), words: WORDS.split_whitespace().collect() }
    }

    /// Between two arrivals of a Poisson process.
    pub(super) fn gap(&mut self, rate: f64) -> Duration {
        Duration::from_secs_f64(self.exponential() / rate)
    }

    /// Of mean 1.
    fn exponential(&mut self) -> f64 {
        // Never the logarithm of 0.
        -(1.0 - self.random.random::<f64>()).ln()
    }

    fn length(&mut self, lengths: Lengths) -> u32 {
        match lengths {
            Lengths::Fixed(n) => n,
            Lengths::Uniform(least, most) => self.random.random_range(least..=most),
            Lengths::Exponential(mean) => {
                let length = (f64::from(mean) * self.exponential().min(10.0)).round();
                (length as u32).max(1)
            }
        }
    }

    pub(super) fn prompt(&mut self, tokens: u32) -> String {
        let words: Vec<&str> = (0..tokens).map(|_| self.words[self.random.random_range(0..self.words.len())]).collect();
        words.join(" ")
    }

    pub(super) fn ask(&mut self, load: &Load, parameters: &Arc<Parameters>) -> Ask {
        let prompt_tokens = self.length(load.prompt_tokens);
        Ask {
            model: load.model.clone(),
            prompt: self.prompt(prompt_tokens),
            output_tokens: self.length(load.output_tokens),
            parameters: parameters.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_read_and_written() {
        let show = |text: &str| match text.parse::<Lengths>() {
            Ok(lengths) => lengths.to_string(),
            Err(why) => why,
        };
        for text in ["128", "64-256", "exp:100"] {
            assert_eq!(show(text), text);
        }
        assert_eq!(show("256-64"), "256 is more than 64");
        for text in ["0", "", "x", "-5", "exp:", "1-2-3", "exp:0"] {
            assert_eq!(show(text), "must be a number above 0, a range such as 64-256, or exp:128 for a mean", "{text}");
        }
    }

    #[test]
    fn the_same_seed_draws_the_same_and_means_are_kept() {
        let draw = |seed| {
            let mut dice = Dice::new(seed);
            (dice.prompt(5), dice.length(Lengths::Uniform(1, 1000)), dice.gap(2.0))
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        let mut dice = Dice::new(1);
        assert_eq!(dice.prompt(12).split(' ').count(), 12);
        let mean = |draws: Vec<f64>| draws.iter().sum::<f64>() / draws.len() as f64;
        // Of 20,000 draws; the deviation of the mean is under 1 %.
        let gaps = mean((0..20_000).map(|_| dice.gap(4.0).as_secs_f64()).collect());
        assert!((gaps - 0.25).abs() < 0.01, "{gaps}");
        let lengths = mean((0..20_000).map(|_| f64::from(dice.length(Lengths::Exponential(100)))).collect());
        assert!((lengths - 100.0).abs() < 4.0, "{lengths}");
        let lengths = mean((0..20_000).map(|_| f64::from(dice.length(Lengths::Uniform(10, 30)))).collect());
        assert!((lengths - 20.0).abs() < 0.5, "{lengths}");
    }
}

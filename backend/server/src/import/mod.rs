//! `drafthorse import FILE.gguf DIR`: a GGUF file as a Hugging Face checkpoint.
//!
//! Writes `model.safetensors` in bf16 (or, with `--keep-quant`, Q4_0, Q4_1 and Q8_0 blocks as they are), `config.json`,
//! `generation_config.json`, `tokenizer.json` and `tokenizer_config.json`. Files get their names when all are complete,
//! `config.json` last: a folder without it holds no model.

mod blocks;
mod checkpoint;
mod config;
mod dequant;
mod error;
mod gguf;
mod layout;
mod tokenizer;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value as Json;

use checkpoint::Checkpoint;
use config::Config;
use dequant::dequantize;
pub use error::ImportError;
use error::Result;
use gguf::Gguf;
use layout::ROPE_FREQS;
use tokenizer::ImportedTokenizer;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const SHARD_INDEX: &str = "model.safetensors.index.json";

/// Imports shorter than this show no progress.
const QUIET: Duration = Duration::from_secs(2);

/// Turn a GGUF file into a checkpoint that `serve` loads.
#[derive(Clone, Debug, clap::Args)]
pub struct ImportArgs {
    /// The GGUF file: llama or qwen2, in F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K.
    pub file: PathBuf,

    /// The folder for the checkpoint, such as model_repository/llm/1; made if it does not exist.
    pub dir: PathBuf,

    /// Keep Q4_0, Q4_1 and Q8_0 blocks as they are, instead of turning them into bf16.
    #[arg(long)]
    pub keep_quant: bool,

    /// Replace the checkpoint that the folder holds.
    #[arg(long)]
    pub force: bool,
}

/// Imports one file.
///
/// # Errors
/// If the file is broken, cut off, or not of a kind that is imported, or the folder cannot be written or holds a
/// checkpoint already. Then the folder is as before, but for a checkpoint that `force` was about to replace.
pub fn run(args: ImportArgs) -> Result<()> {
    let ImportArgs { file, dir, keep_quant, force } = args;
    check_target(&dir, force)?;

    let mut gguf = Gguf::open(&file)?;
    let rope_freqs = read_rope_freqs(&mut gguf)?;
    // The head is read beside the open file, whose position moves.
    let head = std::mem::take(&mut gguf.head);
    let config = Config::from_head(&head, rope_freqs.as_deref())?;
    let moves = layout::moves(&head, &config)?;
    let checkpoint = Checkpoint::new(&moves, config.head_dim, keep_quant);
    if keep_quant && !checkpoint.keeps_blocks() {
        return Err(ImportError::NothingToKeep);
    }
    let tokenizer = ImportedTokenizer::from_head(&head, config.max_positions)?;
    let converted = keep_quant.then(|| checkpoint.converted_modules());
    let config = config.to_json(&tokenizer.ids, converted.as_deref());

    let mut folder = Folder::new(&dir)?;
    folder.write_text("tokenizer.json", &tokenizer.tokenizer)?;
    folder.write_json("tokenizer_config.json", &tokenizer.tokenizer_config)?;
    folder.write_json("generation_config.json", &tokenizer.ids.to_generation_config())?;
    folder.write_with(WEIGHTS, |out, path| {
        let failed = |source| ImportError::Write { path: path.into(), source };
        let progress = Progress::new(checkpoint.num_bytes());
        checkpoint.write(&mut gguf, out, failed, |bytes| progress.add(bytes))
    })?;
    folder.write_json(CONFIG, &config)?;
    folder.commit()
}

/// Refuses a folder whose files would be replaced unasked, or would mix with what is written.
fn check_target(dir: &Path, force: bool) -> Result<()> {
    let index = dir.join(SHARD_INDEX);
    if index.exists() {
        return Err(ImportError::OtherCheckpoint { path: index });
    }
    match [CONFIG, WEIGHTS].map(|name| dir.join(name)).into_iter().find(|path| path.exists()) {
        Some(path) if !force => Err(ImportError::Exists { path }),
        _ => Ok(()),
    }
}

fn read_rope_freqs(gguf: &mut Gguf) -> Result<Option<Vec<f32>>> {
    let Some(tensor) = gguf.head.tensor(ROPE_FREQS).cloned() else { return Ok(None) };
    let mut stored = vec![0; tensor.num_bytes as usize];
    gguf.read(&tensor, 0, &mut stored)?;
    let mut values = vec![0.0; tensor.shape.iter().product::<u64>() as usize];
    dequantize(tensor.kind, &stored, &mut values);
    Ok(Some(values))
}

/// Files that wait under temporary names until all are complete. Dropped before that, they go.
struct Folder {
    dir: PathBuf,
    waiting: Vec<&'static str>,
}

impl Folder {
    fn new(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).map_err(|source| ImportError::Write { path: dir.into(), source })?;
        Ok(Folder { dir: dir.into(), waiting: Vec::new() })
    }

    fn partial(&self, name: &str) -> PathBuf {
        self.dir.join(format!(".{name}.partial"))
    }

    fn write_with(
        &mut self,
        name: &'static str,
        write: impl FnOnce(&mut BufWriter<File>, &Path) -> Result<()>,
    ) -> Result<()> {
        let path = self.partial(name);
        let failed = |source| ImportError::Write { path: path.clone(), source };
        self.waiting.push(name);
        let mut out = BufWriter::new(File::create(&path).map_err(failed)?);
        write(&mut out, &path)?;
        let file = out.into_inner().map_err(|err| failed(err.into_error()))?;
        file.sync_all().map_err(failed)
    }

    fn write_text(&mut self, name: &'static str, text: &str) -> Result<()> {
        self.write_with(name, |out, path| {
            writeln!(out, "{text}").map_err(|source| ImportError::Write { path: path.into(), source })
        })
    }

    fn write_json(&mut self, name: &'static str, value: &Json) -> Result<()> {
        self.write_text(name, &format!("{value:#}"))
    }

    /// Gives the files their names, in the order in which they were written. A config of before goes first, so that at no
    /// time it stands beside the weights of another model.
    fn commit(mut self) -> Result<()> {
        let old = self.dir.join(CONFIG);
        if old.exists() {
            fs::remove_file(&old).map_err(|source| ImportError::Write { path: old, source })?;
        }
        for name in std::mem::take(&mut self.waiting) {
            let path = self.dir.join(name);
            fs::rename(self.partial(name), &path).map_err(|source| ImportError::Write { path, source })?;
        }
        Ok(())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        for name in &self.waiting {
            // What cannot be removed is overwritten by the next import.
            let _ = fs::remove_file(self.partial(name));
        }
    }
}

/// A bar that shows itself when the work turns out to be long.
struct Progress {
    bar: ProgressBar,
    started: Instant,
}

impl Progress {
    fn new(num_bytes: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(num_bytes), ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template("importing {wide_bar} {bytes} of {total_bytes}, {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Progress { bar, started: Instant::now() }
    }

    fn add(&self, bytes: u64) {
        if self.bar.is_hidden() && self.started.elapsed() > QUIET {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.inc(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests;

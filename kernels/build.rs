//! Compiles each `src/ops/*/*.cu`, and what the device itself needs, to one fatbin and embeds it.
//!
//! nvcc is `NVCC`, or `$CUDA_HOME/bin/nvcc`, or what `kernels/toolchain.sh` installed, or the first on `PATH`. Without one the crate
//! still builds, for the CPU alone; `DRAFTHORSE_REQUIRE_NVCC=1` makes that an error. `DRAFTHORSE_CUDA_ARCHS` lists targets, `90a` by
//! default; a kernel with Hopper's own instructions is left out for others. Objects are kept by the hash of all that went into them, so a
//! rebuild compiles what changed.

use std::collections::hash_map::DefaultHasher;
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    for name in ["NVCC", "CUDA_HOME", "DRAFTHORSE_CUDA_ARCHS", "DRAFTHORSE_REQUIRE_NVCC", "DRAFTHORSE_TOOLCHAIN_DIR"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=src");

    let archs = env::var("DRAFTHORSE_CUDA_ARCHS").unwrap_or_else(|_| "90a".into());
    let archs: Vec<&str> = archs.split([',', ' ']).filter(|arch| !arch.is_empty()).collect();
    let sources = sources(&root.join("src"));
    let fatbins = match find_nvcc(&root) {
        Some(nvcc) => compile_all(&nvcc, &root, &out, &sources, &archs),
        None if env::var("DRAFTHORSE_REQUIRE_NVCC").is_ok_and(|value| value == "1") => {
            panic!(
                "DRAFTHORSE_REQUIRE_NVCC=1, but there is no nvcc: run kernels/toolchain.sh, or set NVCC or CUDA_HOME"
            )
        }
        None => Vec::new(),
    };

    let mut table = String::from(
        "/// Name of the source, and its compiled kernels.\npub(crate) static FATBINS: &[(&str, &[u8])] = &[\n",
    );
    for (name, path) in fatbins {
        writeln!(table, "    ({name:?}, include_bytes!({:?})),", path.display().to_string())
            .expect("strings do not fail");
    }
    table.push_str("];\n");
    writeln!(table, "/// GPUs that they are compiled for.\npub(crate) static ARCHS: &[&str] = &{archs:?};")
        .expect("strings do not fail");
    fs::write(out.join("fatbins.rs"), table).expect("OUT_DIR is writable");
}

/// Every `.cu` of an op and of the device, named by its stem, in a fixed order.
fn sources(src: &Path) -> Vec<(String, PathBuf)> {
    let mut sources = Vec::new();
    let ops = fs::read_dir(src.join("ops")).expect("src/ops exists").flatten().map(|op| op.path());
    for dir in ops.filter(|op| op.is_dir()).chain([src.join("device/cuda")]) {
        for file in fs::read_dir(dir).expect("it was listed").flatten().map(|file| file.path()) {
            if file.extension().is_some_and(|extension| extension == "cu") {
                let stem = file.file_stem().expect("it has an extension").to_string_lossy().into_owned();
                sources.push((stem, file));
            }
        }
    }
    sources.sort();
    sources
}

/// Where `toolchain.sh` installs, and where objects are kept for builds of other profiles.
fn cache(root: &Path) -> PathBuf {
    env::var("DRAFTHORSE_TOOLCHAIN_DIR").map_or_else(|_| root.join(".cache"), PathBuf::from)
}

fn find_nvcc(root: &Path) -> Option<PathBuf> {
    let installed = fs::read_dir(cache(root)).ok().into_iter().flatten().flatten().map(|entry| entry.path());
    let installed =
        installed.filter(|path| path.join(".complete").exists()).map(|path| path.join("nvidia/cu13/bin/nvcc"));
    let on_path = env::var_os("PATH").into_iter().flat_map(|path| env::split_paths(&path).collect::<Vec<_>>());
    env::var("NVCC")
        .map(PathBuf::from)
        .into_iter()
        .chain(env::var("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc")))
        .chain(installed)
        .chain(on_path.map(|dir| dir.join("nvcc")))
        .find(|nvcc| nvcc.is_file())
}

fn compile_all(
    nvcc: &Path,
    root: &Path,
    out: &Path,
    sources: &[(String, PathBuf)],
    archs: &[&str],
) -> Vec<(String, PathBuf)> {
    let headers = root.join("src/cuda");
    let mut common = DefaultHasher::new();
    let mut names: Vec<PathBuf> =
        fs::read_dir(&headers).expect("src/cuda exists").flatten().map(|e| e.path()).collect();
    names.sort();
    for header in names {
        fs::read(header).expect("it was listed").hash(&mut common);
    }
    let version = Command::new(nvcc).arg("--version").output().expect("nvcc runs").stdout;
    (version, FLAGS).hash(&mut common);

    let mut fatbins = Vec::new();
    let mut missing = Vec::new();
    for (name, source) in sources {
        let text = fs::read_to_string(source).expect("it was listed");
        let is_for_hopper = HOPPER_HEADERS.iter().any(|header| text.contains(&format!("#include \"{header}\"")));
        let archs: Vec<&str> = archs.iter().copied().filter(|&arch| !is_for_hopper || arch == "90a").collect();
        if archs.is_empty() {
            continue;
        }
        let mut hash = common.clone();
        (text, &archs).hash(&mut hash);
        let fatbin = out.join(format!("{name}-{:016x}.fatbin", hash.finish()));
        if !fatbin.exists() {
            missing.push((source, fatbin.clone(), archs));
        }
        fatbins.push((name.clone(), fatbin));
    }
    let kept = cache(root).join("objects");
    missing.retain(|(_, fatbin, _)| !copy(&kept.join(fatbin.file_name().expect("it was joined")), fatbin));
    // Two at once: a compiler takes up to 4 GB.
    for pair in missing.chunks(2) {
        std::thread::scope(|scope| {
            for (source, fatbin, archs) in pair {
                scope.spawn(|| compile(nvcc, &headers, source, fatbin, archs));
            }
        });
    }
    // A cache that cannot be written costs time, nothing else.
    let _ = fs::create_dir_all(&kept);
    for (_, fatbin, _) in &missing {
        let _ = copy(fatbin, &kept.join(fatbin.file_name().expect("it was joined")));
    }
    fatbins
}

/// Puts a copy of `from`, whole or not at all, at `to`. False if there is none.
fn copy(from: &Path, to: &Path) -> bool {
    let unfinished = to.with_extension(format!("{}.unfinished", std::process::id()));
    fs::copy(from, &unfinished).and_then(|_| fs::rename(&unfinished, to)).is_ok()
}

/// What includes one of these is for compute capability 9.0 alone.
const HOPPER_HEADERS: [&str; 2] = ["wgmma.cuh", "tma.cuh"];

const FLAGS: &[&str] = &["-fatbin", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xptxas=-warn-spills"];

/// Spills of fewer bytes a thread stay in L1 and cost nothing that was ever measured.
const WORTH_A_WARNING: usize = 256;

/// The bytes that a warning about spills names; another warning counts as the worst.
fn spilled_bytes(line: &str) -> usize {
    let before = line.split(" bytes spill stores").next().filter(|before| before.len() < line.len());
    before.and_then(|before| before.rsplit(' ').next()?.parse().ok()).unwrap_or(usize::MAX)
}

fn compile(nvcc: &Path, headers: &Path, source: &Path, fatbin: &Path, archs: &[&str]) {
    let unfinished = fatbin.with_extension("unfinished");
    let mut command = Command::new(nvcc);
    command.args(FLAGS).arg("-I").arg(headers).arg(source).arg("-o").arg(&unfinished);
    for arch in archs {
        command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
    }
    let output = command.output().expect("nvcc runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "nvcc failed on {}:\n{said}", source.display());
    for line in said.lines().filter(|line| line.contains("warning") && spilled_bytes(line) >= WORTH_A_WARNING) {
        println!("cargo:warning={}: {line}", source.display());
    }
    fs::rename(unfinished, fatbin).expect("OUT_DIR is writable");
}

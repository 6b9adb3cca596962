//! The models of this process: which there are, which are loaded, and why the others are not.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use drafthorse_proto::inference::ModelConfig;
use tokio::sync::{mpsc, watch};
use tracing::{error, info, warn};

use super::layout::{self, Found, ModelDir};
use super::model_config::Role;
use crate::config::{ModelControlMode, ServerConfig};
use crate::error::{Result, ServerError};
use crate::generate::ServedModel;
use crate::launch;

/// A version of a model that takes requests.
pub struct Model {
    /// Completed.
    pub config: Arc<ModelConfig>,
    pub version: u64,
    pub served: Arc<ServedModel>,
    /// Tells a model from the one that took its place when it was loaded again.
    generation: u64,
}

impl Model {
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// One request, many responses.
    pub fn decoupled(&self) -> bool {
        self.config.model_transaction_policy.is_some_and(|policy| policy.decoupled)
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Model({} version {})", self.name(), self.version)
    }
}

/// A line of the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    pub name: String,
    /// Empty for a model none of whose versions is known.
    pub version: String,
    /// READY, LOADING, UNLOADING or UNAVAILABLE.
    pub state: &'static str,
    pub reason: String,
}

/// All models, by name.
pub struct Repository {
    config: Arc<ServerConfig>,
    models: Mutex<BTreeMap<String, Entry>>,
    ready: watch::Sender<bool>,
    generations: AtomicU64,
    losses: AtomicU64,
    /// Engines that have stopped by themselves, as (model, version, generation, reason).
    lost: mpsc::UnboundedSender<(String, u64, u64, String)>,
}

struct Entry {
    found: Found,
    versions: BTreeMap<u64, Version>,
}

#[derive(Default)]
struct Version {
    serving: Option<Arc<Model>>,
    phase: Phase,
}

#[derive(Default)]
enum Phase {
    /// Not loaded, or loaded and serving.
    #[default]
    Idle,
    Loading,
    /// Taken out of service; its last requests hold it.
    Unloading(Weak<Model>),
    /// Loading or running failed. An older one may still be serving.
    Failed(String),
}

impl std::fmt::Debug for Repository {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.index(false)).finish()
    }
}

impl Repository {
    /// Looks at what there is; loads nothing. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// If a repository cannot be read or is empty.
    pub fn open(config: Arc<ServerConfig>) -> Result<Arc<Self>> {
        let found = layout::scan(&config.model_repository, config.model_name.as_deref())?;
        let entry = |found: Found| (found.name.clone(), Entry { found, versions: BTreeMap::new() });
        let (lost, lost_receiver) = mpsc::unbounded_channel();
        let repository = Arc::new(Repository {
            config,
            models: Mutex::new(found.into_iter().map(entry).collect()),
            ready: watch::Sender::new(false),
            generations: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            lost,
        });
        tokio::spawn(watch_lost(Arc::downgrade(&repository), lost_receiver));
        repository.changed();
        Ok(repository)
    }

    /// Loads what the control mode says should be there from the start, all at once. Returns the names that failed.
    pub async fn load_at_start(self: &Arc<Self>) -> Vec<String> {
        let names: BTreeSet<String> = {
            let models = self.lock();
            let served = |entry: &&Entry| entry.found.model.as_ref().map_or(true, |dir| dir.role == Role::Served);
            let all = || models.values().filter(served).map(|entry| entry.found.name.clone());
            match self.config.model_control_mode {
                ModelControlMode::None => all().collect(),
                ModelControlMode::Explicit if self.config.load_model.iter().any(|name| name == "*") => all().collect(),
                ModelControlMode::Explicit => self.config.load_model.iter().cloned().collect(),
            }
        };
        let loads = names.into_iter().map(|name| async {
            let loaded = self.load_model(&name).await;
            loaded.err().map(|reason| {
                error!(model = name, %reason, "the model is unavailable");
                name
            })
        });
        futures::future::join_all(loads).await.into_iter().flatten().collect()
    }

    /// Loads a model, or loads it again; returns when it is ready. While it loads, and if it fails, an older one goes on serving.
    ///
    /// # Errors
    /// `NotExplicit`, `UnknownModel`, or `LoadFailed` with the reason.
    pub async fn load(self: &Arc<Self>, name: &str) -> Result<()> {
        self.check_explicit()?;
        self.load_model(name).await
    }

    /// Takes a model out of service at once; requests in flight finish. A model that is not there is no error.
    ///
    /// # Errors
    /// `NotExplicit`.
    pub fn unload(&self, name: &str) -> Result<()> {
        self.check_explicit()?;
        let mut models = self.lock();
        let Some(entry) = models.get_mut(name) else { return Ok(()) };
        let mut unloaded = Vec::new();
        for version in entry.versions.values_mut() {
            if let Some(model) = version.serving.take() {
                info!(model = name, version = model.version, "unloading");
                version.phase = Phase::Unloading(Arc::downgrade(&model));
                unloaded.push(model);
            } else {
                version.phase = Phase::Idle;
            }
        }
        drop(models);
        // The last owner waits for the engine's thread, which must not hold up a runtime thread.
        tokio::task::spawn_blocking(move || drop(unloaded));
        self.changed();
        Ok(())
    }

    /// Finds who answers a request; an empty `version` is the latest that serves.
    ///
    /// # Errors
    /// `UnknownModel`, `UnknownVersion`, `BadInput` for a version that is no number, or `NotReady` with the reason.
    pub fn model(&self, name: &str, version: &str) -> Result<Arc<Model>> {
        let version = parse_version(version)?;
        let models = self.lock();
        let entry = models.get(name).ok_or_else(|| ServerError::UnknownModel { name: name.into() })?;
        let not_ready = |reason: String| ServerError::NotReady { name: name.into(), reason };
        let dir = match &entry.found.model {
            Ok(dir) if dir.role == Role::Draft => return Err(not_ready(DRAFT_REASON.into())),
            Ok(dir) => dir,
            Err(reason) => return Err(not_ready(reason.clone())),
        };
        let Some(version) = version else {
            let serving = entry.versions.values().rev().find_map(|version| version.serving.clone());
            return serving.ok_or_else(|| {
                let reason = entry.versions.values().next_back().map_or(NOT_LOADED.to_owned(), |v| v.state().1);
                not_ready(if reason.is_empty() { "it is loading".into() } else { reason })
            });
        };
        if !dir.versions.contains_key(&version) && !entry.versions.contains_key(&version) {
            return Err(ServerError::UnknownVersion { name: name.into(), version: version.to_string() });
        }
        let state = entry.versions.get(&version);
        state.and_then(|state| state.serving.clone()).ok_or_else(|| {
            let reason = state.map_or(NOT_LOADED.to_owned(), |state| state.state().1);
            not_ready(if reason.is_empty() { "it is loading".into() } else { reason })
        })
    }

    /// All models that serve, by name and version.
    pub fn serving(&self) -> Vec<Arc<Model>> {
        let models = self.lock();
        models
            .values()
            .flat_map(|entry| entry.versions.values())
            .filter_map(|version| version.serving.clone())
            .collect()
    }

    /// The versions of `name` that serve, the lowest first.
    pub fn versions(&self, name: &str) -> Vec<u64> {
        self.serving().iter().filter(|model| model.name() == name).map(|model| model.version).collect()
    }

    /// Every model and version with its state.
    pub fn index(&self, ready_only: bool) -> Vec<IndexEntry> {
        let models = self.lock();
        let mut index = Vec::new();
        for (name, entry) in &*models {
            let mut line = |version: String, (state, reason): (&'static str, String)| {
                index.push(IndexEntry { name: name.clone(), version, state, reason });
            };
            let dir = match &entry.found.model {
                Ok(dir) if dir.role == Role::Served => dir,
                Ok(dir) => {
                    let version = dir.versions.keys().next_back().map_or(String::new(), u64::to_string);
                    line(version, ("UNAVAILABLE", DRAFT_REASON.into()));
                    continue;
                }
                Err(reason) if entry.versions.is_empty() => {
                    line(String::new(), ("UNAVAILABLE", reason.clone()));
                    continue;
                }
                Err(_) => {
                    for (version, state) in &entry.versions {
                        line(version.to_string(), state.state());
                    }
                    continue;
                }
            };
            let known: BTreeSet<u64> = dir.versions.keys().chain(entry.versions.keys()).copied().collect();
            for version in known {
                let state = entry.versions.get(&version).map_or(("UNAVAILABLE", NOT_LOADED.into()), Version::state);
                line(version.to_string(), state);
            }
        }
        index.retain(|line| !ready_only || line.state == "READY");
        index
    }

    /// Every model that should serve does.
    pub fn ready(&self) -> bool {
        *self.ready.borrow()
    }

    /// Holds [`ready`](Self::ready), and wakes at every change of any model's state.
    pub fn watch_ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// Engines have stopped by themselves, and no model serves or is on its way any more.
    pub fn lost_all(&self) -> bool {
        let models = self.lock();
        let mut versions = models.values().flat_map(|entry| entry.versions.values());
        let alive = |version: &Version| version.serving.is_some() || matches!(version.phase, Phase::Loading);
        self.losses.load(Relaxed) > 0 && !versions.any(alive)
    }

    fn check_explicit(&self) -> Result<()> {
        match self.config.model_control_mode {
            ModelControlMode::Explicit => Ok(()),
            ModelControlMode::None => Err(ServerError::NotExplicit),
        }
    }

    async fn load_model(self: &Arc<Self>, name: &str) -> Result<()> {
        let found = layout::find(&self.config.model_repository, self.config.model_name.as_deref(), name)?;
        let failed = |reason: String| ServerError::LoadFailed { name: name.into(), reason };
        let dir = match found.model.clone() {
            Ok(dir) if dir.role == Role::Draft => return Err(failed(DRAFT_REASON.into())),
            Ok(dir) => dir,
            Err(reason) => {
                let mut models = self.lock();
                let entry = models
                    .entry(name.into())
                    .or_insert_with(|| Entry { found: found.clone(), versions: BTreeMap::new() });
                entry.found = found;
                drop(models);
                self.changed();
                return Err(failed(reason));
            }
        };
        {
            let mut models = self.lock();
            let entry =
                models.entry(name.into()).or_insert_with(|| Entry { found: found.clone(), versions: BTreeMap::new() });
            entry.found = found;
            for version in dir.versions.keys() {
                entry.versions.entry(*version).or_default().phase = Phase::Loading;
            }
        }
        self.changed();
        let loads = dir.versions.iter().map(|(version, path)| self.load_version(&dir, *version, path));
        let results = futures::future::join_all(loads).await;
        let dropped = self.keep_versions(name, &dir);
        tokio::task::spawn_blocking(move || drop(dropped));
        self.changed();
        results.into_iter().collect::<Result<Vec<()>, String>>().map(|_| ()).map_err(failed)
    }

    async fn load_version(self: &Arc<Self>, dir: &ModelDir, version: u64, path: &Path) -> Result<(), String> {
        let started = Instant::now();
        info!(model = dir.name, version, path = %path.display(), "loading");
        let generation = self.generations.fetch_add(1, Relaxed);
        let (load_dir, load_path, config) = (dir.clone(), path.to_owned(), self.config.clone());
        let load = move || launch::load(&load_dir, version, &load_path, &config);
        let loaded = match tokio::task::spawn_blocking(load).await {
            Ok(loaded) => loaded.map_err(|error| error.to_string()),
            Err(panic) => Err(format!("loading panicked: {panic}")),
        };
        let outcome = loaded.map(|served| {
            let (lost, name) = (self.lost.clone(), dir.name.clone());
            served.engine().on_stop(move |reason| {
                // Nobody listens when the repository itself is gone.
                let _ = lost.send((name, version, generation, reason.to_owned()));
            });
            let config = Arc::new(dir.config.clone());
            Arc::new(Model { config, version, served: Arc::new(served), generation })
        });
        let mut replaced = None;
        let result = outcome.as_ref().map(|_| ()).map_err(String::clone);
        {
            let mut models = self.lock();
            if let Some(entry) = models.get_mut(&dir.name) {
                let state = entry.versions.entry(version).or_default();
                match outcome {
                    Ok(model) => {
                        replaced = state.serving.replace(model);
                        state.phase = Phase::Idle;
                    }
                    Err(reason) => state.phase = Phase::Failed(reason),
                }
            }
        }
        tokio::task::spawn_blocking(move || drop(replaced));
        self.changed();
        if result.is_ok() {
            let seconds = started.elapsed().as_secs_f64();
            info!(model = dir.name, version, seconds, "ready");
        }
        result
    }

    /// Drops versions that the folder or the policy no longer has.
    fn keep_versions(&self, name: &str, dir: &ModelDir) -> Vec<Arc<Model>> {
        let mut models = self.lock();
        let Some(entry) = models.get_mut(name) else { return Vec::new() };
        let mut dropped = Vec::new();
        for (version, state) in &mut entry.versions {
            if !dir.versions.contains_key(version) {
                dropped.extend(state.serving.take());
            }
        }
        entry.versions.retain(|version, _| dir.versions.contains_key(version));
        dropped
    }

    fn lose(&self, name: &str, version: u64, generation: u64, reason: String) {
        let lost = {
            let mut models = self.lock();
            let state = models.get_mut(name).and_then(|entry| entry.versions.get_mut(&version));
            // A model that was unloaded or replaced stops as it should.
            let Some(state) = state.filter(|s| s.serving.as_ref().is_some_and(|model| model.generation == generation))
            else {
                return;
            };
            error!(model = name, version, reason, "the model's engine has stopped");
            state.phase = Phase::Failed(reason);
            self.losses.fetch_add(1, Relaxed);
            state.serving.take()
        };
        tokio::task::spawn_blocking(move || drop(lost));
        self.changed();
    }

    /// Works out readiness anew after any change of state.
    fn changed(&self) {
        let explicit = self.config.model_control_mode == ModelControlMode::Explicit;
        let ready = {
            let models = self.lock();
            models.values().all(|entry| {
                let wanted = match &entry.found.model {
                    Ok(dir) if dir.role == Role::Draft => return true,
                    Ok(dir) => !explicit && entry.versions.len() < dir.versions.len(),
                    Err(_) => !explicit && entry.versions.is_empty(),
                };
                !wanted && entry.versions.values().all(Version::settled)
            })
        };
        self.ready.send_replace(ready);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a draft takes no requests.
const DRAFT_REASON: &str = "it is a draft: it serves the model that names it, never alone";
const NOT_LOADED: &str = "unloaded";

impl Version {
    /// State and reason, as the index has them.
    fn state(&self) -> (&'static str, String) {
        match (&self.phase, &self.serving) {
            (Phase::Loading, _) => ("LOADING", String::new()),
            (Phase::Failed(reason), Some(_)) => ("READY", format!("an older one serves: {reason}")),
            (_, Some(_)) => ("READY", String::new()),
            (Phase::Failed(reason), None) => ("UNAVAILABLE", reason.clone()),
            (Phase::Unloading(model), None) if model.strong_count() > 0 => ("UNLOADING", "unloading".into()),
            (Phase::Idle | Phase::Unloading(_), None) => ("UNAVAILABLE", NOT_LOADED.into()),
        }
    }

    /// It serves, or nobody wants it to.
    fn settled(&self) -> bool {
        match self.phase {
            Phase::Failed(_) | Phase::Loading => self.serving.is_some(),
            Phase::Idle | Phase::Unloading(_) => true,
        }
    }
}

/// Follows engines that stop by themselves; kept off their threads, which must not wait for themselves.
async fn watch_lost(repository: Weak<Repository>, mut lost: mpsc::UnboundedReceiver<(String, u64, u64, String)>) {
    while let Some((name, version, generation, reason)) = lost.recv().await {
        let Some(repository) = repository.upgrade() else { return };
        repository.lose(&name, version, generation, reason);
    }
    warn!("nobody watches the engines any more");
}

/// `None` for the empty text, which asks for whichever the policy prefers.
fn parse_version(text: &str) -> Result<Option<u64>> {
    if text.is_empty() {
        return Ok(None);
    }
    let version = text.parse::<u64>().ok().filter(|version| *version > 0);
    version
        .map(Some)
        .ok_or_else(|| ServerError::bad_input("model_version", format!("is '{text}', must be a number above 0")))
}

#[cfg(test)]
impl Repository {
    /// A repository with one model that serves already, without a folder.
    pub(crate) fn serving_only(config: Arc<ServerConfig>, served: Arc<ServedModel>) -> Arc<Self> {
        let name = served.name().to_owned();
        let model_config = Arc::new(super::model_config::complete(ModelConfig::default(), &name).unwrap());
        let version = served.version();
        let dir = ModelDir {
            name: name.clone(),
            path: std::path::PathBuf::new(),
            config: model_config.as_ref().clone(),
            role: Role::Served,
            versions: BTreeMap::from([(version, std::path::PathBuf::new())]),
        };
        let model = Arc::new(Model { config: model_config, version, served, generation: 0 });
        let serving = Version { serving: Some(model), phase: Phase::Idle };
        let found = Found { name: name.clone(), model: Ok(dir) };
        let entry = Entry { found, versions: BTreeMap::from([(version, serving)]) };
        let (lost, _) = mpsc::unbounded_channel();
        let repository = Arc::new(Repository {
            config,
            models: Mutex::new(BTreeMap::from([(name, entry)])),
            ready: watch::Sender::new(false),
            generations: AtomicU64::new(1),
            losses: AtomicU64::new(0),
            lost,
        });
        repository.changed();
        repository
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository(files: &[&str], flags: &[&str]) -> (tempfile::TempDir, Arc<Repository>) {
        let root = tempfile::tempdir().unwrap();
        for path in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "{}").unwrap();
        }
        let path = format!("--model-repository={}", root.path().display());
        let flags = std::iter::once(path.as_str()).chain(flags.iter().copied());
        let config = Arc::new(ServerConfig::parse(flags).unwrap());
        (root, Repository::open(config).unwrap())
    }

    fn said<T>(result: Result<T>) -> String {
        result.map_or_else(|error| format!("{:?} {error}", error.code()), |_| "fine".into())
    }

    #[tokio::test]
    async fn a_model_that_fails_to_load_is_unavailable_with_its_reason() {
        let (_root, repository) = repository(&["llm/1/config.json"], &[]);
        assert!(!repository.ready());
        assert_eq!(repository.load_at_start().await, ["llm"]);
        let index = repository.index(false);
        assert_eq!((index[0].name.as_str(), index[0].version.as_str(), index[0].state), ("llm", "1", "UNAVAILABLE"));
        assert!(!index[0].reason.is_empty());
        assert!(repository.index(true).is_empty());
        assert!(!repository.ready());
        let refused = said(repository.model("llm", ""));
        assert_eq!(refused, format!("Unavailable model 'llm' is not ready: {}", index[0].reason));
    }

    #[tokio::test]
    async fn names_and_versions_that_do_not_exist_are_told_apart() {
        let (_root, repository) = repository(&["llm/1/config.json"], &["--model-control-mode=explicit"]);
        assert!(repository.ready(), "nothing was asked for");
        assert_eq!(said(repository.model("x", "")), "NotFound request for unknown model: 'x' is not found");
        assert_eq!(
            said(repository.model("llm", "9")),
            "NotFound request for unknown model: 'llm' version 9 is not found"
        );
        assert_eq!(
            said(repository.model("llm", "abc")),
            "InvalidArgument model_version: is 'abc', must be a number above 0"
        );
        assert_eq!(said(repository.model("llm", "")), "Unavailable model 'llm' is not ready: unloaded");
        assert_eq!(said(repository.load("x").await), "NotFound request for unknown model: 'x' is not found");
        assert_eq!(said(repository.unload("x")), "fine");
    }

    #[tokio::test]
    async fn only_explicit_mode_loads_on_request() {
        let (_root, repository) = repository(&["llm/1/config.json"], &[]);
        let refused = "Unavailable explicit model load and unload need --model-control-mode=explicit";
        assert_eq!(said(repository.load("llm").await), refused);
        assert_eq!(said(repository.unload("llm")), refused);
    }
}

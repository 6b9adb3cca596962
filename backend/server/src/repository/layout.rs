//! What lies in a model repository: `REPOSITORY/NAME/{config.pbtxt, VERSION/}`, as Triton has it.
//!
//! A plain checkpoint folder counts too: as a whole repository (then it is its one model) and as a model without version folders.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use drafthorse_proto::inference::ModelConfig;
use drafthorse_proto::inference::model_version_policy::PolicyChoice;
use drafthorse_proto::parse_model_config;

use super::model_config::{Role, complete, role};
use crate::error::{Result, ServerError};

const CONFIG: &str = "config.pbtxt";
/// The file that tells a checkpoint folder.
pub(super) const CHECKPOINT: &str = "config.json";

/// A model on disk.
#[derive(Clone, Debug)]
pub struct ModelDir {
    pub name: String,
    pub path: PathBuf,
    /// Completed.
    pub config: ModelConfig,
    pub role: Role,
    /// The versions to serve, and their checkpoint folders.
    pub versions: BTreeMap<u64, PathBuf>,
}

/// A folder that should be a model: one, or why it is none.
#[derive(Clone, Debug)]
pub struct Found {
    pub name: String,
    pub model: Result<ModelDir, String>,
}

/// All models of all `repositories`, in order of their names. `model_name` names a repository that is one plain checkpoint.
///
/// # Errors
/// If a repository cannot be read or has no model: there is nothing to go on with.
pub fn scan(repositories: &[PathBuf], model_name: Option<&str>) -> Result<Vec<Found>> {
    let mut all: BTreeMap<String, Found> = BTreeMap::new();
    for repository in repositories {
        for found in scan_one(repository, model_name)? {
            let name = found.name.clone();
            let twice = all.contains_key(&name);
            let found = if twice {
                Found { name: name.clone(), model: Err("the model is in more than one repository".into()) }
            } else {
                found
            };
            all.insert(name, found);
        }
    }
    Ok(all.into_values().collect())
}

/// Looks for one model again, as a load request does.
///
/// # Errors
/// `UnknownModel` if no repository has it.
pub fn find(repositories: &[PathBuf], model_name: Option<&str>, name: &str) -> Result<Found> {
    let found = scan(repositories, model_name)?.into_iter().find(|found| found.name == name);
    found.ok_or_else(|| ServerError::UnknownModel { name: name.into() })
}

fn scan_one(repository: &Path, model_name: Option<&str>) -> Result<Vec<Found>> {
    // The path may be `.` or end in `..`; a name is wanted.
    let absolute = repository.canonicalize().map_err(|source| ServerError::Read { path: repository.into(), source })?;
    if absolute.join(CHECKPOINT).is_file() || absolute.join(CONFIG).is_file() {
        let folder = absolute.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned());
        let name = model_name.map_or(folder, str::to_owned);
        return Ok(vec![open(&absolute, name)]);
    }
    let mut found = Vec::new();
    for path in subfolders(&absolute)? {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if !name.starts_with('.') && name != "lost+found" {
            found.push(open(&path, name.to_owned()));
        }
    }
    if found.is_empty() {
        let reason =
            "there is no model in this repository: a model is a folder NAME/VERSION/ with a checkpoint in it".into();
        return Err(ServerError::BadFile { path: repository.into(), reason });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn subfolders(path: &Path) -> Result<Vec<PathBuf>> {
    let read = |source| ServerError::Read { path: path.into(), source };
    let mut folders = Vec::new();
    for entry in fs::read_dir(path).map_err(read)? {
        let entry = entry.map_err(read)?.path();
        if entry.is_dir() {
            folders.push(entry);
        }
    }
    Ok(folders)
}

fn open(path: &Path, name: String) -> Found {
    let model = read_model(path, &name).map_err(|error| error.to_string());
    Found { name, model }
}

fn read_model(path: &Path, name: &str) -> Result<ModelDir> {
    let config_path = path.join(CONFIG);
    let bad_config = |reason| ServerError::BadFile { path: config_path.clone(), reason };
    let given = match fs::read_to_string(&config_path) {
        Ok(text) => {
            parse_model_config(&text).map_err(|source| ServerError::Pbtxt { path: config_path.clone(), source })?
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => ModelConfig::default(),
        Err(source) => return Err(ServerError::Read { path: config_path, source }),
    };
    let config = complete(given, name).map_err(bad_config)?;
    let role = role(&config).map_err(bad_config)?;

    let all = version_folders(path)?;
    let versions = pick_versions(&config, all).map_err(bad_config)?;
    if versions.is_empty() && role == Role::Served {
        let names =
            subfolders(path)?.into_iter().filter_map(|folder| Some(folder.file_name()?.to_string_lossy().into_owned()));
        let mut others: Vec<String> =
            names.filter(|name| !name.starts_with('.')).map(|name| format!("'{name}'")).collect();
        others.sort();
        let why = if others.is_empty() { String::new() } else { format!(", {} is none", others.join(" or ")) };
        let reason = format!("there is no version folder{why}: the checkpoint belongs into a folder 1");
        return Err(ServerError::BadFile { path: path.into(), reason });
    }
    Ok(ModelDir { name: name.to_owned(), path: path.into(), config, role, versions })
}

/// Folders whose name is a number above 0; a checkpoint that lies beside `config.pbtxt` is version 1.
pub(super) fn version_folders(path: &Path) -> Result<BTreeMap<u64, PathBuf>> {
    let mut versions = BTreeMap::new();
    for folder in subfolders(path)? {
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // A name like 01 is no version: it would have two spellings.
        if let Ok(version) = name.parse::<u64>()
            && version > 0
            && version.to_string() == name
        {
            versions.insert(version, folder);
        }
    }
    if versions.is_empty() && path.join(CHECKPOINT).is_file() {
        versions.insert(1, path.to_owned());
    }
    Ok(versions)
}

fn pick_versions(config: &ModelConfig, all: BTreeMap<u64, PathBuf>) -> Result<BTreeMap<u64, PathBuf>, String> {
    let policy = config.version_policy.as_ref().and_then(|policy| policy.policy_choice.as_ref());
    match policy {
        Some(PolicyChoice::All(_)) => Ok(all),
        Some(PolicyChoice::Specific(specific)) => {
            let wanted = |version: &u64| i64::try_from(*version).is_ok_and(|v| specific.versions.contains(&v));
            if let Some(missing) =
                specific.versions.iter().find(|v| !all.keys().any(|have| i64::try_from(*have) == Ok(**v)))
            {
                return Err(format!("version_policy asks for version {missing}, which has no folder"));
            }
            Ok(all.into_iter().filter(|(version, _)| wanted(version)).collect())
        }
        Some(PolicyChoice::Latest(latest)) => {
            let count = latest.num_versions.max(1) as usize;
            Ok(all.into_iter().rev().take(count).collect())
        }
        None => Ok(all.into_iter().rev().take(1).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes files (a path that ends in `/` is a folder) and prints what is found: `name versions` or `name: reason`.
    fn scanned(files: &[(&str, &str)], model_name: Option<&str>) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(if path.to_string_lossy().ends_with('/') { &path } else { path.parent().unwrap() })
                .unwrap();
            if !path.to_string_lossy().ends_with('/') {
                fs::write(path, text).unwrap();
            }
        }
        let prefix = format!("{}/", root.path().canonicalize().unwrap().display());
        let line = |found: Found| match found.model {
            Ok(model) => format!("{} {:?}", found.name, model.versions.keys().collect::<Vec<_>>()),
            Err(reason) => format!("{}: {}", found.name, reason.replace(&prefix, "")),
        };
        match scan(&[root.path().to_owned()], model_name) {
            Ok(found) => found.into_iter().map(line).collect(),
            Err(error) => vec![error.to_string().replace(prefix.trim_end_matches('/'), "REPOSITORY")],
        }
    }

    #[test]
    fn the_latest_version_is_served_unless_the_policy_says_otherwise() {
        let files = [("a/1/", ""), ("a/2/", ""), ("a/10/", ""), ("a/x/", ""), ("a/0/", ""), ("a/03/", "")];
        assert_eq!(scanned(&files, None), ["a [10]"]);
        let with = |policy| [files.as_slice(), &[("a/config.pbtxt", policy)]].concat();
        assert_eq!(scanned(&with("version_policy { all { } }"), None), ["a [1, 2, 10]"]);
        assert_eq!(scanned(&with("version_policy { latest { num_versions: 2 } }"), None), ["a [2, 10]"]);
        assert_eq!(scanned(&with("version_policy { specific { versions: [1] } }"), None), ["a [1]"]);
        assert_eq!(
            scanned(&with("version_policy { specific { versions: [3] } }"), None),
            ["a: a/config.pbtxt: version_policy asks for version 3, which has no folder"]
        );
    }

    #[test]
    fn a_broken_model_says_why_and_the_others_are_found() {
        let files = [
            ("good/1/config.json", "{}"),
            ("empty/", ""),
            ("misnamed/0/config.json", "{}"),
            ("misnamed/abc/config.json", "{}"),
            (".git/", ""),
            ("typo/1/", ""),
            ("typo/config.pbtxt", "backend: \"drafthorse\"\nmax_batch: 1"),
            ("other/1/", ""),
            ("other/config.pbtxt", "name: \"llm\""),
        ];
        assert_eq!(
            scanned(&files, None),
            [
                "empty: empty: there is no version folder: the checkpoint belongs into a folder 1",
                "good [1]",
                "misnamed: misnamed: there is no version folder, '0' or 'abc' is none: the checkpoint belongs into a folder 1",
                "other: other/config.pbtxt: name is 'llm', but the model's folder is 'other'",
                "typo: typo/config.pbtxt: line 2 column 1: field 'max_batch' not found for message 'inference.ModelConfig'",
            ]
        );
    }

    #[test]
    fn a_plain_checkpoint_is_a_model() {
        assert_eq!(scanned(&[("config.json", "{}")], Some("smol")), ["smol [1]"]);
        assert_eq!(scanned(&[("m/config.json", "{}")], None), ["m [1]"]);
    }

    #[test]
    fn a_draft_needs_no_version_yet() {
        let config = "parameters { key: \"role\" value { string_value: \"draft\" } }";
        assert_eq!(scanned(&[("mtp/config.pbtxt", config)], None), ["mtp []"]);
    }

    #[test]
    fn an_empty_repository_is_an_error() {
        let said = scanned(&[], None);
        assert!(said[0].ends_with("a model is a folder NAME/VERSION/ with a checkpoint in it"), "{said:?}");
    }
}

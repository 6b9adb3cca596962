//! Where a model's draft lies.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::layout::{CHECKPOINT, version_folders};
use crate::error::{Result, ServerError};
use crate::settings::Settings;

/// A method whose drafts come of a checkpoint of their own.
struct Method {
    name: &'static str,
    /// The draft may be in the base's checkpoint.
    may_be_inside: bool,
}

const METHODS: [Method; 2] =
    [Method { name: "mtp", may_be_inside: true }, Method { name: "eagle", may_be_inside: false }];

/// The draft's checkpoint folder, for the model whose checkpoint is in `base`. `None` if nothing wants one, or if it can only be in
/// the base's own checkpoint. If nobody names a model, the one beside it that is called as the method drafts for it.
///
/// # Errors
/// `BadSetting` if what is named is not there; `BadFile` if the draft was made for another tokenizer.
pub fn folder(settings: &Settings, base: &Path) -> Result<Option<PathBuf>> {
    let method = METHODS.iter().find(|method| method.name == settings.text("speculate_method"));
    let Some(method) = method else { return Ok(None) };
    let given = settings.text("draft_model_name_or_path");
    let name = if given.is_empty() { method.name } else { given };
    // A checkpoint lies in its model's version folder, or is the model itself.
    let beside = base.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    let named = (!given.is_empty()).then(|| PathBuf::from(given));
    for folder in named.into_iter().chain(beside) {
        if let Some(checkpoint) = checkpoint_of(&folder)? {
            check_tokenizer(&checkpoint, base)?;
            return Ok(Some(checkpoint));
        }
    }
    match given.is_empty() && method.may_be_inside {
        true => Ok(None),
        false => Err(settings.bad(
            "draft_model_name_or_path",
            "a folder with a checkpoint, or a model beside this one; speculate_method none serves without it",
        )),
    }
}

/// The folder itself, or its latest version.
fn checkpoint_of(folder: &Path) -> Result<Option<PathBuf>> {
    if folder.join(CHECKPOINT).is_file() {
        return Ok(Some(folder.to_owned()));
    }
    if !folder.is_dir() {
        return Ok(None);
    }
    let latest = version_folders(folder)?.into_values().next_back();
    Ok(latest.filter(|version| version.join(CHECKPOINT).is_file()))
}

/// A draft need not have a tokenizer, but not another one.
fn check_tokenizer(draft: &Path, base: &Path) -> Result<()> {
    let read = |folder: &Path| fs::read(folder.join("tokenizer.json")).ok();
    let (Some(of_draft), Some(of_base)) = (read(draft), read(base)) else { return Ok(()) };
    let vocabulary = |bytes: &[u8]| {
        let tokenizer: Option<Value> = serde_json::from_slice(bytes).ok();
        tokenizer.map(|tokenizer| (tokenizer["model"]["vocab"].clone(), tokenizer["added_tokens"].clone()))
    };
    if of_draft == of_base || vocabulary(&of_draft) == vocabulary(&of_base) {
        return Ok(());
    }
    let reason = "the draft's tokens are not the model's; speculate_method none serves without it".into();
    Err(ServerError::BadFile { path: draft.join("tokenizer.json"), reason })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::settings::SettingFlags;

    /// Where the draft of `llm/1` is found among `files`, or why it is not.
    fn found(files: &[(&str, &str)], settings: &[(&str, &str)]) -> String {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let flags = SettingFlags::from_pairs(settings.iter().copied());
        let settings = Settings::resolve(&HashMap::new(), &flags, |_| None).unwrap();
        match folder(&settings, &root.path().join("llm/1")) {
            Ok(None) => "none".into(),
            Ok(Some(found)) => found.strip_prefix(root.path()).unwrap().display().to_string(),
            Err(error) => error.to_string().replace(&format!("{}/", root.path().display()), ""),
        }
    }

    const MTP: (&str, &str) = ("speculate_method", "mtp");

    #[test]
    fn a_draft_is_the_neighbour_unless_another_is_named() {
        let files = [("llm/1/config.json", "{}"), ("mtp/1/config.json", "{}"), ("mtp/2/config.json", "{}")];
        assert_eq!(found(&files, &[]), "none");
        assert_eq!(found(&files, &[MTP]), "mtp/2");
        assert_eq!(found(&files[..1], &[MTP]), "none");
        let other = [files[0], files[1], ("eagle/config.json", "{}")];
        assert_eq!(found(&other, &[MTP, ("draft_model_name_or_path", "eagle")]), "eagle");
        assert_eq!(
            found(&other, &[MTP, ("draft_model_name_or_path", "hawk")]),
            "setting draft_model_name_or_path is 'hawk', must be a folder with a checkpoint, or a model beside this one; \
             speculate_method none serves without it"
        );
    }

    #[test]
    fn an_eagle_head_is_never_inside_the_model() {
        let files = [("llm/1/config.json", "{}"), ("mtp/1/config.json", "{}"), ("eagle/1/config.json", "{}")];
        let eagle = ("speculate_method", "eagle");
        assert_eq!(found(&files, &[eagle]), "eagle/1");
        assert_eq!(
            found(&files, &[eagle, ("draft_model_name_or_path", "mtp")]),
            "mtp/1",
            "its tensors tell what it is"
        );
        assert_eq!(
            found(&files[..2], &[eagle]),
            "setting draft_model_name_or_path is '', must be a folder with a checkpoint, or a model beside this one; \
             speculate_method none serves without it"
        );
    }

    #[test]
    fn a_draft_of_another_tokenizer_is_refused() {
        let files = |vocab| {
            let base = ("llm/1/tokenizer.json", r#"{"model": {"vocab": {"a": 0}}}"#);
            [("mtp/1/config.json", "{}"), base, ("mtp/1/tokenizer.json", vocab)]
        };
        assert_eq!(found(&files(r#"{"version": 1, "model": {"vocab": {"a": 0}}}"#), &[MTP]), "mtp/1");
        assert_eq!(
            found(&files(r#"{"model": {"vocab": {"a": 1}}}"#), &[MTP]),
            "mtp/1/tokenizer.json: the draft's tokens are not the model's; speculate_method none serves without it"
        );
    }
}

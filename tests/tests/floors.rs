//! The floors of the house: a crate imports only from floors below it, along the lines drawn in ARCHITECTURE.md.

#![allow(clippy::unwrap_used, clippy::needless_pass_by_value, reason = "helpers of tests fail as tests do")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// Each crate and those of ours it may import. The tests crate looks at all of them.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("drafthorse-proto", &[]),
    ("drafthorse-kernels", &[]),
    ("drafthorse-control", &[]),
    ("drafthorse-model", &["drafthorse-kernels"]),
    ("drafthorse-engine", &["drafthorse-control"]),
    ("drafthorse-worker", &["drafthorse-control", "drafthorse-kernels", "drafthorse-model"]),
    ("drafthorse", &["drafthorse-control", "drafthorse-engine", "drafthorse-proto", "drafthorse-worker"]),
];

/// Crates that belong to one floor alone, and who may have them.
const KEPT_BY: &[(&str, &[&str])] = &[
    ("cudarc", &["drafthorse-kernels"]),
    ("tonic", &["drafthorse-proto", "drafthorse"]),
    ("tokenizers", &["drafthorse"]),
    ("clap", &["drafthorse"]),
    ("tokio", &["drafthorse"]),
];

#[test]
fn a_crate_imports_only_from_floors_below() {
    assert_eq!(violations(&manifests(), MAY_IMPORT, KEPT_BY), BTreeSet::new());
}

#[test]
fn an_import_from_above_or_of_cuda_is_found() {
    let manifests = BTreeMap::from([
        ("drafthorse-engine".into(), vec!["drafthorse-control".into(), "drafthorse".into(), "cudarc".into()]),
        ("drafthorse-attic".into(), vec![]),
    ]);
    assert_eq!(
        violations(&manifests, MAY_IMPORT, KEPT_BY),
        BTreeSet::from([
            "drafthorse-attic has no floor: give it one in this test".into(),
            "drafthorse-engine imports cudarc, which is kept by [\"drafthorse-kernels\"]".into(),
            "drafthorse-engine imports drafthorse from a floor that is not below it".into(),
        ])
    );
}

#[test]
fn every_crate_but_kernels_forbids_unsafe() {
    let root = root();
    for path in ["proto", "backend/control", "backend/model", "backend/engine", "backend/worker", "backend/server"] {
        let lib = std::fs::read_to_string(root.join(path).join("src/lib.rs")).unwrap();
        assert!(lib.contains("#![forbid(unsafe_code)]"), "{path}/src/lib.rs does not forbid unsafe code");
    }
}

fn violations(
    manifests: &BTreeMap<String, Vec<String>>,
    may_import: &[(&str, &[&str])],
    kept_by: &[(&str, &[&str])],
) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (name, dependencies) in manifests {
        let Some((_, allowed)) = may_import.iter().find(|(of, _)| of == name) else {
            found.insert(format!("{name} has no floor: give it one in this test"));
            continue;
        };
        for dependency in dependencies {
            if dependency.starts_with("drafthorse") && !allowed.contains(&dependency.as_str()) {
                found.insert(format!("{name} imports {dependency} from a floor that is not below it"));
            }
            for (kept, by) in kept_by {
                if dependency == kept && !by.contains(&name.as_str()) {
                    found.insert(format!("{name} imports {kept}, which is kept by {by:?}"));
                }
            }
        }
    }
    found
}

/// Every crate of the workspace but this one, with its dependencies outside tests.
fn manifests() -> BTreeMap<String, Vec<String>> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() >= 8, "found only {} crates", packages.len());
    let name = |value: &serde_json::Value| value["name"].as_str().unwrap().to_owned();
    packages
        .iter()
        .filter(|package| package["name"] != env!("CARGO_PKG_NAME"))
        .map(|package| {
            let dependencies = package["dependencies"].as_array().unwrap();
            let normal = dependencies.iter().filter(|dependency| dependency["kind"] != "dev");
            (name(package), normal.map(name).collect())
        })
        .collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

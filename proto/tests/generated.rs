//! Compiles the protos without protoc and compares with what is committed; `UPDATE=1` rewrites it.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use prost::Message;

const INFERENCE: &str = "inference";

fn generate() -> Vec<(PathBuf, Vec<u8>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut compiler = protox::Compiler::new([root.join(INFERENCE)]).unwrap();
    compiler.include_imports(true).include_source_info(true).open_files(["grpc_service.proto"]).unwrap();
    let with_comments = compiler.file_descriptor_set();

    let out = tempfile::tempdir().unwrap();
    tonic_prost_build::configure()
        .out_dir(out.path())
        .bytes(".inference.ModelInferRequest.raw_input_contents")
        .bytes(".inference.ModelInferResponse.raw_output_contents")
        .bytes(".inference.InferTensorContents.bytes_contents")
        .emit_rerun_if_changed(false)
        .compile_fds(with_comments.clone())
        .unwrap();
    let code = fs::read_to_string(out.path().join("inference.rs")).unwrap();

    let mut descriptors = with_comments;
    for file in &mut descriptors.file {
        file.source_code_info = None;
    }
    let generated = root.join("src/generated");
    vec![
        (generated.join("inference.rs"), code.into_bytes()),
        (generated.join("inference.bin"), descriptors.encode_to_vec()),
    ]
}

#[test]
fn generated_code_is_what_the_protos_say() {
    let update = std::env::var("UPDATE").is_ok_and(|value| value == "1");
    for (path, fresh) in generate() {
        if update {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &fresh).unwrap();
        }
        let committed = fs::read(&path).unwrap_or_default();
        let name = path.file_name().unwrap().display();
        assert!(committed == fresh, "{name} is stale: run UPDATE=1 cargo test -p drafthorse-proto");
    }
}

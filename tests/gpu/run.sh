#!/usr/bin/env bash
# Every test that needs a GPU, and compute-sanitizer over the kernels.
#
#   tests/gpu/run.sh              builds the tests and runs them here
#   tests/gpu/run.sh pack DIR     builds them, stripped, into DIR, beside a copy of this script; on the machine with the GPU: DIR/run.sh
#
# For the tests with a real model it takes the folder of a checkpoint in bf16 from CHECKPOINT, or a GGUF file from GGUF, which is
# imported; with neither, the GGUF that model_repository/fetch.sh has fetched, and where there is none those tests are left out. DRAFT is
# the folder of an MTP module for it, model_repository/mtp/1 unless it is set.
#   MEMCHECK=0          leaves compute-sanitizer out; MEMCHECK_SECONDS=120 bounds each test under it
#   TEST_SECONDS=300    bounds each of the programs
# Exits with the number of programs that failed.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

root=$here/../..
target=${CARGO_TARGET_DIR:-$root/target}

build() { # into $1
    mkdir -p "$1"
    export CUDA_HOME=${CUDA_HOME:-$("$root/kernels/toolchain.sh")} DRAFTHORSE_REQUIRE_NVCC=1
    # At opt-level 1 the references take seconds, and compiling them a third of the time.
    (cd "$root" && ${CARGO:-cargo} --config profile.dev.package.drafthorse-kernels.opt-level=1 test --no-run --lib \
        -p drafthorse-kernels -p drafthorse-model -p drafthorse-worker 2>&1) | tee "$work/build" || exit 1
    (cd "$root" && ${CARGO:-cargo} build --release --bin drafthorse) || exit 1
    local name
    for name in kernels model worker; do
        strip -o "$1/$name" "$(sed -n "s/^ *Executable .*(\(.*drafthorse_$name-[^)]*\))$/\1/p" "$work/build")" || exit 1
    done
    strip -o "$1/drafthorse" "$target/release/drafthorse" || exit 1
}

if [ "${1:-}" = pack ]; then
    build "${2:?pack takes a folder}"
    cp "$0" "$2/run.sh"
    exit
fi
bin=$here
if [ ! -x "$bin/kernels" ]; then
    bin=$work/bin
    build "$bin"
fi

# cuBLASLt may be part of a Python environment alone.
python_libs=$(python3 -c 'import glob, site; print(":".join(d for p in site.getsitepackages() for d in glob.glob(p + "/nvidia/*/lib")))' 2>/dev/null)
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:/usr/local/cuda/lib64:/usr/local/nvidia/lib64:$python_libs
export RUST_BACKTRACE=0
failed=0
lines=()
note() { lines+=("$(printf '%-28s %s' "$1" "$2")"); }
program() { # NAME PROGRAM ARGUMENTS...
    local name=$1 status=0
    shift
    echo "== $name"
    timeout "${TEST_SECONDS:-300}" "$@" >"$work/log" 2>&1 || status=$?
    grep -v '^$' "$work/log"
    note "$name" "$(grep '^test result:' "$work/log" | tail -1 | cut -c14- || true)$([ $status = 0 ] || echo " exit status $status")"
    [ $status = 0 ] || failed=$((failed + 1))
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null
program kernels "$bin/kernels" --ignored --test-threads=4
program model "$bin/model" --ignored
program "worker: graphs, run-ahead" "$bin/worker" --ignored --nocapture --skip a_checkpoint --skip a_mask_costs

checkpoint=${CHECKPOINT:-}
gguf=${GGUF:-$(ls "$target"/fetch/*.gguf 2>/dev/null | head -1)}
if [ -z "$checkpoint" ] && [ -n "$gguf" ]; then
    checkpoint=$work/checkpoint
    "$bin/drafthorse" import "$gguf" "$checkpoint" || { note import failed; failed=$((failed + 1)); }
fi
if [ -n "$checkpoint" ]; then
    export DRAFTHORSE_TEST_CHECKPOINT=$checkpoint DRAFTHORSE_TEST_DRAFT=${DRAFT:-$root/model_repository/mtp/1}
    program "worker: text as on the CPU" "$bin/worker" --ignored --nocapture a_checkpoint_goes_on
    [ -d "$DRAFTHORSE_TEST_DRAFT" ] || unset DRAFTHORSE_TEST_DRAFT
    program "worker: deterministic" "$bin/worker" --ignored --nocapture texts_of_a_checkpoint
    if [ -n "${DRAFTHORSE_TEST_DRAFT:-}" ]; then
        program "worker: drafts" "$bin/worker" --ignored --nocapture a_checkpoint_with_drafts
    else
        note "worker: drafts" "left out: DRAFT names no folder"
    fi
else
    note "worker: text as on the CPU" "left out: neither CHECKPOINT nor GGUF"
fi

memcheck() { # a kernel test
    timeout "${MEMCHECK_SECONDS:-120}" compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$bin/kernels" --ignored --exact "$1" --test-threads=1 >"$work/$1" 2>&1
    echo "$? $1 $(grep -o 'ERROR SUMMARY: .*' "$work/$1")" >>"$work/memcheck"
}
if [ "${MEMCHECK:-1}" = 1 ] && command -v compute-sanitizer >/dev/null; then
    echo "== memcheck"
    for test in $("$bin/kernels" --ignored --list 2>/dev/null | sed -n 's/: test$//p'); do
        memcheck "$test" &
        while [ "$(jobs -rp | wc -l)" -ge "${MEMCHECK_JOBS:-6}" ]; do wait -n; done
    done
    wait
    sort "$work/memcheck"
    clean=$(grep -c '^0 .*ERROR SUMMARY: 0 errors' "$work/memcheck")
    all=$(wc -l <"$work/memcheck")
    note memcheck "$clean of $all kernel tests without an error$(grep '^124' "$work/memcheck" | awk '{print "; out of time: " $2}')"
    for test in $(grep -v '^0\|^124' "$work/memcheck" | awk '{print $2}'); do grep -m 12 '=====' "$work/$test"; done
    [ "$(grep -cv '^0\|^124' "$work/memcheck")" = 0 ] || failed=$((failed + 1))
elif [ "${MEMCHECK:-1}" = 1 ]; then
    note memcheck "left out: no compute-sanitizer"
fi

echo
echo "== closing lines"
printf '%s\n' "${lines[@]}"
exit $failed

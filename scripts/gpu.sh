#!/usr/bin/env bash
# Builds entwine_jax with CUDA, tests it on this machine's GPUs and measures it; a short summary comes last.
#
#   bash scripts/gpu.sh [build] [smoke] [teams] [test] [demo] [example] [bench] [mlp] [peers] [timeline] [gemm] [tune] [soak] [sanitize]
#                                                        by default all up to bench
#
# teams runs the kernels without JAX in teams of 2 to 8 ranks that share the GPUs.
# mlp times a SwiGLU MLP, forward and backward, against XLA and without its collectives, and products of one x at once.
# bench times entwine_jax, XLA, the GEMM alone and the link alone; peers does that and then times XLA's windowed einsum, JAX's
# Pallas kernel and torch too, those that are installed, and draws the plots if matplotlib is.
# timeline traces the tiles of a call under three orders, and by each strategy. gemm times the matmul alone against cuBLAS.
# tune tunes the ten shapes, and times what that found against the cost model's plans; the cache is $OUT/tuned.
# soak launches random programs and checks every result to the bit, measures what calls and compilations leave in memory, then
# kills and stops one of two processes; sanitize runs each kernel under compute-sanitizer, if it is there. Counts go to
# reliability.json, for docs/reliability.md. --soak is both, with what they need: build soak sanitize.
# Needs no network: python3 must have jax with its CUDA plugin, and what builds the package (pyproject.toml), and pytest.
# Logs and results go to $OUT (default .gpu), the build to build/gpu, where later steps find it.
#   ENTWINE_REQUIRE_GPUS   tests of up to so many GPUs fail where they can't run (default: the GPUs here, at least 2)
#   PYTEST_ARGS            for example "-k 'ragged or few_rows' -x"
#   TEST_JOBS              processes that run tests at once (default: 4)
#   PROCESSES              ranks of one team that are processes, for test, soak and leaks: see tests/gpu/lockstep.py. By default one
#                          process has all GPUs; on a machine with one GPU it is shared by two
#   BENCH_ARGS             for bench and peers, for example "--suite epilogues", "--suite all_reduce --strategy fused,auto", "--suite strategies"
#   TUNE_ARGS              for tune, for example "--suite small --seconds 60"
#   BENCH_SECONDS          the most that each of them may take (default: 300 and 420)
#   SOAK_SECONDS           how long soak launches (default: 300), and SOAK_ARGS, for example "--launches 50000 --seed 1000"
#   LEAK_ARGS              for example "--leak-calls 100000 --leak-compilations 1000"
#   LOST_PEERS             how often each fate meets a process (default: 5)
#   SANITIZE_SECONDS       what each of compute-sanitizer's tools has for calls (default: 20); then the rest is left out
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=${OUT:-.gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$root/build/gpu
python=${PYTHON:-python3}
steps=${*:-build smoke teams test demo example bench}
[[ $steps == --soak ]] && steps="build soak sanitize"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
processes=${PROCESSES:-$((gpus == 1 ? 2 : 1))}
export ENTWINE_REQUIRE_GPUS=${ENTWINE_REQUIRE_GPUS:-$((processes > 1 ? processes : gpus > 2 ? gpus : 2))}
# The package is imported from where it was installed; the working directory, $work/run, has everything but the package.
export PYTHONPATH=$work/site PYTHONUNBUFFERED=1
summary=()
failed=0

for step in $steps; do
  case $step in build | smoke | teams | test | demo | example | bench | mlp | peers | timeline | gemm | tune | soak | sanitize) ;; *)
    echo "gpu.sh: unknown step '$step'; the steps are build, smoke, teams, test, demo, example, bench, mlp, peers, timeline, gemm," \
      "tune, soak and sanitize" >&2
    exit 2
    ;;
  esac
done

# run NAME SECONDS COMMAND...: the log in $out/NAME.log, a line for the summary, and the command's exit status.
run() {
  local name=$1 limit=$2 start=$SECONDS status=0 verdict=ok
  shift 2
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
  case $status in
    0) ;;
    124 | 137) verdict="TOO LONG (over $limit s, or killed)" ;;
    *) verdict="FAILED (exit status $status)" ;;
  esac
  ((status == 0)) || failed=1
  summary+=("$(printf '%-6s %4d s  %s' "$name" $((SECONDS - start)) "$verdict")")
  return $status
}

wants() { [[ " $steps " == *" $1 "* ]]; }

versions() {
  "$python" - <<'PYTHON'
import importlib.metadata, platform, shutil, subprocess
found = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
names = ["jax", "jaxlib", "jax-cuda13-plugin", "nvidia-nccl-cu13", "numpy", "scikit-build-core", "nanobind", "pytest", "hypothesis", "flax", "optax"]
print("python", platform.python_version(), *(f"{name} {found.get(name, 'missing')}" for name in names), sep=", ")
for command in (["nvcc", "--version"], ["cmake", "--version"], ["ninja", "--version"]):
    tool = shutil.which(command[0]) or f"/usr/local/cuda/bin/{command[0]}"
    try:
        lines = subprocess.run([tool, command[1]], capture_output=True, text=True, timeout=20).stdout.split("\n")
        print(command[0], next((line for line in lines if "release" in line), lines[0]))
    except OSError as error:
        print(command[0], error)
PYTHON
  nvidia-smi --query-gpu=index,name,driver_version,memory.used,memory.total --format=csv,noheader
  nvidia-smi topo -m | sed -n '1,10p'
}

stage() {
  rm -rf "$work/run"
  mkdir -p "$work/run"
  cp -r "$root"/tests "$root"/benchmarks "$root"/examples "$root"/scripts "$root"/pyproject.toml "$work/run/"
}

echo "== versions and topology"
versions 2>&1 | tee "$out/versions.log"

if wants build; then
  echo "== build"
  rm -rf "$work"
  mkdir -p "$work"
  export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
  export ENTWINE_CUDA=ON ENTWINE_GPU_TESTS=ON
  if ! run build 240 "$python" -m pip install --verbose --no-build-isolation --no-deps --no-index \
    --disable-pip-version-check --no-warn-script-location --target "$work/site" -C "build-dir=$work/cmake" .; then
    grep -n -E 'error|Error|FAILED' "$out/build.log" | head -30
    tail -n 40 "$out/build.log"
    steps=""
  fi
fi

if [[ -n $steps ]]; then
  stage
  cd "$work/run" || exit 1
fi

if wants smoke && ((gpus == 1)); then
  summary+=("smoke         skipped: it is for one process with two GPUs or more")
elif wants smoke; then
  echo "== smoke"
  run smoke 60 "$python" scripts/gpu_smoke.py || steps=""
  grep -v -E '^(W|I)[0-9]{4} ' "$out/smoke.log" | tail -n 60 | cut -c1-1200
fi

if wants teams; then
  echo "== teams"
  run teams 180 "$work/cmake/teams_test"
  grep -v ': ok$' "$out/teams.log" | tail -n 30 | cut -c1-600
  summary+=("       $(grep -E '^[0-9]+ passed, ' "$out/teams.log" | tail -n 1)")
fi

# Processes that share a GPU run at the same time if the multi-process service lets them, by turns otherwise.
share() {
  ((processes > gpus)) && command -v nvidia-cuda-mps-control >/dev/null || return 0
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
  nvidia-cuda-mps-control -d
}
unshare() {
  [[ -n ${CUDA_MPS_PIPE_DIRECTORY:-} ]] || return 0
  echo quit | nvidia-cuda-mps-control
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

# pytest_part NAME SECONDS PROCESSES FILE...: as run, in the background of others.
pytest_part() {
  local name=$1 limit=$2 pytest=(-m pytest)
  (($3 == 1)) || pytest=(tests/gpu/lockstep.py "$3")
  shift 3
  # --capture=sys leaves the watchdog's stacks in the log; the image's pytest may be older than the project's.
  timeout --kill-after=10 "$limit" "$python" "${pytest[@]}" "$@" -v --capture=sys --tb=short --durations=8 -o minversion=8.0 \
    -p no:cacheprovider "${pytest_args[@]}" >"$out/$name.log" 2>&1
  local status=$?
  echo "exit status $status" >>"$out/$name.log"
}

if wants test; then
  echo "== test"
  eval "pytest_args=(${PYTEST_ARGS:-})"
  # Compiling is most of the time, so several processes share the GPUs; what takes all memory runs alone, at the end. Each takes
  # its share of the memory at start; arenas, communicators and children need some beside.
  jobs=${TEST_JOBS:-4}
  fraction=$("$python" -c "print(0.5 / $jobs / max(1, $processes / $gpus))")
  start=$SECONDS
  share
  ((processes > gpus)) && export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 * gpus / processes / jobs))
  for i in $(seq "$jobs"); do
    XLA_PYTHON_CLIENT_MEM_FRACTION=$fraction pytest_part "test$i" 420 "$processes" tests/gpu \
      --ignore tests/gpu/test_gpu_children.py --ignore tests/gpu/test_gpu_shared.py --part "$i/$jobs" &
  done
  wait
  unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
  unshare
  ENTWINE_REQUIRE_GPUS=$gpus pytest_part test0 280 1 tests/gpu/test_gpu_children.py tests/gpu/test_gpu_shared.py
  cat "$out"/test[0-9]*.log >"$out/test.log"
  rm "$out"/test[0-9]*.log
  # 5: no test of that part was asked for.
  if grep '^exit status' "$out/test.log" | grep -qv -E ' [05]$'; then
    failed=1
    grep -n -E '^E  ' "$out/test.log" | cut -c1-600 | head -40
    grep -E '^(FAILED|ERROR)' "$out/test.log" | cut -c1-400 | head -40
  fi
  summary+=("$(printf 'test   %4d s' $((SECONDS - start)))")
  summary+=("$(grep -E '(passed|failed|error|skipped|deselected).* in [0-9.]+s' "$out/test.log" | sed 's/^/       /')")
  summary+=("$(grep '^exit status' "$out/test.log" | grep -v -E ' [05]$' | sed 's/^/       /')")
fi

if wants demo; then
  echo "== demo"
  run demo 100 "$python" examples/mlp.py
  grep -v -E '^(W|I|E)[0-9]{4} ' "$out/demo.log" | tail -n 30 | cut -c1-300
fi

if wants example; then
  echo "== example"
  if "$python" -c 'import flax, optax' 2>/dev/null; then
    run example 150 "$python" examples/transformer.py --device gpu --out "$out/transformer.json"
    grep -v -E '^(W|I|E)[0-9]{4} ' "$out/example.log" | tail -n 40 | cut -c1-600
  else
    summary+=("example       skipped: needs flax and optax")
  fi
fi

# benchmark NAME SECONDS ARGUMENTS...: results in $out/NAME.json, its report in the output and in $out/NAME.md.
benchmark() {
  local name=$1 limit=${BENCH_SECONDS:-$2}
  shift 2
  echo "== $name"
  # shellcheck disable=SC2086
  run "$name" "$limit" "$python" -m benchmarks.collective_matmul --out "$out/$name.json" "$@" ${BENCH_ARGS:-} ||
    tail -n 30 "$out/$name.log" | cut -c1-1200
  # What a run that was cut short has left is reported too.
  if [[ -s $out/$name.json ]]; then
    "$python" -m benchmarks.report "$out/$name.json" >"$out/$name.md" || failed=1
    cat "$out/$name.md"
  fi
  summary+=("$(grep -E '^(fused|resident|signal|auto): faster than XLA' "$out/$name.log" | sed 's/^/       /')")
}

if wants bench; then
  benchmark bench 300
fi

if wants peers; then
  benchmark peers 420 --peers xla,xla_windowed,pallas,torch
  grep -E '^(note|xla_windowed|pallas|torch): ' "$out/peers.log"
  if "$python" -c 'import matplotlib' 2>/dev/null && [[ -s $out/peers.json ]]; then
    "$python" -m benchmarks.report "$out/peers.json" --plots "$out/plots" >/dev/null || failed=1
  fi
fi

if wants mlp; then
  echo "== mlp"
  run mlp 240 "$python" -m benchmarks.mlp_fwd_bwd --out "$out/mlp.json"
  grep -v -E '^(W|I|E)[0-9]{4} ' "$out/mlp.log" | tail -n 12 | cut -c1-300
  run several 120 "$python" -m benchmarks.several_weights --out "$out/several.json"
  grep '^|' "$out/several.log"
fi

if wants timeline; then
  echo "== timeline"
  run timeline 120 "$python" -m benchmarks.timeline --out "$out/timeline.json"
  grep -v -E '^(W|I|E)[0-9]{4} ' "$out/timeline.log" | tail -n 5 | cut -c1-300
fi

if wants gemm; then
  echo "== gemm"
  # JAX brings its own cuBLAS, the toolkit another.
  cublas=$("$python" -c 'import pathlib, sys; print(":".join(str(f.parent) for p in sys.path for f in pathlib.Path(p or ".").glob("nvidia/*/lib/libcublas.so.13")))')
  LD_LIBRARY_PATH=$cublas:/usr/local/cuda/lib64 run gemm 60 "$work/cmake/gemm"
  cp "$out/gemm.log" "$out/gemm.json"
  cut -c1-300 "$out/gemm.log"
fi

if wants tune; then
  echo "== tune"
  # shellcheck disable=SC2086
  ENTWINE_CACHE_DIR=$out/tuned run tune 240 "$python" -m benchmarks.tune --out "$out/tune.json" ${TUNE_ARGS:-} ||
    tail -n 30 "$out/tune.log" | cut -c1-1200
  grep -v -E '^(W|I|E)[0-9]{4} ' "$out/tune.log" | tail -n 30 | cut -c1-300
  summary+=("       $(grep -E '^tune: ' "$out/tune.log" | tail -n 1)")
fi

if wants soak; then
  echo "== soak"
  seconds=${SOAK_SECONDS:-300}
  share
  # The arenas are not in XLA's pool.
  # shellcheck disable=SC2086
  XLA_PYTHON_CLIENT_MEM_FRACTION=0.25 run soak $((seconds + 180)) "$python" scripts/soak.py --launches 1000000 --seconds "$seconds" \
    --processes "$processes" --out "$out/soak.json" ${SOAK_ARGS:-}
  grep -E 'launches/s$|^  again|^(wrong|hung|error|crashed):' "$out/soak.log" | tail -n 12 | cut -c1-600
  # shellcheck disable=SC2086
  XLA_PYTHON_CLIENT_MEM_FRACTION=0.25 run leaks 150 "$python" scripts/soak.py --leaks --processes "$processes" \
    --out "$out/leaks.json" ${LEAK_ARGS:-}
  grep -E '^leaks: ' "$out/leaks.log" | cut -c1-600
  unshare
  lost=${LOST_PEERS:-5}
  XLA_PYTHON_CLIENT_MEM_FRACTION=0.25 run lost_peers $((60 + 150 * lost)) "$python" tests/gpu/peers.py --times "$lost" \
    --out "$out/lost_peers.json"
  grep -E '^peer ' "$out/lost_peers.log"
fi

if wants sanitize; then
  echo "== sanitize"
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
  if [[ -n $sanitizer ]]; then
    for tool in memcheck racecheck synccheck initcheck; do
      limit=${SANITIZE_SECONDS:-20}
      # It ends by itself; a kernel that waits for one that the tool doesn't let run at the same time gives up after 15 s.
      TEAMS_EACH=1 TEAMS_SECONDS=$limit TEAMS_PATIENCE=60 run "sanitize_$tool" $((limit + 60)) \
        "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 "$work/cmake/teams_test" 2
      if grep -q 'Device not supported' "$out/sanitize_$tool.log"; then
        summary+=("       compute-sanitizer doesn't support this machine")
        break
      fi
      grep -E '^========= +(Error|Invalid|Race|Warning|Uninit|Barrier|Internal)' "$out/sanitize_$tool.log" | head -n 6 | cut -c1-300
      grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|^count|^[0-9]+ passed|BAD' "$out/sanitize_$tool.log" | tail -n 6 | cut -c1-300
    done
  else
    summary+=("sanitize      skipped: there is no compute-sanitizer")
  fi
fi

if wants soak || wants sanitize; then
  "$python" -m benchmarks.reliability collect --logs "$out" --out "$out/reliability.json" || failed=1
  cat "$out/reliability.json"
fi

echo "== summary (logs in $out)"
printf '%s\n' "${summary[@]}"
exit $failed

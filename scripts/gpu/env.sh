# Sourced by call1.sh and call2.sh in the root of a checkout: libraries, compiled kernels, steps.
#
#   OUT        folder for what comes back: log.txt, results.tgz and at most five more files
#   DEVICE     cuda, or cpu for a small run of everything
#   PYTHON     the interpreter, python3 unless given
#   LIMIT_S    seconds for all steps; each call has its own default
#
# .gpu/ is what ../shared/gpu/rehearse.sh lays out: wheels of the libraries that the GPU machine
# lacks, and kernels compiled for its card.
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=4
device=${DEVICE:-cuda} python=${PYTHON:-python3} began=$SECONDS failed=0 steps=()
back=${OUT:-/tmp/out}
work=$(mktemp -d)
export OUT=$work
mkdir -p "$back" "$work/parts"
exec > >(tee -a "$back/log.txt") 2>&1
tee=$!
small=()
if [ "$device" = cpu ]; then small=(--small --device cpu) OMP_NUM_THREADS=1; fi

site=$work/site
if [ "$device" = cuda ] && ls .gpu/whl/*.whl > /dev/null 2>&1; then
  "$python" -m pip install -q --no-index --no-deps --no-cache-dir --target "$site" .gpu/whl/*.whl \
    || { echo "error: the wheels in .gpu/whl do not install"; exit 1; }
fi
export PYTHONPATH="$PWD:$PWD/benchmarks:$PWD/benchmarks/kernels:$site:${PYTHONPATH:-}"

# A kernel is found by its source, line numbers and arguments: what is in the archive is not
# compiled again.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$work/triton}
mkdir -p "$TRITON_CACHE_DIR"
kernels() { "$python" scripts/gpu/kernel_archive.py "$@"; }
carried=0
if [ "$device" = cuda ] && [ -f .gpu/kernels.tar.xz ]; then
  carried=$(kernels unpack .gpu/kernels.tar.xz "$TRITON_CACHE_DIR") \
    || echo "the compiled kernels do not unpack: they are compiled again"
fi
sleep 0.01
touch "$work/began"

step() {  # step NAME SECONDS COMMAND...: the command, at most so long and never beyond the limit
  local name=$1 cap=$2 at=$SECONDS left=$((limit - SECONDS + began)) outcome status
  shift 2
  [ "$device" = cuda ] || cap=$((5 * cap)) # a rehearsal may run beside other work
  [ "$left" -ge "$cap" ] || cap=$left
  if [ "$cap" -lt 10 ]; then
    steps+=("$(printf '%-28s %4d s  no time left' "$name" 0)")
    failed=1
    return
  fi
  echo
  echo "== $name, at $((at - began)) s, at most $cap s"
  STEP_S=$cap timeout --kill-after 5 "$cap" "$@"
  status=$?
  case $status in
    0) outcome=ok ;;
    124 | 137) outcome="stopped after $cap s" ;;
    *) outcome="failed, status $status" ;;
  esac
  [ "$status" -eq 0 ] || failed=1
  steps+=("$(printf '%-28s %4d s  %s' "$name" $((SECONDS - at)) "$outcome")")
  pack
}

pack() {  # what is known so far, in few files: at most eight come back
  tar czf "$back/results.tgz" -C "$work" --exclude=./site --exclude=./triton .
  find "$work" -maxdepth 2 \( -name 'cuda_headline-*.json' -o -name 'cost_model-*.json' \
    -o -name 'smoke.json' \) -exec cp {} "$back" \;
}

finish() {  # the sums, and all kernels for the next call
  local compiled=0
  [ "$device" = cpu ] || compiled=$(kernels newer "$TRITON_CACHE_DIR" "$work/began")
  echo
  echo "== steps"
  [ ${#steps[@]} -eq 0 ] || printf '%s\n' "${steps[@]}"
  echo "kernels carried: $carried, compiled here: $compiled"
  echo "together $((SECONDS - began)) s"
  if [ "$compiled" -gt 0 ]; then
    timeout 12 "$python" scripts/gpu/kernel_archive.py pack "$TRITON_CACHE_DIR" "$back/kernels.tar.xz" \
      > /dev/null || echo "the kernels were not packed"
  fi
  pack
  rm -rf "$work"
  exec >&- 2>&-
  wait "$tee"  # the end of the log
  exit "$failed"
}

#!/usr/bin/env bash
# memcheck and racecheck of one small call of every Hopper kernel (tests/support/kernels/calls.py), on a machine with a Hopper GPU:
#   bash tests/pallas_kernels/sanitize.sh [LOG_DIR] [NAME ...]
# One process a tool. Each buffer is an allocation of its own, so that a step past its end shows, and nothing is replayed
# from command buffers. Ends with 1 when a tool reports an error or does not start. Hazards that
# racecheck reports of TMA copies are to be read against the mbarriers of the kernel.
set -uo pipefail
cd "$(dirname "$0")/../.."
logs=${1:-/tmp}; shift || true
export JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS="--xla_gpu_enable_command_buffer= ${XLA_FLAGS:-}"
failed=0
for tool in memcheck racecheck; do
  log=$logs/sanitize_$tool.log
  timeout "${LIMIT:-270}" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
    python3 tests/support/kernels/calls.py "$@" >"$log" 2>&1
  code=$?
  [ $code = 0 ] || failed=1
  echo "$tool: exit $code, $(grep -c '^ran ' "$log") calls ran, $(grep -o 'ERROR SUMMARY.*\|RACECHECK SUMMARY.*' "$log" | tail -1)"
  [ $code = 0 ] || grep -m 12 -E '^=========|Error|error' "$log"
done
exit $failed

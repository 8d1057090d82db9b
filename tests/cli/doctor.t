$ loongforge doctor --json > out.json; code=$?; if grep -q '"ok": true' out.json; then test $code = 0; else test $code = 1; fi && echo code and report agree
code and report agree
$ (loongforge doctor --json || true) | grep -c -e '"name": "LMDB"' -e '"name": "libjpeg-turbo"' -e '"name": "zstd"' -e '"name": "xxHash"' -e '"name": "jansson"'
5
$ (loongforge doctor --json || true) | grep -c -e '"name": "libcuda"' -e '"name": "libnccl"' -e '"name": "libnvjpeg"' -e '"name": "libcufile"' -e '"name": "libnvidia-ml"' -e '"name": "libmpi"'
6
$ (loongforge doctor || true) | grep -c -E '^(ok|warning|missing|broken) +(cores|memory|locked memory|open files|/dev/shm|current folder|python) '
7
$ (loongforge doctor || true) | tail -n 1 | sed 's/[0-9][0-9]*/N/g'
N ok, N warnings, N optional parts missing, N broken
$ (NCCL_ASYNC_ERROR_HANDLING=0 loongforge doctor || true) | grep -A 1 'NCCL errors'
warning  NCCL errors        NCCL_ASYNC_ERROR_HANDLING=0
                            -> a failed collective then hangs or passes silently and the loss goes wrong: unset it
$ (ulimit -n 512; loongforge doctor || true) | grep -A 1 'RLIMIT_NOFILE'
warning  open files         RLIMIT_NOFILE 512
                            -> NCCL opens several files a peer: `ulimit -n 65536`
$ printf '#!/bin/sh\nexit 3\n' > ../bin/python3; chmod +x ../bin/python3; loongforge doctor | grep -A 1 '^broken ' | sed 's, /.* does, PATH does,'
broken   python             PATH does not run
                            -> `loongforge train` uses it: `make build` sets one up in .venv
? 1
$ printf '#!/bin/sh\necho 3.12.1 - yes\n' > ../bin/python3; loongforge doctor | grep -A 1 '^broken ' | sed 's,(/.*),(PATH),'
broken   python             3.12.1, torch missing (PATH)
                            -> `loongforge train` needs the package torch: `make build`, then `. .venv/bin/activate`
? 1
$ loongforge doctor now
loongforge: argument 'now' is one too many, expected: loongforge doctor [--json]; hint: --help lists the arguments
? 2

$ printf '[{"name":"embed","shape":[100,64],"dtype":"bf16","layer":"embed"},{"name":"l0.qkv","shape":[64,64],"dtype":"bf16","layer":0},{"name":"l0.norm","shape":[64],"dtype":"f32","layer":0},{"name":"l0.e0","shape":[64,64],"dtype":"bf16","layer":0,"expert":0},{"name":"l0.e1","shape":[64,32],"dtype":"bf16","layer":0,"expert":1},{"name":"l0.old","shape":[9],"dtype":"bf16","layer":0,"frozen":true},{"name":"head","shape":[100,64],"dtype":"bf16","layer":"tail","tied_to":"embed"}]' > m.json
$ loongforge sync plan m.json --chunk_bytes 16KiB --high-load-experts 1
group      ranges   chunks              bytes                   largest chunk  form   why
dense           3        4              42240    41.25 KiB              16384  dense  no slow link was measured or told
high            1        1              16384    16.00 KiB              16384  dense  no slow link was measured or told
low             1        1               8192     8.00 KiB               8192  dense  no slow link was measured or told

 order   run  group  class dtype           offset       elements            bytes  form
     0     0  high       0 f32               4096           4096            16384  dense
     1     0  low        0 f32               8192           2048             8192  dense
     2     1  dense      0 f32                  0           4096            16384  dense
     3     1  dense      1 f32                  0             64              256  dense
     4     2  dense      0 f32              10240           3200            12800  dense
     5     2  dense      0 f32              13440           3200            12800  dense

6 collectives in 3 runs, 66816 bytes (65.25 KiB) a step and rank, before the sum's own traffic
$ loongforge sync plan m.json --grad_f32 false | tail -1
4 collectives in 3 runs, 33536 bytes (32.75 KiB) a step and rank, before the sum's own traffic
$ loongforge sync plan m.json --comm-strategy sparse --high-load-experts 1 --k_ratio 0.1 | grep -v dense
group      ranges   chunks              bytes                   largest chunk  form   why
low             1        1               8192     8.00 KiB               8192  sparse experts with little load

 order   run  group  class dtype           offset       elements            bytes  form
     1     0  low        0 f32               8192           2048             8192  sparse

6 collectives in 3 runs, 59700 bytes (58.30 KiB) a step and rank, before the sum's own traffic
$ loongforge sync plan m.json --wire_dtype bf16 | grep -v "^  *[0-9]"
group      ranges   chunks              bytes                   largest chunk  form   why
dense           3        3              42240    41.25 KiB              25600  bf16   wire_dtype is bf16
high            1        1              24576    24.00 KiB              24576  bf16   wire_dtype is bf16
low             0        0                  0          0 B                  0  -      nothing to sum

 order   run  group  class dtype           offset       elements            bytes  form

4 collectives in 3 runs, 33408 bytes (32.62 KiB) a step and rank, before the sum's own traffic
$ loongforge sync plan m.json --wire_dtype bf16 --grad_f32 false | head -3
group      ranges   chunks              bytes                   largest chunk  form   why
dense           3        3              21248    20.75 KiB              12800  mixed  no slow link was measured or told
high            1        1              12288    12.00 KiB              12288  dense  no slow link was measured or told
$ loongforge sync plan m.json --wire_dtype bf16 --link_mb_s 50 --topk_mb_s 10 | sed -n 3p | cut -c80-
bf16   told link 50 MB/s, 0 us: sparse 2.547 ms, bf16 0.2519 ms, dense 0.4915 ms; bf16 wins below 2000 MB/s, sparse wins below 3.195 MB/s
$ loongforge sync plan m.json --wire_dtype fp8
loongforge: [nexus] wire_dtype is 'fp8', expected one of grad|bf16
? 2
$ printf '[{"name":"a","shape":[4],"dtype":"f32","layer":0,"exprt":1}]' > bad.json; loongforge sync plan bad.json
loongforge: bad.json: entry 0: unknown key 'exprt', expected name, shape, dtype, layer, expert, frozen or tied_to
? 1
$ printf '[{"name":"a","shape":[4],"dtype":"int9","layer":0}]' > bad.json; loongforge sync plan bad.json
loongforge: bad.json: entry 0 (a): dtype is "int9", expected "f32", "bf16" or "f16"
? 1
$ printf '[\n{"name":' > bad.json; loongforge sync plan bad.json 2>&1 | cut -c1-29
loongforge: bad.json, line 2:
? 1
$ loongforge sync plan m.json --grad_f32 false --every_micro_step true | tail -1
4 collectives in 3 runs, 33536 bytes (32.75 KiB) a micro-step and rank, before the sum's own traffic
$ loongforge sync plan m.json --every_micro_step true --reduce sum
loongforge: m.json: every_micro_step is true and reduce is sum, expected mean: a sum would count earlier micro-steps once a rank
? 1
$ loongforge sync plan m.json --every_micro_step true --skip_empty true
loongforge: m.json: every_micro_step is true, expected no skip_empty beside it: gradients of earlier micro-steps would be lost
? 1
$ loongforge sync plan m.json --chunk_least 1GiB
loongforge: m.json: chunk_least is 1073741824, expected at most chunk_most, 268435456
? 1
$ loongforge sync plan missing.json
loongforge: unable to open missing.json: No such file or directory
? 1
$ loongforge sync wild m.json
loongforge: sync 'wild', expected plan or bench; hint: --help lists the arguments
? 2
$ loongforge sync plan
loongforge: sync plan wants a layout; hint: --help lists the arguments
? 2
$ loongforge sync bench --ranks 3 --sizes 64KiB,1MiB --chunks 32KiB,1MiB --iterations 2 | cut -c1-39
       bytes        chunk dtype   wrong
    1.00 MiB          one   f32       0
    1.00 MiB    32.00 KiB   f32       0
   64.00 KiB          one   f32       0
   64.00 KiB    32.00 KiB   f32       0
$ loongforge sync bench --dtype bf16 --sizes 100000 --chunks 64KiB --iterations 2 --json | sed 's/"name.*"dtype/"dtype/; s/"p50_us.*wrong/"wrong/'
{"dtype": "bf16", "bytes": 99968, "chunk_bytes": 99968, "wrong": 0}
{"dtype": "bf16", "bytes": 99968, "chunk_bytes": 65536, "wrong": 0}
$ loongforge sync bench --chunks 1MiB,0
loongforge: --chunks '1MiB,0', expected up to 32 byte counts such as 1MiB,16MiB; hint: --help lists the arguments
? 2
$ loongforge sync bench --sizes 1Mx
loongforge: --sizes '1Mx', expected up to 32 byte counts such as 1MiB,16MiB; hint: --help lists the arguments
? 2
$ loongforge sync bench --dtype f16
loongforge: --dtype 'f16', expected f32 or bf16; hint: --help lists the arguments
? 2
$ loongforge sync bench --transport pigeon
loongforge: --transport 'pigeon', expected loopback, nccl or mpi; hint: --help lists the arguments
? 2
$ loongforge sync bench --iterations 0
loongforge: --iterations '0', expected a whole number from 1 to 10000; hint: --help lists the arguments
? 2
$ export LD_LIBRARY_PATH=$LF_NCCL_FAKES WORLD_SIZE=2; RANK=1 loongforge sync bench --transport nccl --meet meet1 --sizes 20KiB --chunks 8KiB --iterations 2 >other 2>&1 & them=$!; LD_LIBRARY_PATH=$LF_NCCL_FAKES WORLD_SIZE=2 RANK=0 loongforge sync bench --transport nccl --meet meet1 --sizes 20KiB --chunks 8KiB --iterations 2 | cut -c1-39; wait $them; echo "other: $?"; cat other; ls meet1
NCCL 2.28.9 (loaded by us), rank 0 of 2
       bytes        chunk dtype   wrong
   20.00 KiB          one   f32       0
   20.00 KiB     8.00 KiB   f32       0
other: 0
ls: cannot access 'meet1': No such file or directory
? 2
$ LD_LIBRARY_PATH=$LF_NCCL_FAKES FAKE_NCCL_VERSION=2700 loongforge sync bench --transport nccl --meet meet2
loongforge: libnccl.so.2 is NCCL 2.7.0, expected 2.10.0 or newer
? 1
$ LD_LIBRARY_PATH=$LF_NCCL_FAKES WORLD_SIZE=2 RANK=1 loongforge sync bench --transport nccl --meet meet3 --timeout_s 0.1
loongforge: rank 1: meet3 did not come within 0.1 s; hint: does rank 0 run, and see this folder?
? 1
$ LD_LIBRARY_PATH=$LF_CLI_FAKES loongforge sync bench --transport mpi --mpi_library libmpi.so.40
loongforge: Open MPI v4.1.4 is neither Open MPI nor of MPICH's family (Intel MPI, MVAPICH, Cray MPICH)
? 1
$ loongforge sync bench --transport mpi --mpi_library /nowhere/libmpi.so 2>&1 | cut -d: -f1-3
loongforge: no MPI: /nowhere/libmpi.so
? 1

$ printf '[{"name":"embed","shape":[100,64],"dtype":"bf16","layer":"embed"},{"name":"l0.qkv","shape":[64,64],"dtype":"bf16","layer":0},{"name":"l0.norm","shape":[64],"dtype":"f32","layer":0},{"name":"l0.e0","shape":[64,64],"dtype":"bf16","layer":0,"expert":0},{"name":"l0.e1","shape":[64,32],"dtype":"bf16","layer":0,"expert":1},{"name":"l0.old","shape":[9],"dtype":"bf16","layer":0,"frozen":true},{"name":"head","shape":[100,64],"dtype":"bf16","layer":"tail","tied_to":"embed"}]' > m.json
$ loongforge sync plan m.json --chunk_bytes 16KiB --high-load-experts 1
group      ranges   chunks              bytes                   largest chunk  form
dense           3        4              42240    41.25 KiB              16384  dense
high            1        1              16384    16.00 KiB              16384  dense
low             1        1               8192     8.00 KiB               8192  dense

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
$ loongforge sync plan m.json --comm-strategy sparse 2>&1 | cut -d, -f1
loongforge: m.json: comm_strategy is sparse
? 1
$ printf '[{"name":"a","shape":[4],"dtype":"f32","layer":0,"exprt":1}]' > bad.json; loongforge sync plan bad.json
loongforge: bad.json: entry 0: unknown key 'exprt', expected name, shape, dtype, layer, expert, frozen or tied_to
? 1
$ printf '[{"name":"a","shape":[4],"dtype":"int9","layer":0}]' > bad.json; loongforge sync plan bad.json
loongforge: bad.json: entry 0 (a): dtype is "int9", expected "f32", "bf16" or "f16"
? 1
$ printf '[\n{"name":' > bad.json; loongforge sync plan bad.json 2>&1 | cut -c1-29
loongforge: bad.json, line 2:
? 1
$ loongforge sync plan missing.json
loongforge: unable to open missing.json: No such file or directory
? 1
$ loongforge sync wild m.json
loongforge: sync 'wild', expected plan; hint: --help lists the arguments
? 2

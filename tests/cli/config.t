$ loongforge config | grep -c '^\[[a-z]*\] '
7
$ loongforge config sculptor
[sculptor] MemSculptor: the plan of a step's memory
  align_bytes          i64   128  (1 to 1073741824)
    alignment of a tensor that names none of its own
  capacity_bytes       i64   0  (0 to 4.61168601843e+18)
    bytes there are: a plan that needs more is an error that names the pool's largest tensors; 0: unlimited
  time_limit_s         f64   0.5  (0 to 86400)
    search after the first plan, in seconds of an ordinary core; it counts work, so results repeat; 0: no search
  short_ops            i32   5  (1 to 1000000000)
    a tensor that lives fewer operators is of class short
  long_ops             i32   20  (1 to 1000000000)
    a tensor that lives more operators is of class long
  strategy             text  "moefusion"  (moefusion|greedy)
    moefusion: the best of several orders, then a search; greedy: one pass, largest tensor first
$ loongforge config sculptor --toml
# MemSculptor: the plan of a step's memory
[sculptor]
# alignment of a tensor that names none of its own (1 to 1073741824)
align_bytes = 128
# bytes there are: a plan that needs more is an error that names the pool's largest tensors; 0: unlimited (0 to 4.61168601843e+18)
capacity_bytes = 0
# search after the first plan, in seconds of an ordinary core; it counts work, so results repeat; 0: no search (0 to 86400)
time_limit_s = 0.5
# a tensor that lives fewer operators is of class short (1 to 1000000000)
short_ops = 5
# a tensor that lives more operators is of class long (1 to 1000000000)
long_ops = 20
# moefusion: the best of several orders, then a search; greedy: one pass, largest tensor first (moefusion|greedy)
strategy = "moefusion"
$ loongforge config --toml | grep -c '^\[[a-z]*\]$'
7
$ loongforge config --toml train | grep -c ' = '
26
$ loongforge config nonsense 2>&1 | cut -d, -f1
loongforge: unknown section 'nonsense'
? 2
$ loongforge config train sculptor
loongforge: argument 'sculptor' is one too many, expected: loongforge config [SECTION] [--toml]; hint: --help lists the arguments
? 2
$ loongforge config --tomlx
loongforge: unknown argument '--tomlx'; hint: --help lists the arguments
? 2
$ loongforge config --toml=1
loongforge: argument '--toml' is a switch and takes no value; hint: --help lists the arguments
? 2

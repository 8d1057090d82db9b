$ printf 'id,lower,upper,size,role\nw,0,21,4,weight\nb1,0,3,4,activation\nb2,3,9,4,activation\nb3,0,9,4,gradient\nb4,9,21,4,workspace\n' > in.csv
$ loongforge mem plan in.csv --align_bytes 1 --out out.csv | sed 's/in [0-9.]* s$/in T s/'
tensors                     5
all bytes                  20 bytes        20 B  as if none shared
bound                      12 bytes        12 B  most that is live at once
plan                       12 bytes        12 B  waste 0.000 %, no plan is smaller

class                 tensors      most live at once
static                      1                4 bytes         4 B
short                       1                4 bytes         4 B
medium                      3                8 bytes         8 B
long                        0                0 bytes         0 B
transient                   0                0 bytes         0 B
Pools with walls between the classes would need 1.333 times the plan.
planned in T s
written to out.csv
$ cut -d, -f2-7 out.csv
lower,upper,size,alignment,offset,name
0,21,4,0,0,w
0,3,4,0,8,b1
3,9,4,0,8,b2
0,9,4,0,4,b3
9,21,4,0,4,b4
$ loongforge mem plan out.csv --align-bytes=4 --strategy greedy | grep '^plan '
plan                       12 bytes        12 B  waste 0.000 %, no plan is smaller
$ loongforge mem table out.csv --rows 2
tensor                       module               role                bytes      first       last         offset
w                                                 weight                  4          0         21              0
b4                                                workspace               4          9         21              4
... 3 more

role            tensors              bytes
weight                1                  4         4 B
activation            2                  8         8 B
gradient              1                  4         4 B
workspace             1                  4         4 B
$ loongforge mem table in.csv --rows=0 | head -n 3
tensor                       module               role                bytes      first       last         offset
... 5 more

$ loongforge mem plan in.csv --capacity_bytes 8
loongforge: the plan needs 384 bytes, capacity_bytes is 8: 376 too few. At ordinal 0 384 bytes must be live, 4 of them static; largest: 'w' 4 bytes (weight), 'b1' 4 bytes (activation), 'b3' 4 bytes (gradient); hint: no plan can be smaller: a smaller batch or recomputation, or more capacity_bytes
? 1
$ loongforge mem plan in.csv --capacity_byte 1KiB
loongforge: unknown option 'capacity_byte' in section [sculptor]; hint: did you mean 'capacity_bytes'?
? 2
$ loongforge mem plan in.csv --sculptor.capacity_bytes 1KiB | grep -c '^plan '
1
$ loongforge mem plan in.csv --strategy best
loongforge: [sculptor] strategy is 'best', expected one of moefusion|greedy
? 2
$ loongforge mem plan in.csv --align_bytes 0
loongforge: [sculptor] align_bytes is 0, expected 1 to 1073741824
? 2
$ loongforge mem plan in.csv --align_bytes
loongforge: argument '--align_bytes' needs a value; hint: --help lists the arguments
? 2
$ loongforge mem plan absent.csv
loongforge: cannot open absent.csv: No such file or directory (errno 2)
? 1
$ printf 'id,lower,upper,size\na,0,3,4\nb,0,x,4\n' > bad.csv; loongforge mem plan bad.csv
loongforge: bad.csv:3: upper is 'x', expected a whole number
? 1
$ loongforge mem plan in.csv --out no/folder.csv 2>&1 | sed 's/open [^:]*:/open PATH:/'
loongforge: cannot open PATH: No such file or directory (errno 2)
? 1
$ test ! -e no && echo nothing was made
nothing was made
$ loongforge mem nonsense in.csv
loongforge: mem 'nonsense', expected plan or table; hint: --help lists the arguments
? 2
$ loongforge mem table in.csv --rows many
loongforge: --rows is 'many', expected a whole number; hint: --help lists the arguments
? 2
$ loongforge mem
loongforge: 0 arguments given, expected: loongforge mem (plan IN.csv [--out OUT.csv] | table IN.csv [--rows N]); hint: --help lists the arguments
? 2
$ loongforge mem plan a b
loongforge: argument 'b' is one too many, expected: loongforge mem (plan IN.csv [--out OUT.csv] | table IN.csv [--rows N]); hint: --help lists the arguments
? 2

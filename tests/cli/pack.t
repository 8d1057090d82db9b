$ loongforge pack --scenes 40 --seed 7 a | sed -E 's/[0-9.]+ KiB/SIZE/; s/, [0-9.]*s$/, T/'
a: 40 samples, 40 images, SIZE, 0 skipped, T
$ loongforge pack --scenes=40 --seed=7 --threads 3 b >/dev/null && cmp a/data.mdb b/data.mdb && echo the same bytes
the same bytes
$ ls a
data.mdb
$ loongforge pack --scenes 3 a
loongforge: a exists already; hint: --overwrite replaces a set, or choose another path
? 1
$ loongforge pack --scenes 3 --overwrite a | cut -d, -f1
a: 3 samples
$ touch a/mine; loongforge pack --scenes 3 --overwrite a
loongforge: a holds 'mine', so it is no set made by pack; hint: choose another path, or remove it yourself
? 1
$ ls a; ls
data.mdb
mine
a
b
$ loongforge pack a
loongforge: expected one of --scenes N and --from DIR; hint: --help lists the arguments
? 2
$ loongforge pack --scenes 3 --from x a
loongforge: expected one of --scenes N and --from DIR; hint: --help lists the arguments
? 2
$ loongforge pack --scenes 3
loongforge: 0 arguments given, expected: loongforge pack (--scenes N | --from DIR [DIR …] [--list FILE] [--tokenizer PATH]) OUT; hint: --help lists the arguments
? 2
$ loongforge pack --scenes 3 --tokenizer x c
loongforge: --tokenizer goes with --from DIR; hint: --help lists the arguments
? 2
$ loongforge pack --scenes -1 c
loongforge: [pack] scenes is -1, expected 0 to 4294967295
? 2
$ loongforge pack --scenes 3 --qualty 3 c
loongforge: unknown option 'qualty' in section [pack]; hint: did you mean 'quality'?
? 2
$ loongforge pack --scenes 4000 --map_bytes 1MiB c
loongforge: writing c: the set would be larger than map_bytes; hint: --map_bytes
? 1
$ loongforge pack --from nowhere c
loongforge: no folder nowhere
? 1
$ mkdir d; loongforge pack --from d c
loongforge: d has neither instruct.jsonl nor captions.jsonl
? 1
$ printf '{"id":"x","text":"one"}\nnonsense\n{"id":"y","file":"none.jpg","text":"two"}\n' > d/captions.jsonl; loongforge pack --from d c | sed 's/, [0-9.]*s$/, T/'
warning: skipped line 2: '[' or '{' expected near 'nonsense'
warning: skipped y: image none.jpg: cannot open d/none.jpg: No such file or directory (errno 2)
c: 1 samples, 0 images, 88 B, 2 skipped, T
$ echo nonsense > d/captions.jsonl; loongforge pack --from d e
warning: skipped line 1: '[' or '{' expected near 'nonsense'
loongforge: d/captions.jsonl holds no usable record (1 skipped)
? 1
$ ls
a
b
c
d

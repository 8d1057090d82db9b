$ loongforge train
loongforge: --data is not set, expected an LMDB folder; `loongforge pack --scenes 4000 data/scenes` makes one; hint: --help lists the arguments
? 2
$ loongforge train --data nowhere --batchsize 3
loongforge: unknown option 'batchsize' in section [train]; hint: did you mean 'batch_size'?
? 2
$ loongforge train --data nowhere --preset huge
loongforge: [train] preset is 'huge', expected one of tiny|small|n16
? 2
$ loongforge train --data nowhere --lr fast
loongforge: [train] lr is 'fast', expected a number
? 2
$ loongforge train --data nowhere --diff_interval 20
loongforge: unknown option 'diff_interval'; hint: it belongs to section [vault]: --vault.diff_interval
? 2
$ loongforge train --data nowhere --vault.diff_intervall 20
loongforge: unknown option 'diff_intervall' in section [vault]; hint: did you mean 'diff_interval'?
? 2
$ loongforge train --data nowhere --nonsense.key 20
loongforge: unknown option 'nonsense.key' in section [train]; hint: `loongforge config train` lists them
? 2
$ loongforge train nowhere
loongforge: argument 'nowhere' is one too many, expected: loongforge train --data DIR [--config FILE.toml] [--KEY VALUE] [--SECTION.KEY VALUE]; hint: --help lists the arguments
? 2
$ loongforge train --config absent.toml
loongforge: --config: cannot read absent.toml: No such file or directory
? 1
$ loongforge train --data nowhere 2>&1 | cut -d: -f1-2
loongforge: --data
? 1
$ loongforge train --help | grep -c -e '--vault.diff_interval' -e '^  --steps '
2
$ printf '#!/bin/sh\nfor a in "$@"; do printf "[%%s]" "$a"; done; echo; exit 7\n' > ../bin/python3 && chmod +x ../bin/python3
$ touch run.toml; loongforge train --config run.toml --resume --steps=5 --vault.diff_interval 20 --name 'a b'
[-m][loongforge.train][--config][run.toml][--resume][--steps=5][--vault.diff_interval][20][--name][a b]
? 7
$ ../bin/loongforge train --config run.toml --eval false --resume
[-m][loongforge.train][--config][run.toml][--eval][false][--resume]
? 7
$ rm ../bin/python3; touch ../bin/python3; env -i PATH=/nowhere ../bin/loongforge train --config run.toml > said 2>&1 || cut -c1-30 said
loongforge: there is no python

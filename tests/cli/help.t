$ loongforge
usage: loongforge [--verbose | --quiet] COMMAND [ARGUMENTS]

  pack      make a data set: drawn scenes (--scenes N) or a folder of files (--from DIR)
  data      look into a data set: ls, stat, verify, show
  train     train a model; --resume goes on where a run stopped
  vault     checkpoints: list, verify, merge
  mem       lifetime tables: plan, table
  sync      gradient reduction: the schedule of a layout, a benchmark
  config    every option with its default, range and meaning; --toml makes a file
  doctor    what this machine has, what is missing and what that means
  version   versions of the library and its interface
  help      this list

`loongforge COMMAND --help` lists a command's arguments.
? 2
$ loongforge help | head -n 1
usage: loongforge [--verbose | --quiet] COMMAND [ARGUMENTS]
$ loongforge --help | grep -c '^  '
10
$ loongforge version | sed 's/[0-9][0-9.]*/N/g'
loongforge N (ABI N)
$ loongforge --version | sed 's/[0-9][0-9.]*/N/g'
loongforge N (ABI N)
$ loongforge --quiet version > /dev/null
$ loongforge nonsense
loongforge: unknown command 'nonsense', expected one of those that `loongforge help` lists; hint: --help lists the arguments
? 2
$ loongforge --nonsense
loongforge: unknown argument '--nonsense'; hint: --help lists the arguments
? 2
$ loongforge version more
loongforge: argument 'more' is one too many, expected: loongforge version; hint: --help lists the arguments
? 2
$ loongforge help version
usage: loongforge version
$ loongforge version --no
loongforge: unknown argument '--no'; hint: --help lists the arguments
? 2
$ loongforge version -x
loongforge: unknown argument '-x'; hint: --help lists the arguments
? 2
$ loongforge version > /dev/full
loongforge: cannot write to standard output
? 1

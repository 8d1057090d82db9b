$ loongforge pack --scenes 30 --seed 7 a >/dev/null
$ loongforge data ls a --n 2 --first 3 | awk '{print $1, $2}'
number id
3 0000000003
4 0000000004
... 25
$ loongforge data stat a | sed -E 's/ +[0-9.]+ KiB.*/ SIZE/'
samples            30
images             30 SIZE
texts              30 SIZE
other               0  records of no known modality
source     scenes seed=7 first=0
tokenizer  bytes, 264 ids with markers: pad 256, bos 257, eos 258, image 259, human 260, gpt 261
$ loongforge data verify a
30 of 30 samples are good, 0 bad
$ loongforge data show a sheet.jpg --n 5 --image_size 32; head -c 3 sheet.jpg | od -An -tx1; grep -c '^row' sheet.txt; sed -n 2p sheet.txt | cut -d: -f1
sheet.jpg: 5 samples in 3 columns; texts in sheet.txt
 ff d8 ff
5
  human
$ loongforge data ls nowhere
loongforge: cannot open the set nowhere: No such file or directory (errno 2)
? 1
$ loongforge data ls a --first 30
loongforge: --first is 30, the set has 30 samples
? 1
$ loongforge data ls a --n 0
loongforge: --n is '0', expected a whole number from 1; hint: --help lists the arguments
? 2
$ loongforge data look a
loongforge: data 'look', expected ls, stat, verify or show; hint: --help lists the arguments
? 2
$ loongforge data show a
loongforge: 'show' needs a third argument: the picture's file; hint: --help lists the arguments
? 2
$ loongforge data ls a b
loongforge: 'ls' takes no third argument; hint: --help lists the arguments
? 2
$ loongforge data ls
loongforge: 1 argument given, expected: loongforge data (ls | stat | verify) SET, or data show SET OUT.jpg; hint: --help lists the arguments
? 2
$ loongforge data show a no/sheet.jpg
loongforge: cannot write no/sheet.jpg: No such file or directory
? 1
$ head -c 20000 a/data.mdb > short; loongforge data stat short 2>&1 | sed -E 's/of [0-9]+ pages of [0-9]+/of N pages of M/'
loongforge: short has 20000 bytes, but its header speaks of N pages of M; hint: copy it again
? 1
$ echo text > text; loongforge data stat text
loongforge: opening text: no LMDB file, expected a set made by `loongforge pack`
? 1
$ at=$(grep -obUaP '\xff\xd8\xff\xe0' a/data.mdb | head -n 1 | cut -d: -f1); printf 'BAD' | dd of=a/data.mdb bs=1 seek="$at" conv=notrunc status=none
$ loongforge data verify a | sed 's/^00[0-9]*:/ID:/'
ID: not a JPEG: starts with other bytes than FF D8
29 of 30 samples are good, 1 bad
? 1
$ loongforge data show a sheet.jpg --n 30 --image_size 8 | cut -d: -f1; grep -c 'bad image: not a JPEG' sheet.txt
sheet.jpg
1

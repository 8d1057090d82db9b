#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Collect the C libraries that the build uses (shared libraries, headers, licences), and the headers of CUTLASS, into
# dist/loongforge-deps-<arch>.tar.gz, for a machine of the same architecture and the same or a newer C library without a network.
# There: put the file into dist/ (or name it in LOONGFORGE_DEPS) and run `make build`.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
limit_mib=40
name=loongforge-deps-$(uname -m)
stage=build/bundle/$name
rm -rf "$stage" && mkdir -p "$stage/include" "$stage/lib" "$stage/licenses" dist

# header of packages/system.txt → library it belongs to
library_of() {
    case $1 in
    lmdb.h) echo lmdb ;;
    jpeglib.h) echo jpeg ;;
    turbojpeg.h) echo turbojpeg ;;
    zstd.h) echo zstd ;;
    xxhash.h) echo xxhash ;;
    jansson.h) echo jansson ;;
    liburing.h) echo uring ;;
    spng.h) echo spng ;;
    webp/decode.h) echo webp ;;
    *) die "scripts/bundle.sh: which library does $1 belong to? add it to library_of" ;;
    esac
}

# Headers that this one brings along from outside the C library and the compiler: all files of its dpkg package, or its closure.
copy_headers() {
    local header=$1 file root
    file=$(printf '#include <stddef.h>\n#include <stdio.h>\n#include <%s>\n' "$header" | cc -M -x c - | tr -s ' ' '\n' |
        sed -n "\\|/${header//./\\.}\$|{p;q}")
    [ -n "$file" ] || die "missing: $header - run scripts/setup.sh"
    if package=$(dpkg -S "$(readlink -f "$file")" 2>/dev/null | head -n 1 | cut -d: -f1) && [ -n "$package" ]; then
        dpkg -L "$package" | grep -E '^/usr/include/.*\.h$' | while read -r f; do
            root=${f#/usr/include/}
            root=${root#"$(cc -print-multiarch 2>/dev/null)"/}
            mkdir -p "$stage/include/$(dirname "$root")"
            cp -L "$f" "$stage/include/$root"
        done
        printf '%s %s\n' "$package" "$(dpkg-query -W -f '${Version}' "$package" | head -n 1)" >>"$stage/VERSIONS"
        [ ! -f "/usr/share/doc/$package/copyright" ] || cp "/usr/share/doc/$package/copyright" "$stage/licenses/$package"
    else
        cp -L "$file" "$stage/include/"
    fi
}

copy_library() {
    local link real soname
    link=$(cc -print-file-name="lib$1.so")
    [ -e "$link" ] || die "missing: lib$1.so - run scripts/setup.sh"
    real=$(readlink -f "$link")
    soname=$(readelf -d "$real" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
    cp "$real" "$stage/lib/$soname"
    ln -sfn "$soname" "$stage/lib/lib$1.so"
    # What it needs beyond the C library comes along.
    readelf -d "$real" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' |
        sed -E '/^(libc|libm|libpthread|libdl|librt|ld-linux.*|libgcc_s)\.so/d' |
        while read -r need; do
            [ -e "$stage/lib/$need" ] || cp "$(readlink -f "$(ldd "$real" | awk -v n="$need" '$1 == n { print $3 }')")" "$stage/lib/$need"
        done
}

while read -r _ probe _; do
    case $probe in
    header:*)
        copy_headers "${probe#header:}"
        copy_library "$(library_of "${probe#header:}")"
        ;;
    esac
done < <(grep -v '^#' packages/system.txt)

# Those headers of CUTLASS that the kernels can reach, whatever the preprocessor would skip.
copy_cutlass() {
    local include=$1
    "$PY" - "$include" "$stage/cutlass/include" src/loom/gemm <<'END'
import re, shutil, sys
from pathlib import Path

root, out, seen = Path(sys.argv[1]).resolve(), Path(sys.argv[2]), set()
left = [f for f in Path(sys.argv[3]).iterdir() if f.suffix in (".cu", ".cuh")]
seen.add(root / "cutlass/version.h")  # cmake/Cuda.cmake reads it
while left:
    file = left.pop()
    for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', file.read_text(errors="replace"), re.M):
        for path in (file.parent / name, root / name):
            path = path.resolve()
            if root in path.parents and path.is_file() and path not in seen:
                seen.add(path)
                left.append(path)
for path in seen:
    to = out / path.relative_to(root)
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)
END
    cp "${include%/include}/LICENSE.txt" "$stage/cutlass/"
    cp "${include%/include}/LICENSE.txt" "$stage/licenses/cutlass"
    sed -n 's/^VERSION=/cutlass /p' scripts/cutlass.sh >>"$stage/VERSIONS"
}
if include=$(scripts/cutlass.sh); then copy_cutlass "$include"; else warn "CUTLASS is not in the bundle: no experts' products there"; fi

sort -u -o "$stage/VERSIONS" "$stage/VERSIONS"
printf 'glibc %s or newer\n' "$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)" >>"$stage/VERSIONS"

tar -C build/bundle --owner=0 --group=0 --sort=name --mtime='2020-01-01' -czf "dist/$name.tar.gz" "$name"
size_kib=$(du -k "dist/$name.tar.gz" | cut -f1)
[ "$size_kib" -le $((limit_mib * 1024)) ] || die "dist/$name.tar.gz is $size_kib KiB, expected at most $limit_mib MiB"
say "dist/$name.tar.gz ($size_kib KiB): put it into dist/ on the other machine and run 'make build' there"

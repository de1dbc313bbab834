#!/usr/bin/env bash
# Unpack Debian's OpenBLAS into a folder, without root, and print the lines that preload it:
#
#     eval "$(tests/openblas.sh DIR)"
#
# MLX's Linux wheel links the reference BLAS. Preloaded, OpenBLAS answers its `cblas_sgemm` and rounds differently with
# the number of rows, as GPUs do. Needs apt-get and dpkg (Debian, Ubuntu). What is unpacked already is used as it is.
set -euo pipefail

fail() {
    echo "openblas.sh: $*" >&2
    echo false # so that the caller's eval fails too
    exit 1
}

[ $# -eq 1 ] && [ -n "$1" ] || fail "usage: eval \"\$(tests/openblas.sh DIR)\""
dir=$(mkdir -p -- "$1" 2>/dev/null && cd -- "$1" && pwd) || fail "can't make the folder $1"
case $dir in *[[:space:]:\']*) fail "LD_PRELOAD can't hold spaces, colons or quotes: $dir" ;; esac

library() { find "$dir/usr/lib" -path '*/openblas-pthread/libopenblas.so.0' 2>/dev/null | grep . || return 1; }

unpack() { # into $dir/usr, whole or not at all
    type -P apt-get >/dev/null && type -P dpkg >/dev/null || fail "needs apt-get and dpkg, which are missing here"
    local packages=(libopenblas0-pthread libgfortran5)
    [ "$(dpkg --print-architecture)" != amd64 ] || packages+=(libquadmath0) # libgfortran needs it there
    local work apt
    work=$(mktemp -d "$dir/.unpack-XXXXXX")
    # shellcheck disable=SC2064
    trap "rm -rf '$work'" EXIT
    mkdir -p "$work"/{debs,root,state/lists/partial,cache/archives/partial}
    cd "$work/debs"
    echo "downloading ${packages[*]}" >&2
    apt=(apt-get -qq -o APT::Sandbox::User="$(id -un)")
    if ! "${apt[@]}" download "${packages[@]}" >"$work/log" 2>&1; then # no package lists, or old ones
        apt+=(-o Dir::State="$work/state" -o Dir::State::Lists="$work/state/lists" -o Dir::Cache="$work/cache")
        "${apt[@]}" update >>"$work/log" 2>&1 || true # one broken source of several need not matter
        "${apt[@]}" download "${packages[@]}" >>"$work/log" 2>&1 ||
            fail "apt-get can't download ${packages[*]}: $(grep '^E:' "$work/log" | tail -1)"
    fi
    for deb in *.deb; do
        dpkg -x "$deb" "$work/root" >&2 || fail "dpkg can't unpack $deb"
    done
    rm -rf "$dir/usr"
    mv "$work/root/usr" "$dir/usr"
}

library >/dev/null || unpack
lib=$(library) || fail "the packages hold no libopenblas.so.0"
path=$(dirname "$(dirname "$lib")")

# The dynamic linker only grumbles about what it can't preload, and then every run would be on the reference BLAS.
grumble=$(LD_PRELOAD=$lib LD_LIBRARY_PATH=$path OPENBLAS_NUM_THREADS=1 "$(type -P true)" 2>&1) || true
[ -z "$grumble" ] || fail "OpenBLAS in $dir can't be preloaded, delete the folder and try again: ${grumble%%$'\n'*}"

echo "export LD_PRELOAD='$lib'\"\${LD_PRELOAD:+:\$LD_PRELOAD}\""
echo "export LD_LIBRARY_PATH='$path'\"\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}\" OPENBLAS_NUM_THREADS=1"

# Sourced by demo.sh and test.sh: changes to the repository and sets $python, a Python with foredraft[$extras].
#
#   .venv in the repository is made once; a second run finds it ready and needs no network. By uv where it is on the PATH,
#   else by pip.
#   FOREDRAFT_ENV=active  uses the environment that is active instead, and leaves the versions it has where they fit.
#   PYTHON=/path/python   names the Python to use (3.11 to 3.13).
#   FOREDRAFT_VERSIONS=oldest  makes .venv-oldest in place of .venv, with the lower bounds of pyproject.toml as versions. torch
#                         alone is as in constraints.txt: an index seldom has the CPU build of an old one, and the CUDA
#                         build is gigabytes.
#   FOREDRAFT_VERSIONS=transformers==5.19.0  makes .venv-transformers==5.19.0, with that version, the tokenizers and
#                         huggingface_hub that fit it, and all else as in constraints.txt.
#
# On Linux `pip install torch` brings the CUDA build, gigabytes of it. Without a GPU, name an index that has the CPU
# build before the first run, by PIP_INDEX_URL or PIP_EXTRA_INDEX_URL (uv: UV_DEFAULT_INDEX or UV_INDEX, or
# UV_TORCH_BACKEND=cpu); the pin in constraints.txt takes both.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

say() { echo "== $*"; }
fail() { echo "error: $*" >&2; exit 1; }

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

# Prints the Python to use: $PYTHON where it is set, else the first of the candidates that is 3.11 to 3.13.
find_python() {
    local candidate
    for candidate in "${PYTHON:-$@}"; do
        if is_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 found as ${PYTHON:-$*}; install one, or name it: PYTHON=/path/to/python"
}

if [ "${FOREDRAFT_ENV:-}" = active ]; then
    python=$(find_python python python3)
    constraints=()
    say "using the active environment, $("$python" -c 'import sys; print(sys.prefix)')"
else
    [ -z "${FOREDRAFT_ENV:-}" ] || fail "FOREDRAFT_ENV=$FOREDRAFT_ENV is not known; it is unset (make .venv) or active"
    case ${FOREDRAFT_VERSIONS:-} in
        "") venv=.venv versions=constraints.txt ;;
        oldest) venv=.venv-oldest versions=.venv-oldest/oldest.txt ;;
        transformers==*) venv=.venv-$FOREDRAFT_VERSIONS versions=$venv/versions.txt ;;
        *) fail "FOREDRAFT_VERSIONS=$FOREDRAFT_VERSIONS is not known; it is unset (as constraints.txt has them), oldest or transformers==VERSION" ;;
    esac
    python=$root/$venv/bin/python
    constraints=(-c "$versions")
    if ! is_supported "$python"; then
        base=$(find_python python3.11 python3.12 python3.13 python3 python)
        say "making the environment $venv with $base"
        if command -v uv >/dev/null; then
            uv venv -q --clear --seed --python "$base" $venv
        else
            "$base" -m venv --clear $venv || fail "$base cannot make environments (Debian, Ubuntu: apt install python3-venv)"
        fi
    fi
fi

# Prints the lower bounds of pyproject.toml as versions, and torch as constraints.txt has it.
oldest() {
    "$python" - <<'END'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
bounds = dict(match.groups() for one in wanted if (match := re.match(r"([\w-]+)>=([\d.]+)", one)))
bounds["torch"] = re.search(r"^torch==(.*)$", open("constraints.txt").read(), re.M)[1]
print(*(f"{name}=={version}" for name, version in bounds.items()), sep="\n")
END
}
case ${venv:-} in
    .venv-oldest) oldest >"$versions" ;;
    .venv-transformers==*) { grep -vE "^(transformers|tokenizers|huggingface_hub)==" constraints.txt; echo "$FOREDRAFT_VERSIONS"; } >"$versions" ;;
esac

install() {
    if command -v uv >/dev/null; then
        uv pip install -q --python "$python" --index-strategy unsafe-best-match "$@" # the best of all indexes, as pip does
    else
        "$python" -m pip install -q --disable-pip-version-check "$@"
    fi
}

# A stamp for each extra says for which repository and which requirements it was installed.
stamp=$("$python" -c 'import sys; print(sys.prefix)')/foredraft.stamp
wanted=$({ echo "$root"; cat pyproject.toml constraints.txt; } | cksum)
missing=
for extra in ${extras//,/ }; do
    [ "$(cat "$stamp.$extra" 2>/dev/null)" = "$wanted" ] || missing=1
done
if [ -z "$missing" ]; then
    say "the environment is ready"
else
    if [ ${#constraints[@]} -gt 0 ]; then
        say "installing torch, the large one"
        install "${constraints[@]}" torch
    fi
    say "installing foredraft[$extras] and what it needs"
    install ${constraints[@]+"${constraints[@]}"} -e ".[$extras]"
    for extra in ${extras//,/ }; do
        echo "$wanted" >"$stamp.$extra"
    done
fi

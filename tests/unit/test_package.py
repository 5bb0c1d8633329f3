"""The package as a whole: what importing it costs, what it hands out, how its files are kept."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import shoal
from shoal import read_homes
from shoal.authoring.vendoring import find_carried
from shoal.errors import SetupError, ShoalError, needs
from shoal.kit.component.triton import CALLING
from tests.support.counting import write_counting
from tests.support.house import FACES, FLOORS, PACKAGE, find_arrows, find_imports, find_place, tracked
from tests.support.once import ROOT
from tests.support.pieces import PIECES

HEAVY = {
    "conda_pack",
    "elftools",
    "jinja2",
    "matplotlib",
    "openpyxl",
    "pooch",
    "pyarrow",
    "pygraphviz",
    "rattler",
    "yaml",
    "torch",
    "transformers",
    "tritonclient",
    "cupy",
    "sklearn",
    "treelite",
    "tokenizers",
    "numpy",
    "typer",
}
pytestmark = pytest.mark.usefixtures("may_start_processes")  # git lists the files


def test_importing_shoal_imports_nothing_heavy() -> None:
    code = "import shoal, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert HEAVY.isdisjoint(modules)


def test_a_client_imports_nothing_that_reads_repositories_or_runs_models() -> None:
    code = "import shoal, shoal.clients.llm, sys; shoal.Client, shoal.AsyncClient, shoal.Llm; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    loaded = {name for name in modules if name.startswith("shoal.")}
    rooms = {".".join(name.split(".")[1:3]) for name in loaded if name.count(".") > 1}
    assert rooms == {
        "authoring.repository",
        "clients.client",
        "clients.keys",
        "clients.llm",
        "kit.component",
        "kit.generation",
    }
    assert {name for name in loaded if name.startswith("shoal.authoring.repository.")} == {
        "shoal.authoring.repository.default_model"
    }
    assert {name for name in loaded if name.startswith("shoal.kit.generation.")} == {"shoal.kit.generation.pieces"}


NOT_OF_THE_SERVICE = ("authoring.check.", "authoring.composition.", "authoring.project.", "kit.forests.", "lab.")
SERVE = """
import sys
from pathlib import Path
import shoal.cli
from shoal.cli.serving import _check, _print_pipelines
from shoal.serving.gateway.options import Addresses, Options
_check(Path(sys.argv[1]))
import shoal.serving.gateway.run
_print_pipelines(Path(sys.argv[1]), Options(), Addresses(*["127.0.0.1:8001"] * 3))
print(*(name for name in sys.modules if name.split(".")[0] == "shoal"))
"""  # what `shoal serve` does, without a server


def test_the_service_loads_nothing_that_makes_or_checks_repositories(tmp_path: Path) -> None:
    """At most ``most`` of shoal's lines are loaded: each one is memory, and time at the start."""
    most = 18_600
    program = [sys.executable, "-c", SERVE, str(write_counting(tmp_path))]
    said = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    modules = said.splitlines()[-1].split()
    assert not [name for name in modules if f"{name.removeprefix('shoal.')}.".startswith(NOT_OF_THE_SERVICE)]
    paths = [PACKAGE.joinpath(*name.split(".")[1:]) for name in modules]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= most


def test_public_names() -> None:
    """The head of the package has the list."""
    assert set(shoal.__all__) == set(dir(shoal))
    for name, near in (("nope", ""), ("client", r"\. Did you mean Client\?"), ("compse", r"\. Did you mean compose\?")):
        with pytest.raises(AttributeError, match=f"module 'shoal' has no attribute '{name}'{near}$"):
            getattr(shoal, name)


@pytest.mark.parametrize("path", FACES, ids=lambda path: path.parent.name)
def test_faces_hand_out_what_type_checkers_see(path: Path) -> None:
    """A module of the same name would hide what a face hands out, once it is imported."""
    face = import_module(".".join(path.parent.relative_to(PACKAGE.parent).parts))
    imports = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.ImportFrom)]
    typed = {alias.name for node in imports for alias in node.names if alias.asname}
    assert typed == set(face.__all__)
    assert all(hasattr(face, name) for name in typed)
    assert not any((path.parent / f"{name}.py").exists() or (path.parent / name).is_dir() for name in typed)


def test_model_folders_import_faces_alone() -> None:
    folders = (
        "preprocess/**/model.py",
        "postprocess/**/model.py",
        "src/shoal/authoring/project/scaffold/templates/*.py.txt",
    )
    for path in tracked(*folders):
        used = set(re.findall(r"^from (shoal[\w.]*) import", path.read_text(encoding="utf-8"), re.MULTILINE))
        assert used <= {"shoal", "shoal.readability"}, path


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    """The first line says what a thing is or does, by a noun or a verb; a bare clause makes readers search for both."""
    for path in tracked("src/shoal/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                assert not re.match(r"(What|Which|How|Of|Whose|That)\b", first), (path, first)


def test_errors_say_what_and_how() -> None:
    assert str(ShoalError("It rains.", "Take a coat.")) == "It rains. Take a coat."
    assert str(ShoalError("It rains.")) == "It rains."


def test_a_missing_library_is_the_command_that_brings_it() -> None:
    with (
        pytest.raises(SetupError, match=r"^torch is not installed\. Type: pip install 'shoal\[train\]'$"),
        needs("train"),
    ):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


def test_files_stay_short() -> None:
    """A habit with reasons: one file, one thing; a model.py is its own documentation."""
    for path in tracked("*.py"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        limit = 60 if path.parent.name == "1" else 500
        assert lines <= limit, f"{path} has {lines} lines"


def test_no_test_imports_another() -> None:
    """Helpers of two tests are in ``tests/support``; the test of the option table reads the tables where they are."""
    for path in tracked("tests/**/*.py"):
        used = find_imports(ast.parse(path.read_text(encoding="utf-8")))
        tests = [name for name in used if re.match(r"tests\.(\w+\.)*test_", name)]
        assert not tests or path.name == "test_option_table.py", (path, tests)


def test_only_tensors_knows_tritons_module() -> None:
    for path in tracked("src/shoal/**/*.py", "preprocess/**/*.py", "postprocess/**/*.py"):
        if path.name == "tensors.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert "triton_python_backend_utils" not in names, path


# Calls that read a device array's values, in NumPy, CuPy or torch. `get` is theirs without arguments.
READS = {"asnumpy", "cpu", "get", "item", "numpy", "to_numpy", "to_pylist", "tobytes", "tolist"}
SHIPPED = (
    "bert-large", "completion", "cuml", "ensemble", "ensemble_all", "llamav2", "llm", "llm-hf", "llm-onnx",
    "llm-openvino", "llm-vllm", "llm_bls", "postprocess", "postprocessing", "preprocess", "preprocessing", "prompt",
    "tensorrt_llm", "tensorrt_llm_bls", "trtllm-llmapi", "vllm",
)  # fmt: skip
# Where they are meant: files that know the host alone, and arrays that are there whatever the device.
HOST_FILES = {"treelite.py", "fusing.py", "tensors.py", "answers.py", "contract.py", "prompts.py", "trtllm.py"}
HOST_ONLY = {
    ("answer_socket.py", "_encode", "tobytes"), ("answer_socket.py", "_encode", "tolist"),  # arrays for a socket
    # offsets of texts before they are sent up, and the columns of a lexicon for the host
    ("device.py", "upload", "tobytes"), ("words.py", "__init__", "tolist"),
    ("base.py", "_encode", "tolist"),  # texts, which are on the host
}  # fmt: skip


def test_nothing_in_the_serving_path_reads_a_device_array() -> None:
    """But ``Device.fetch``, which writes it down."""
    found = set()
    leaves = [*tracked("preprocess/**/model.py", "postprocess/**/model.py", "src/shoal/kit/backends/**/model.py")]
    for path in {
        path.resolve() for path in [*find_carried(leaves, CALLING), PACKAGE / "clients" / "local.py", *leaves]
    }:
        if path.suffix == ".py" and path.name not in HOST_FILES:
            found |= {(path.name, *read) for read in reads(ast.parse(path.read_text(encoding="utf-8")))}
    assert found == HOST_ONLY


def reads(tree: ast.AST) -> set[tuple[str, str]]:
    """The function and the method of each such call; and of Python's numbers made of what array code gave."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calls = [(f.name, call) for f in functions for call in ast.walk(f) if isinstance(call, ast.Call)]
    methods = {(name, call.func.attr) for name, call in calls if isinstance(call.func, ast.Attribute) and _reads(call)}
    casts = {(n, call.func.id) for n, call in calls if isinstance(call.func, ast.Name) and _casts(call)}
    return methods | casts


def _reads(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr == "to":
        return any(isinstance(a, ast.Constant) and str(a.value) == "cpu" for a in call.args)
    return call.func.attr in READS and (call.func.attr != "get" or not call.args)


def _casts(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Name)
    names = {node.id for a in call.args for node in ast.walk(a) if isinstance(node, ast.Name)}
    return call.func.id in ("bool", "float", "int") and "xp" in names


def test_such_reads_are_seen() -> None:
    code = "def run(x):\n    y = x.get('a')\n    return x.cpu(), x.get(), cp.asnumpy(x), x.to('cpu'), int(xp.max(x))"
    found = {name for _, name in reads(ast.parse(code))}
    assert found == {"cpu", "get", "asnumpy", "to", "int"}


def test_floors_import_only_lower_ones() -> None:
    for module, used in sorted(find_arrows()):
        assert find_place(used) <= find_place(module), f"{module} imports {used}"


# The gateway's modules and rooms, in order: a module imports from its own room and from those before it.
GATEWAY = (
    "logs",
    "refusals",
    "addresses",
    "options",
    "callers",
    "core",
    "http",
    "v2",
    "v1",
    "control",
    "fronts",
    "run",
)


def test_the_gateways_rooms_import_only_lower_ones() -> None:
    """And the codecs of one protocol know nothing of another's; core knows no protocol and no web framework."""
    root = "shoal.serving.gateway."
    for path in tracked("src/shoal/serving/gateway/**/*.py"):
        room, text = path.relative_to(PACKAGE / "serving" / "gateway").parts[0].removesuffix(".py"), path.read_text()
        for used in find_imports(ast.parse(text)) if room != "__init__" else ():
            below = used.removeprefix(root).split(".")[0] if used.startswith(root) else room
            assert GATEWAY.index(below) <= GATEWAY.index(room), f"{path} imports {used}"
            assert {room, below} != {"v1", "v2"}, f"{path} imports {used}"
        if room in ("callers", "core"):
            assert "grpc.aio.server" not in text
            assert "RpcHandler" not in text
    code = "import sys, shoal.serving.gateway.core.gate; assert not {'aiohttp', 'yarl', 'starlette'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_holds_its_floors_alone() -> None:
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in tracked("src/shoal/**")}
    assert found == {*FLOORS, "__init__", "__main__", "py.typed"}


def test_no_two_modules_need_each_other() -> None:
    """Not within functions, and not for types either."""
    source = ROOT / "src"
    paths = {".".join(p.relative_to(source).with_suffix("").parts): p for p in tracked("src/shoal/**/*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    faces = {name: {} if path not in FACES else read_homes(str(path)) for name, path in modules.items()}
    homes = {f"{face}.{name}": home for face, names in faces.items() for name, home in names.items()}
    needs = {
        name: {homes.get(used, used) for used in find_imports(ast.parse(path.read_text("utf-8")), path in FACES)}
        for name, path in modules.items()
    }
    TopologicalSorter({name: (used & set(modules)) - {name} for name, used in needs.items()}).prepare()


def test_nothing_imports_the_first_application() -> None:
    """But its own model folders; others find it by entry points."""
    for path in tracked("src/shoal/**/*.py", "preprocess/**/*.py", "postprocess/**/*.py", "models/**/*.py"):
        place = path.relative_to(ROOT)
        if place.parts[2] != "readability" and place.parts[:2] not in (
            ("preprocess", "readability"), ("postprocess", "readability"), ("models", "bert-large"), ("models", "cuml"),
        ):  # fmt: skip
            assert "shoal.readability" not in path.read_text(encoding="utf-8"), place


def test_the_library_knows_no_pipeline_by_name() -> None:
    """But in the model folders of the first one, and in its package; cuml is a package of RAPIDS too."""
    for path in tracked("src/shoal/**"):
        place = path.relative_to(ROOT / "src" / "shoal")
        if place.parts[0] != "readability" and path.suffix in (".py", ".txt", ".tmpl"):
            text = path.read_text(encoding="utf-8").replace("cudf cugraph cuml cuvs", "")
            found = re.findall(r"ensemble_all|bert-large(?!-uncased)|\bcuml\b|excerpt", text)
            assert not found, (place, found)


def test_the_wheel_carries_the_model_folders(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the build backend is not installed here")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "shoal/py.typed",
        "shoal/model_folders/ensembles/ensemble_all/1/.gitkeep",
        "shoal/model_folders/env/environment-gpu.yml",
        "shoal/model_folders/env/requirements-embedded.txt",
        "shoal/model_folders/preprocess/readability/1/model.py",
        "shoal/kit/text/exact_codepoints.json",
        "shoal/readability/assets/passages.jsonl",
        "shoal/kit/backends/pytorch/model.py",
    } <= names
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import shoal; from shoal.authoring.repository.find_graph import find_model_folders, shipped_root;"
        "print(shipped_root(), *sorted(find_model_folders()))"
    )
    listing = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "site", capture_output=True, text=True, check=True
    )
    root, *models = listing.stdout.split()
    assert Path(root) == tmp_path / "site" / "shoal" / "model_folders"
    assert models == sorted([*SHIPPED, *PIECES])

"""Templates filled by ``shoal fill``: as by TensorRT-LLM's ``fill_template.py`` where that is right, else refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from string import Template

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shoal.authoring.composition.fill import fill_template, parse_substitutions, write_filled
from shoal.cli import app
from shoal.errors import ArtifactError, ShoalError

TEMPLATE = """# ${in_a_comment} and ${rows}
name: "preprocessing"
backend: "python"
max_batch_size: ${rows}
dynamic_batching {
  preferred_batch_size: [ ${rows} ]
  max_queue_delay_microseconds: ${max_queue_delay_microseconds}
  default_queue_policy: { max_queue_size: ${max_queue_size} }
}
model_transaction_policy { decoupled: ${decoupled} }
input [ { name: "QUERY" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "INPUT_ID" data_type: ${dtype} dims: [ -1 ] } ]
parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }
parameters { key: "tokenizer_dir" value { string_value: "${tokenizer_dir}" } }
parameters { key: "max_num_images" value { string_value: "${images}" } }
"""
GOOD = "rows:8,decoupled:true,dtype:TYPE_INT32,tokenizer_dir:/data/a:b,images:"
YAML = (
    'model: ${model}  # ${not_here}\ntriton_config:\n  max_batch_size: ${rows}\n  decoupled: ${decoupled}\nx: "${x}"\n'
)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "preprocessing" / "config.pbtxt"
    path.parent.mkdir()
    path.write_text(TEMPLATE, encoding="utf-8")
    return path


def run(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["fill", *map(str, arguments)])
    return done.exit_code, done.stdout, str(done.exception) if isinstance(done.exception, ShoalError) else ""


def test_a_template_is_filled(template: Path) -> None:
    expected = (
        TEMPLATE.replace("e: ${rows}", "e: 8").replace("[ ${rows} ]", "[ 8 ]").replace("${decoupled}", "true")
        .replace("${dtype}", "TYPE_INT32").replace("${tokenizer_dir}", "/data/a:b").replace("${images}", "")
        .replace("${max_queue_delay_microseconds}", "0").replace("${max_queue_size}", "0")
    )  # fmt: skip
    assert run(template, GOOD) == (0, f"{expected}\n", "")
    assert template.read_text(encoding="utf-8") == TEMPLATE
    code, printed, _ = run("-i", template, GOOD, "--dry-run")
    assert code == 0
    assert "-max_batch_size: ${rows}\n+max_batch_size: 8\n" in printed
    assert template.read_text(encoding="utf-8") == TEMPLATE
    template.chmod(0o640)
    link = template.with_name("link.pbtxt")
    link.symlink_to(template)
    assert run(link, "--in_place", GOOD) == (0, "", "")
    assert template.read_text(encoding="utf-8") == expected
    assert (link.is_symlink(), template.stat().st_mode & 0o777) == (True, 0o640)
    assert sorted(path.name for path in template.parent.iterdir()) == ["config.pbtxt", "link.pbtxt"]
    assert (
        "config.pbtxt has no placeholder ${rows} outside of comments. It has no placeholder at all"
        in run(template, "rows:8")[2]
    )


def test_placeholders_in_quotes_may_be_kept(template: Path) -> None:
    assert run(template, GOOD.removesuffix(",images:"))[2] == (
        f"{template}:15: ${{images}} gets no value. Add --keep-unset, or an empty value (images:): NVIDIA's models then"
        " have their defaults."
    )
    code, printed, _ = run(template, GOOD.removesuffix(",images:"), "--keep-unset")
    assert (code, '"${images}"' in printed, "$$TRITON" in printed) == (0, True, True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("rows:8,decoupled:true", r":12: \$\{dtype\} gets no value, nor do \$\{tokenizer_dir\} \(line 14\), "),
        ("rows:8,decoupled:true", r"fill_template\.py leaves dtype outside of quotes, which Triton cannot read\. A"),
        ("rows:8", r"Add decoupled:VALUE,dtype:VALUE; for those in quotes, --keep-unset, or an empty value \(tok"),
        (f"{GOOD},batch:9", r"config.pbtxt has no placeholder \$\{batch\} outside of comments\. Known: rows, max_"),
        (f"{GOOD},rowz:9", r"no placeholder \$\{rowz\} outside of comments\. Did you mean rows\?"),
        (f"{GOOD},in_a_comment:9", r"no placeholder \$\{in_a_comment\} outside of comments\."),
        (f"{GOOD},tokenizer_type:auto", r"\$\{tokenizer_type\} outside of comments\. TensorRT-LLM removed it, and fi"),
        (GOOD.replace("/data/a:b", "hf://a/b"), r":14: tokenizer_dir of preprocessing is hf://a/b; the model opens a"),
        (f"{GOOD},", r"There is an empty item in '.*,images:,': a comma ends the list, or follows another\."),
        (GOOD.replace(",d", ", d", 1), r"A space stands beside the key ' decoupled'\. Write decoupled: without the sp"),
        (GOOD.replace(":8", ": 8"), r"rows is given as ' 8', with a space at its edge, or a control character\."),
        (GOOD.replace(":8", ":sixty"), r":4: .*Couldn't parse integer: sixty.* rows is given as 'sixty'\."),
        (GOOD.replace(":8", ":8 64"), r":4: rows is given as '8 64': no word or number, outside of quotes\."),
        (GOOD.replace(":8", ":-8"), r":4: 'max_batch_size' must be non-negative value for preprocessing"),
        (GOOD.replace("true", "maybe"), r":10: .*decoupled is given as 'maybe'\."),
        (GOOD.replace("INT32", "INT33"), r":12: .*no value named TYPE_INT33.* dtype is given as .* Write TYPE_INT32\."),
        (GOOD.replace("images:", "images:two"), r":15: max_num_images of preprocessing is 'two', not a whole number"),
        (GOOD.replace("/data/a:b", '/a" x: "'), r":14: tokenizer_dir is given as '/a\" x: \"': a quote or a backslash"),
        (GOOD.replace("/data/a:b", "${HOME}"), r"tokenizer_dir is given as '\$\{HOME\}', with a placeholder in it\."),
        (f"{GOOD},rows:9", r"rows is given twice: '8' and '9'\. Give it once\."),
        ("8", r"'8' is not KEY:VALUE\. For example: triton_max_batch_size:8\."),
        (r"rows:\d", r"A backslash in 'rows:\\d' escapes no comma, colon or backslash\. Write \\, for a comma"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_and_nothing_is_written(values: str, message: str, template: Path) -> None:
    code, printed, error = run("-i", template, values)
    assert (code, printed, bool(re.search(message, error))) == (1, "", True), error
    assert template.read_text(encoding="utf-8") == TEMPLATE
    assert list(template.parent.iterdir()) == [template]


def test_an_output_that_the_template_lists_twice(template: Path) -> None:
    text = TEMPLATE + 'output [ { name: "INPUT_ID" data_type: TYPE_INT32 dims: [ -1 ] } ]\n'
    template.write_text(text, encoding="utf-8")
    assert ":16: preprocessing declares the output INPUT_ID twice: here and in line 12." in run("-i", template, GOOD)[2]


def test_yaml(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(YAML, encoding="utf-8")
    values = "model:meta/llama,rows:0,decoupled:true,x:a\\, b"
    filled = YAML.replace("${model}", "meta/llama").replace("${rows}", "0").replace("${decoupled}", "true")
    assert fill_template(path, values)[1] == filled.replace("${x}", "a, b")
    for wrong, message in {
        "rows:0": r":1: \$\{model\} gets no value, nor do \$\{decoupled\} \(line 4\), \$\{x\} \(line 5\)",
        f"{values},not_here:1": r"no placeholder \$\{not_here\}",
        values.replace("rows:0", "rows:none"): r":3: max_batch_size is 'none', not a whole number\. rows is given as",
        values.replace("true", "yess"): r":4: decoupled is 'yess', not true or false: any text counts as true\.",
        values.replace("meta", "hf://meta"): r":1: model is hf://meta/llama, and must be a folder, or OWNER/NAME",
        values.replace("meta/llama", "a: b"): r":1: model is given as 'a: b': no word or number, outside of quotes\.",
    }.items():
        with pytest.raises(ShoalError, match=message):
            fill_template(path, wrong)
    path.write_text("a: [${rows}\n", encoding="utf-8")
    with pytest.raises(ShoalError, match=r"model\.yaml:\d: It is not YAML: "):
        fill_template(path, "rows:0")


def test_escapes_mean_what_they_mean_to_fill_template() -> None:
    """There, a comma is ``\\,``, and what is left is unescaped again."""
    assert parse_substitutions(r"a:0\,1,b:x\\\:y,c:\\\\") == {"a": "0,1", "b": "x:y", "c": "\\"}
    assert parse_substitutions(r"a:hf://x,b:x\:y") == {"a": "hf://x", "b": "x:y"}


def test_files_that_cannot_be_read_or_written(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match=r"none\.pbtxt cannot be read: No such file or directory\."):
        fill_template(template.with_name("none.pbtxt"), GOOD)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ArtifactError, match=r"config\.pbtxt cannot be written: No space left on device\."):
        write_filled(template, "x")
    assert template.read_text(encoding="utf-8") == TEMPLATE
    assert list(template.parent.iterdir()) == [template]


KINDS = {  # key: good values, and lines in which they are good
    "rows": (("8", "0", "64"), ("max_batch_size: {}", "dynamic_batching {{ max_queue_delay_microseconds: {} }}")),
    "dir": (("/data/a", "a:b,c", "", "it's"), ('default_model_filename: "{}"', '# "{}"')),
    "word": (("python", "vllm"), ('backend: "{}"', "parameters {{ key: '{}' value {{ string_value: \"x$$Y\" }} }}")),
    "kind": (("KIND_CPU", "KIND_GPU"), ("instance_group [ {{ kind: {} }} ]",)),
}
BAD = st.one_of(
    st.sampled_from([" 1", "${dir}", 'a"b', "sixty", "# 8", "8}", "a\nb", "\\", "hf://x"]), st.text(max_size=6)
)
ODD = st.sampled_from(["{}", "${{}}", "${rows", "${un}", "$rows", "$${dir}", "$$X", "7", "max_batch_size: ${dir}"])


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, str]]:
    """A template and values, most of which fit."""
    keys = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4, unique=True))
    lines = [draw(st.sampled_from(KINDS[key][1])).format(f"${{{key}}}") for key in keys]
    values = {key: draw(st.sampled_from(KINDS[key][0])) for key in keys}
    match draw(st.sampled_from(["good", "good", "bad", "odd", "left", "more"])):
        case "bad":
            values[keys[0]] = draw(BAD)
        case "odd":
            lines.append(draw(ODD))
        case "left":
            del values[keys[0]]
        case "more":
            values[draw(st.sampled_from(["row", "batch", *KINDS]))] = "8"
    return "\n".join(draw(st.permutations(lines))), values


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_random_templates_are_filled_whole_or_left_alone(tmp_path: Path, case: tuple[str, dict[str, str]]) -> None:
    text, values = case
    path = tmp_path / "config.pbtxt"
    path.write_text(text, encoding="utf-8")
    escaped = {key: value.replace("\\", 4 * "\\").replace(",", "\\,") for key, value in values.items()}
    pairs = ",".join(f"{key}:{value}" for key, value in escaped.items())
    try:
        write_filled(path, fill_template(path, pairs)[1])
    except ShoalError:
        assert path.read_text(encoding="utf-8") == text
    else:
        filled = path.read_text(encoding="utf-8")
        for before, after in zip(text.splitlines(), filled.splitlines(), strict=True):
            if before.startswith("#"):
                assert after == before
            else:
                assert "${" not in after
                assert after == Template(before.replace("$$", "$$$$")).safe_substitute(values)
    assert list(tmp_path.iterdir()) == [path]

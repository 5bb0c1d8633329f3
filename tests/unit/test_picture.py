"""Pictures of ensembles: their words, and where everything stands."""

from __future__ import annotations

import os
import re
import struct
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.authoring.draw.boxes import LEGEND
from shoal.authoring.draw.mermaid import draw, escape
from shoal.authoring.draw.picture import png, svg
from shoal.authoring.repository.graph import Graph
from tests.support.graphs import Member, make_graph, ten_steps
from tests.support.planted import write
from tests.support.streams import FILES

HOSTILE = ['a"b', "x|y", "[x]", "{x}", "<b>&amp;</b>", "#quot;", "a;b", "`x`", "1. x", "--> y", "%%", "é漢字", "a\nb\0"]
SVG = "{http://www.w3.org/2000/svg}"
MERMAID = """\
flowchart TB
  request([request])
  s0["encode<br/>python · GPU 0"]
  s1["crop [x]<br/>python · CPU"]
  s2["decide<br/>python · auto"]
  s3["last<br/>python · GPU 0"]
  answer([answer])
  request -->|"ids<br/>INT64 [-1]<br/>mask<br/>FP32 [16]"| s0
  s0 -->|"host round trip<br/>a<br/>FP32 [16]"| s1
  s1 -->|"b<br/>FP32 [16]"| s2
  s0 -->|"a<br/>FP32 [16]"| s3
  s2 -->|"y<br/>FP32 [16]"| s3
  s3 -->|"z<br/>FP32 [16]"| answer
  classDef gpu fill:#dafbe1,stroke:#1a7f37,color:#1f2328
  class s0,s3 gpu
  classDef cpu fill:#ddf4ff,stroke:#0969da,color:#1f2328
  class s1 cpu
  classDef open fill:#f6f8fa,stroke:#59636e,color:#1f2328
  class s2 open
  linkStyle 1 stroke:#cf222e,stroke-width:3px,color:#cf222e
"""


@st.composite
def ensembles(draw: st.DrawFn) -> list[Member]:
    """1 to 12 steps, each of which reads what comes before it; the last one's tensor is the answer."""
    names = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40))
    known = ["in"]
    members = []
    for index in range(draw(st.integers(1, 12))):
        reads = draw(st.lists(st.sampled_from(known), min_size=1, max_size=4, unique=True))
        writes = [f"{index}.{number}{draw(names)}" for number in range(draw(st.integers(1, 2)))]
        members.append(Member(f"model {index}", reads, writes, draw(st.sampled_from(["cpu", "gpu 0", "gpu 1", ""]))))
        known += writes
    return members


def draw_graph(members: list[Member]) -> Graph:
    with TemporaryDirectory() as folder:
        return make_graph(Path(folder), members, ["in"], members[-1].writes)


class Rect(NamedTuple):
    x: float
    y: float
    right: float
    bottom: float


Curve = list[tuple[float, float]]  # points of cubic Bezier curves: a start, then three for each


class Drawn(NamedTuple):
    """Boxes, labels of arrows, and each arrow's two lines before its label, in the order of an SVG."""

    page: Rect
    boxes: list[Rect]
    labels: list[Rect]
    lines: list[list[Curve]]


def read_points(text: str) -> list[tuple[float, float]]:
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", text)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def bound(points: list[tuple[float, float]]) -> Rect:
    across, down = zip(*points, strict=True)
    return Rect(min(across), min(down), max(across), max(down))


def read_svg(picture: str) -> Drawn:
    root = ET.fromstring(picture)
    graph = root.find(f"{SVG}g")
    assert graph is not None
    page = graph.find(f"{SVG}polygon")
    assert page is not None
    boxes: dict[int, Rect] = {}
    labels: dict[int, Rect] = {}
    lines: dict[int, list[Curve]] = {}
    for group in graph.iter(f"{SVG}g"):
        kind, _, number = re.sub(r"(\d+)$", r" \1", group.attrib["id"]).partition(" ")
        if kind == "node":
            shape = next(part for part in group.iter() if part.tag in (f"{SVG}path", f"{SVG}polygon"))
            rect = bound(read_points(shape.get("d") or shape.get("points") or ""))
            (boxes if shape.tag.endswith("path") else labels)[int(number)] = rect
        elif kind == "edge":
            lines[int(number)] = [read_points(path.attrib["d"]) for path in group.iter(f"{SVG}path")]
    return Drawn(
        bound(read_points(page.attrib["points"])),
        [boxes[number] for number in sorted(boxes)],
        [labels[number] for number in sorted(labels)],
        [lines[number] for number in sorted(lines)],
    )


def along(curve: Curve) -> Iterator[tuple[float, float]]:
    """Points of a curve, a few pixels apart."""
    for start in range(0, len(curve) - 1, 3):
        for t in (step / 32 for step in range(33)):
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
            x, y = (
                sum(w * point[at] for w, point in zip(weights, curve[start : start + 4], strict=True)) for at in (0, 1)
            )
            yield x, y


def holds(rect: Rect, x: float, y: float, margin: float = 0) -> bool:
    return rect.x - margin < x < rect.right + margin and rect.y - margin < y < rect.bottom + margin


def is_apart(one: Rect, other: Rect) -> bool:
    return one.right <= other.x or other.right <= one.x or one.bottom <= other.y or other.bottom <= one.y


def check_geometry(picture: str) -> Drawn:
    drawn = read_svg(picture)
    assert len(drawn.lines) == 2 * len(drawn.labels)
    for rect in [*drawn.boxes, *drawn.labels]:
        assert holds(drawn.page, rect.x, rect.y)
        assert holds(drawn.page, rect.right, rect.bottom)
    for one, other in combinations([*drawn.boxes, *drawn.labels], 2):
        assert is_apart(one, other), (one, other)
    for number, curves in enumerate(drawn.lines):
        label = drawn.labels[number // 2]
        for curve in curves:
            ends = curve[:1] + curve[-1:]
            assert any(holds(label, *end, margin=3) for end in ends)
            assert any(holds(box, *end, margin=20) for box in drawn.boxes for end in ends)  # the rest is the tip
            for x, y in along(curve):
                crossed = [rect for rect in [*drawn.boxes, *drawn.labels] if holds(rect, x, y, margin=-2)]
                assert not crossed, (curve, crossed)
    return drawn


@settings(max_examples=30)
@given(ensembles())
def test_nothing_overlaps_and_every_line_ends_at_a_box(members: list[Member]) -> None:
    graph = draw_graph(members)
    picture = svg(graph)
    check_geometry(picture)
    assert picture == svg(graph)
    root = ET.fromstring(picture)
    assert [title.text for title in root.findall(f"{SVG}title")] == ["ensemble"]
    shown = {text.text for text in root.iter(f"{SVG}text")}
    assert {"request", "answer", *(member.name for member in members)} <= shown
    assert all(line.isprintable() and line.count('"') in (0, 2) for line in draw(graph).split("\n"))


def test_ten_steps_fit_into_a_readme(tmp_path: Path) -> None:
    graph = ten_steps(tmp_path)
    picture = svg(graph)
    drawn = check_geometry(picture)
    assert drawn.page.right - drawn.page.x <= 700
    request, *steps, answer = drawn.boxes
    for step in steps:
        assert request.bottom < step.y < step.bottom < answer.y
    for edge in graph.edges():
        if edge.source is not None and edge.target is not None:
            assert steps[edge.source].bottom < steps[edge.target].y
    assert picture.count('stroke="#cf222e" stroke-width="3"') == 3  # two lines and the tip
    assert "<desc>Steps: image_preprocess (python · GPU 0), " in picture
    assert "text_detector to box_cropper: boxes FP32 [-1, 4] (host round trip)" in picture


def test_ten_steps_in_a_row_and_side_by_side(tmp_path: Path) -> None:
    row = [Member(f"m{n}", [f"t{n}"], [f"t{n + 1}"]) for n in range(10)]
    drawn = check_geometry(svg(make_graph(tmp_path / "row", row, ["t0"], ["t10"])))
    assert len({round(box.x + box.right) for box in drawn.boxes}) == 1
    assert drawn.page.right - drawn.page.x < 300
    side = [Member(f"m{n}", ["x"], [f"t{n}"]) for n in range(8)]
    side.append(Member("join", [f"t{n}" for n in range(8)], ["y"]))
    drawn = check_geometry(svg(make_graph(tmp_path / "side", side, ["x"], ["y"])))
    assert drawn.page.right - drawn.page.x <= 1150


def test_a_dark_page_has_a_colour_for_each_of_the_light_one(tmp_path: Path) -> None:
    picture = svg(ten_steps(tmp_path))
    style, _, body = picture.partition("</style>")
    for attribute, colour in set(re.findall(r'(fill|stroke)="(#[^"]*)"', body)):
        assert f'[{attribute}="{colour}"] {{ {attribute}: #' in style


def test_mermaid(tmp_path: Path) -> None:
    members = [
        Member("encode", ["ids", "mask"], ["a"]),
        Member("crop [x]", ["a"], ["b"], "cpu"),
        Member("decide", ["b"], ["y"], ""),
        Member("last", ["y", "a"], ["z"]),
    ]
    graph = make_graph(tmp_path, members, ["ids", "mask"], ["z"], {"ids": ("INT64", [-1])})
    assert draw(graph) == MERMAID


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_data(tmp_path: Path, name: str) -> None:
    members = [Member("model", ["in"], [name])]
    graph = make_graph(tmp_path, members, ["in"], [name], name="ensemble")
    shown = name.replace("\n", "\ufffd").replace("\0", "\ufffd")
    assert shown in [text.text for text in ET.fromstring(svg(graph)).iter(f"{SVG}text")]
    label = draw(graph).split("s0 -->|")[1].split("| answer")[0]
    assert label == f'"{escape(shown)}<br/>FP32 [16]"'
    assert not set('"|`<>&%{}\n\0') & set(escape(shown))


def test_escaping() -> None:
    assert escape("bert-large") == "bert-large"
    assert escape("FP32 [-1, 207]") == "FP32 [-1, 207]"
    assert escape('a"b;#') == "a#34;b#59;#35;"
    assert escape("1. x") == "#49;#46; x"  # Mermaid would make a list of it
    assert escape("_x_") == "#95;x#95;"


def test_a_long_name_keeps_its_ends(tmp_path: Path) -> None:
    name = "a" * 30 + "b" * 30
    graph = make_graph(tmp_path, [Member("model", ["in"], [name])], ["in"], [name])
    picture = svg(graph)
    assert f'xlink:title="{name}"' in picture
    assert f">{'a' * 15}…{'b' * 16}</text>" in picture


def test_a_nested_ensemble_is_a_box(tmp_path: Path) -> None:
    inner = make_graph(tmp_path, [Member("model", ["x"], ["y"])], ["x"], ["y"], name="inner")
    members = [Member("first", ["in"], ["x"]), Member("inner", ["x"], ["y"])]
    outer = make_graph(tmp_path / "outer", members, ["in"], ["y"])
    graph = Graph.build(outer.config, {**outer.members, "inner": inner.config})
    assert graph.device(1) == "ensemble"
    assert 's1["inner<br/>ensemble"]' in draw(graph)
    assert ">ensemble</text>" in svg(graph)
    assert [edge.name for edge in graph.edges() if edge.crossing] == ["in"]  # where it runs inside is not said


def test_a_circle_is_drawn_too(tmp_path: Path) -> None:
    members = [Member("one", ["x", "b"], ["a"]), Member("two", ["a"], ["b"])]
    graph = make_graph(tmp_path, members, ["x"], ["b"])
    assert 's1 -->|"b<br/>FP32 [16]"| s0' in draw(graph)
    picture = svg(graph)
    assert "one to two: a FP32 [16]" in picture
    assert "two to one: b FP32 [16]" in picture


def test_png_is_twice_the_svg(tmp_path: Path) -> None:
    members = [Member("漢字", ["$x$"], ["y"]), Member("last", ["y"], ["z"], "cpu")]
    graph = make_graph(tmp_path, members, ["$x$"], ["z"])
    root = ET.fromstring(svg(graph))
    image = png(graph)
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", image[16:24])
    assert abs(width - 2 * int(root.attrib["width"])) <= 2
    assert abs(height - 2 * int(root.attrib["height"])) <= 2
    assert image == png(graph)


STREAM = """\
flowchart TB
  request([request])
  s0["counts<br/>python · CPU"]
  s1["adds<br/>python · CPU"]
  answer([answer])
  c0["asks<br/>python · CPU"]
  c1["ghost<br/>not found"]
  c2["adds<br/>python · CPU"]
  request -->|"COUNT<br/>INT32 [1]"| s0
  s0 ==>|"number #42;<br/>INT32 [1]<br/>stream #42;<br/>INT64 [1]"| s1
  s1 ==>|"SUM #42;<br/>INT32 [1]"| answer
  s1 -.->|"calls"| c0
  s1 -.->|"calls"| c1
  c0 -.->|"calls"| c2
  legend["thick, #42;#58; many per request"]
  style legend fill:none,stroke:none
  classDef cpu fill:#ddf4ff,stroke:#0969da,color:#1f2328
  class s0,s1,c0,c2 cpu
  classDef open fill:#f6f8fa,stroke:#59636e,color:#1f2328
  class c1 open
"""


def write_stream(folder: Path, calls: dict[str, str]) -> Graph:
    """The ensemble of `tests.support.streams`, whose models call others."""
    for path, text in FILES.items():
        lines = [line for line in text.splitlines(keepends=True) if '"calls"' not in line]
        name, _, file = path.partition("/")
        if file == "config.pbtxt" and name in calls:
            lines.append(f'parameters {{ key: "calls" value {{ string_value: "{calls[name]}" }} }}\n')
        write(folder / path, "".join(lines))
    return Graph.load(folder / "sums")


def test_answers_in_pieces_are_double_and_calls_are_dashed(tmp_path: Path) -> None:
    graph = write_stream(tmp_path, {"adds": "asks ghost", "asks": "adds"})
    assert draw(graph) == STREAM
    picture = svg(graph)
    drawn = check_geometry(picture)
    assert sorted(map(len, drawn.lines)) == [1] * 8 + [2] * 4
    assert f">{LEGEND}</text>" in picture
    assert "adds to asks: calls" in picture
    assert picture.count("stroke-dasharray") == 6  # two lines for each call
    assert len(png(graph)) > 1000


@pytest.mark.parametrize(
    "calls",
    [
        {"adds": "asks counts", "asks": "counts"},
        {"counts": "asks adds", "adds": "asks", "asks": "adds"},
        {"adds": "asks", "asks": "asks"},
        {"counts": "sums"},
    ],
)
def test_calls_of_calls_and_in_a_circle_are_drawn(calls: dict[str, str], tmp_path: Path) -> None:
    check_geometry(svg(write_stream(tmp_path, calls)))


def test_no_legend_without_repeated_tensors(tmp_path: Path) -> None:
    assert LEGEND not in svg(ten_steps(tmp_path))


def test_drawing_does_not_change_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FONTCONFIG_FILE", "mine")
    svg(ten_steps(tmp_path))
    assert os.environ["FONTCONFIG_FILE"] == "mine"
    os.write(2, b"still open")
    assert capfd.readouterr() == ("", "still open")

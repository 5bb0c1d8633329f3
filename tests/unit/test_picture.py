"""Pictures of ensembles: their words, and where everything stands."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.draw.boxes import LEGEND
from shoal.draw.canvas import Block, Line, Scene, Words, measure
from shoal.draw.layout import Point, Rect
from shoal.draw.mermaid import draw, escape
from shoal.draw.picture import compose_scene, png, svg
from shoal.errors import ArtifactError
from shoal.repository.graph import Graph
from shoal.repository.model_folders import find_model_folders
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


def parts(scene: Scene) -> tuple[list[Rect], list[Rect], list[Line]]:
    """Boxes, labels and lines."""
    page, *blocks = [shape for shape in scene.shapes if isinstance(shape, Block)]
    assert page.rect == (0, 0, scene.width, scene.height)
    boxes = [block.rect for block in blocks if block.look != "page"]
    labels = [block.rect for block in blocks if block.look == "page"]
    return boxes, labels, [shape for shape in scene.shapes if isinstance(shape, Line)]


def along(line: Line) -> Iterator[tuple[float, float]]:
    """Points of a line, close enough that nothing lies between them."""
    for (x, y), (then, below) in pairwise(line.points):
        num_steps = 32 if x != then else max(1, (below - y) // 4)
        for t in (step / num_steps for step in range(num_steps + 1)):
            across, down = (3 * t**2 - 2 * t**3, 1.5 * t * (1 - t) + t**3) if x != then else (0, t)
            yield x + (then - x) * across, y + (below - y) * down


def holds(rect: Rect, x: float, y: float) -> bool:
    return rect.x < x < rect.right and rect.y < y < rect.bottom


def is_apart(one: Rect, other: Rect) -> bool:
    return one.right <= other.x or other.right <= one.x or one.bottom <= other.y or other.bottom <= one.y


def check_geometry(scene: Scene) -> None:
    boxes, labels, lines = parts(scene)
    assert len(labels) == len(lines)
    for rect in [*boxes, *labels]:
        assert 0 <= rect.x <= rect.right <= scene.width
        assert 0 <= rect.y <= rect.bottom <= scene.height
    for one, other in combinations([*boxes, *labels], 2):
        assert is_apart(one, other), (one, other)
    for line in lines:
        (x, y), (then, below) = line.points[0], line.points[-1]
        assert any(box.x < x < box.right and box.bottom == y for box in boxes)
        assert any(box.x < then < box.right and box.y == below for box in boxes)
        points = list(along(line))
        assert not any(holds(box, *point) for box in boxes for point in points)
        assert sum(any(holds(label, *point) for point in points) for label in labels) == 1
    for label in labels:
        assert sum(any(holds(label, *point) for point in along(line)) for line in lines) == 1
    for words in (shape for shape in scene.shapes if isinstance(shape, Words) and shape.is_centred):
        half = measure(words.text, scene.theme.types[words.look].size) / 2
        owners = [rect for rect in [*boxes, *labels] if holds(rect, words.x, words.y - 4)]
        assert len(owners) == 1
        assert owners[0].x <= words.x - half
        assert words.x + half <= owners[0].right


@settings(max_examples=30, deadline=None)
@given(ensembles())
def test_nothing_overlaps_and_every_line_ends_at_a_box(members: list[Member]) -> None:
    graph = draw_graph(members)
    check_geometry(compose_scene(graph))
    picture = svg(graph)
    assert picture == svg(graph)
    root = ET.fromstring(picture)
    assert [title.text for title in root.findall(f"{SVG}title")] == ["ensemble"]
    shown = {text.text for text in root.iter(f"{SVG}text")}
    assert {"request", "answer", *(member.name for member in members)} <= shown
    assert all(line.isprintable() and line.count('"') in (0, 2) for line in draw(graph).split("\n"))


def test_ten_steps_fit_into_a_readme(tmp_path: Path) -> None:
    graph = ten_steps(tmp_path)
    scene = compose_scene(graph)
    check_geometry(scene)
    assert scene.width <= 700
    boxes, _, lines = parts(scene)
    request, *steps, _ = boxes
    rows: dict[int, list[Rect]] = {}
    for level, box in zip(graph.levels(), steps, strict=True):
        rows.setdefault(level, []).append(box)
    assert all(len({box.y for box in row}) == 1 for row in rows.values())  # branches side by side
    assert request.bottom < min(box.y for box in rows[1])
    assert [line.look for line in lines] == ["line"] * (len(lines) - 1) + ["warning"]
    assert "<desc>Steps: image_preprocess (python · GPU 0), " in svg(graph)
    assert "text_detector to box_cropper: boxes FP32 [-1, 4] (host round trip)" in svg(graph)


def test_ten_steps_in_a_row_and_side_by_side(tmp_path: Path) -> None:
    row = [Member(f"m{n}", [f"t{n}"], [f"t{n + 1}"]) for n in range(10)]
    scene = compose_scene(make_graph(tmp_path / "row", row, ["t0"], ["t10"]))
    check_geometry(scene)
    middles = {box.x + box.width // 2 for box in parts(scene)[0]}
    assert len(middles) == 1
    assert scene.width < 300
    side = [Member(f"m{n}", ["x"], [f"t{n}"]) for n in range(8)]
    side.append(Member("join", [f"t{n}" for n in range(8)], ["y"]))
    scene = compose_scene(make_graph(tmp_path / "side", side, ["x"], ["y"]))
    check_geometry(scene)
    assert scene.width <= 1150


def test_a_long_line_is_straight() -> None:
    leaves = find_model_folders()
    _, _, lines = parts(compose_scene(Graph.build(leaves["ensemble_all"], leaves)))
    (weight,) = [line for line in lines if len(line.points) > 8 or line.points[-1][1] - line.points[0][1] > 300]
    assert len({x for x, _ in weight.points[2:-3]}) == 1


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
    assert f"<title>{name}</title>{'a' * 15}…{'b' * 16}</text>" in svg(graph)


def test_a_nested_ensemble_is_a_box(tmp_path: Path) -> None:
    inner = make_graph(tmp_path, [Member("model", ["x"], ["y"])], ["x"], ["y"], name="inner")
    members = [Member("first", ["in"], ["x"]), Member("inner", ["x"], ["y"])]
    outer = make_graph(tmp_path / "outer", members, ["in"], ["y"])
    graph = Graph.build(outer.config, {**outer.members, "inner": inner.config})
    assert graph.device(1) == "ensemble"
    assert 's1["inner<br/>ensemble"]' in draw(graph)
    assert ">ensemble</text>" in svg(graph)
    assert [edge.name for edge in graph.crossings()] == ["in"]  # where it runs inside is not said


def test_a_circle_has_no_picture_but_its_text(tmp_path: Path) -> None:
    members = [Member("one", ["x", "b"], ["a"]), Member("two", ["a"], ["b"])]
    graph = make_graph(tmp_path, members, ["x"], ["b"])
    assert 's1 -->|"b<br/>FP32 [16]"| s0' in draw(graph)
    with pytest.raises(ArtifactError, match="is not connected"):
        svg(graph)


def test_png_is_the_svg_at_a_scale(tmp_path: Path) -> None:
    members = [Member("漢字", ["$x$"], ["y"]), Member("last", ["y"], ["z"], "cpu")]
    graph = make_graph(tmp_path, members, ["$x$"], ["z"])
    root = ET.fromstring(svg(graph))
    for scale in (1, 2, 3):
        image = png(graph, scale)
        assert image.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", image[16:24])
        assert (width, height) == (scale * int(root.attrib["width"]), scale * int(root.attrib["height"]))
        assert image == png(graph, scale)
    assert png(graph) == png(graph, 2)


def test_points_of_the_s_are_those_of_the_curve() -> None:
    line = Line(((0, 0), (40, 80)), "line")
    middle: Point = (20, 40)
    assert list(along(line))[16] == middle


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
    scene = compose_scene(graph)
    check_geometry(scene)
    _, _, lines = parts(scene)
    kinds = [(line.is_double, line.is_dashed) for line in lines]
    assert sorted(kinds) == sorted([(False, False), (True, False), (True, False), *[(False, True)] * 3])
    assert LEGEND in [shape.text for shape in scene.shapes if isinstance(shape, Words)]
    assert "adds to asks: calls" in scene.story
    drawn = svg(graph)
    assert drawn.count('class="core"') == 2
    assert drawn.count("stroke-dasharray") == 3
    assert len(png(graph)) > len(png(graph, 1)) > 1000


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
    check_geometry(compose_scene(write_stream(tmp_path, calls)))


def test_without_answers_in_pieces_there_is_no_legend(tmp_path: Path) -> None:
    scene = compose_scene(ten_steps(tmp_path))
    assert LEGEND not in [shape.text for shape in scene.shapes if isinstance(shape, Words)]

"""Facts derived from TorchScript files and the user's options, and modules that cannot be served."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple  # noqa: UP035  # torch.jit.script reads these

import pytest
import torch
from torch import Tensor, nn

from shoal.authoring.check.families import check
from shoal.authoring.composition.compose import compose
from shoal.authoring.project.importing import torchscripts
from shoal.authoring.project.importing.add_model import add_model
from shoal.authoring.repository.plan import Plan
from shoal.errors import ArtifactError, InputError
from shoal.kit.encoders.unbinding import unbind
from tests.support.imports import Column, Tagger, add, declared, load_script, script


def test_outputs_are_derived_from_forward(tmp_path: Path) -> None:
    tagger, column = script(Tagger(), tmp_path / "tagger.pt"), script(Column(), tmp_path / "column.pt")
    config, said = add(tmp_path, tagger, "tagger", inputs=["INT64:-1", "type_int64:-1"])
    takes = ["INPUT__0 INT64 [-1]", "INPUT__1 INT64 [-1]"]
    assert declared(config) == [*takes, "OUTPUT__0 FP32 [3]", "OUTPUT__1 FP32 [-1]"]
    assert (config.backend, config.spec.max_batch_size) == ("pytorch", 512)
    assert said == [
        "TorchScript, from tagger.pt: forward(ids, mask)", "inputs as given: INPUT__0 for ids, INPUT__1 for mask",
        "outputs from forward run on 2 and 3 rows, 8 and 13 wide where a size is open",
    ]  # fmt: skip
    config, _ = add(tmp_path, tagger, "other_order", inputs=["mask:INT64:-1", "ids:INT64:-1"])
    assert declared(config)[:2] == ["ids INT64 [-1]", "mask INT64 [-1]"]
    config, _ = add(tmp_path, column, "column", inputs=["FP32:5"], max_batch_size=4)
    assert declared(config) == ["INPUT__0 FP32 [5]", "OUTPUT__0 FP32 [1] column", "OUTPUT__1 INT64 [1]"]
    config, _ = add(tmp_path, column, "alone", inputs=["FP32:7,5"], max_batch_size=0)
    assert declared(config) == ["INPUT__0 FP32 [7, 5]", "OUTPUT__0 FP32 [7]", "OUTPUT__1 INT64 [7, 1]"]


def test_the_mask_is_named_as_forward_names_it(tmp_path: Path) -> None:
    class Marked(nn.Module):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return (ids * mask).sum(1, keepdim=True).to(torch.float32)

    marked = script(Marked(), tmp_path / "marked.pt")
    for name, mask in (("one", "mask"), ("two", "INPUT__1")):
        config, said = add(tmp_path, marked, name, inputs=["INT64:-1", "INT64:-1"], mask=mask)
        assert config.spec.parameters["attention_mask"] == "INPUT__1"
        assert said[-1] == "INPUT__1 gives row lengths, as given: parameter attention_mask"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, r"TorchScript file, .* lacks dtypes and dims of forward\(ids, mask\)\. .* --input INT64:-1 --input"),
        (["INT64:-1"], r"forward\(ids, mask\) takes 2 tensors; 1 are given\. For example: --input INT64:-1 --input"),
        (["INT64:-1", "INT64"], r"The input 'INT64' has invalid dimensions: \. For example INT64:-1"),
        (["INT64:-1", "INT7:-1"], r"The input 'INT7:-1' has an unknown dtype: INT7\. Known: BOOL, UINT8, INT8, "),
        (["INT64:-1", "INT64:0"], r"The input 'INT64:0' has invalid dim"),
        (["INT64:-1", "INT64:2,x"], r"The input 'INT64:2,x' has invalid dim"),
        (
            ["a:INT64:-1", "b:INT64:-1"],
            r"The inputs are named a, b; forward\(ids, mask\) has other names\. Use those names \(",
        ),
        (["ids:INT64:-1", "INT64:-1"], r"The inputs are named ids, nothing; forward\(ids, mask\) has other names"),
    ],
)
def test_inputs_that_do_not_fit_forward(inputs: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        add_model(script(Tagger(), tmp_path / "tagger.pt"), "tagger", project=tmp_path, inputs=inputs)


class AsDict(nn.Module):
    def forward(self, x: Tensor) -> Dict[str, Tensor]:  # noqa: UP006
        return {"x": x}


class AsList(nn.Module):
    def forward(self, x: Tensor) -> List[Tensor]:  # noqa: UP006
        return [x]


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Tuple[Tensor, Tuple[Tensor, Tensor]]:  # noqa: UP006
        return x, (x, x)


class Numbered(nn.Module):
    def forward(self, x: Tensor) -> Tuple[Tensor, int]:  # noqa: UP006
        return x, 1


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0)


class Crossed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(7, 9) @ x


class Optioned(nn.Module):
    def forward(self, x: Tensor, y: Optional[Tensor] = None) -> Tensor:  # noqa: UP045
        return x if y is None else x + y


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (AsDict(), r"forward returns a dict, not a tensor\. Wrap the module in one whose forward takes tensors"),
        (AsList(), r"forward returns a list, not a tensor\."),
        (Nested(), r"Output 1 of forward is a tuple, not a tensor\."),
        (Numbered(), r"Output 1 of forward is a int, not a tensor\."),
        (Half(), r"Output 0 of forward is torch\.bfloat16, which clients cannot take\. Cast it: \.float\(\)"),
        (Summed(), r"cannot be batched: output 0 has shape \[4\] for 2 rows, expected \[2, \.\.\.\]\."),
        (Crossed(), r"cannot be batched: dimension 1 of output 0 follows the number of rows\. .* --max-batch-size 0"),
        (Centred(), r"cannot be batched: a row's answer depends on the rows beside it\."),
        (Failing(), r"m\.pt cannot be tried: it fails on INPUT__0 \[2, 4\]: "),
        (Optioned(), r"is called as forward\(x: Tensor, y: Optional\[Tensor\]\), which takes more than tensors\."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_modules_that_cannot_be(module: nn.Module, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=message):
        add_model(script(module, tmp_path / "m.pt"), "m", project=tmp_path, inputs=["FP32:4"])
    assert not (tmp_path / "models").exists()


def test_files_written_by_torch_save(tmp_path: Path) -> None:
    torch.save(Column().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(
        ArtifactError, match=r"weights\.pt is not a TorchScript archive: it contains weights and no code: it w"
    ):
        add_model(tmp_path / "weights.pt", "m", project=tmp_path, inputs=["FP32:5"])
    whole = script(Column(), tmp_path / "cut.pt")
    whole.write_bytes(whole.read_bytes()[:-300])
    with pytest.raises(ArtifactError, match=r"cut\.pt is not a TorchScript archive: it is cut off or damaged"):
        add_model(whole, "m", project=tmp_path, inputs=["FP32:5"])
    with pytest.raises(InputError, match=r"A Column is not a TorchScript module\. Convert it: torch\.jit\.trace"):
        add_model(Column(), "m", project=tmp_path, inputs=["FP32:5"])


def test_files_written_by_torch_export(tmp_path: Path) -> None:
    path = tmp_path / "exported.pt"
    torch.export.save(torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),)), str(path))
    with pytest.raises(ArtifactError, match=r"it is a PT2 archive of torch\.export .* torch\.jit\.trace\(model\.eval"):
        add_model(path, "m", project=tmp_path, inputs=["FP32:4"])


class Attending(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rate = 0.5 if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=rate)


class Recurrent(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, 2, dropout=rate, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((x.shape[0],), 3), batch_first=True)
        out: Tensor = self.layer(packed)[1]
        return out[0]


@pytest.mark.parametrize(
    ("module", "operator"),
    [
        (nn.Dropout(0.5), "dropout"),
        (nn.RReLU(), "rrelu"),
        (Packed(), "gru"),
        (nn.Dropout(0.0), ""),
        (nn.AlphaDropout(0.5), "alpha_dropout"),
        (nn.Dropout1d(0.5), "feature_dropout"),
        (nn.BatchNorm1d(3), "batch_norm"),
        (Attending(), "scaled_dot_product_attention"),
        (Recurrent(0.5), "lstm"),
        (Recurrent(0.0), ""),
        (nn.LayerNorm(4), ""),
    ],
    ids=str,
)
def test_traces_in_training_mode(module: nn.Module, operator: str, tmp_path: Path) -> None:
    """Their answers stay random, or depend on the other rows; ``eval`` has no effect on them."""
    for is_training in (True, False):
        path = tmp_path / f"{is_training}.pt"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.trace(module.train(is_training), torch.ones(2, 3, 4), check_trace=False).save(str(path))
        if is_training and operator:
            with pytest.raises(
                ArtifactError, match=rf"True\.pt was traced in training mode: {operator} is computed as"
            ):
                add_model(path, "trained", project=tmp_path, inputs=["FP32:3,4"])
        else:
            add_model(path, f"m{is_training}".lower(), project=tmp_path, inputs=["FP32:3,4"])


def test_training_mode_is_left(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        saved: Any = torch.jit.script(module)
        torch.jit.save(saved, str(tmp_path / "m.pt"))
    _, said = add(tmp_path, tmp_path / "m.pt", "m", inputs=["FP32:4"])
    assert "it was saved in training mode, and is written in evaluation mode" in said
    assert not load_script(tmp_path / "models" / "m" / "1" / "model.pt").training


class Bound(nn.Module):
    """Its trace keeps the device of the example, where it makes a tensor."""

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return (ids * (positions + 1)).to(torch.float32).sum(1, keepdim=True)


def test_a_trace_that_names_a_device_is_freed_of_it(tmp_path: Path) -> None:
    ids = torch.arange(12).reshape(2, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bound: Any = torch.jit.trace(Bound().eval(), (ids,), check_trace=False)
        torch.jit.save(bound, str(tmp_path / "bound.pt"))
    config, said = add(tmp_path, tmp_path / "bound.pt", "free", inputs=["INT64:-1"])
    assert "its code named a device, and now uses the device of its inputs; its answers are the same" in said
    path = config.folder / "1" / "model.pt"
    assert torch.equal(load_script(path)(ids), bound(ids))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        elsewhere: Any = torch.jit.load(str(path), map_location="meta")
        assert elsewhere(ids.to("meta")).device.type == "meta"
        with pytest.raises(RuntimeError, match="meta"):
            torch.jit.load(str(tmp_path / "bound.pt"), map_location="meta")(ids.to("meta"))
    repository = compose("free", tmp_path / "r", projects=[tmp_path], plan=Plan(placement="gpu"))
    assert {finding.rule.id for finding in check(repository)} == set()


def test_answers_that_change_without_the_device_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(module: Any) -> None:
        unbind(module)
        graph = module._c._get_method("forward").graph
        for node in graph.findAllNodes("aten::mul"):
            node.replaceInput(1, node.inputsAt(0))

    monkeypatch.setattr(torchscripts, "unbind", spoil)
    ids = torch.arange(12).reshape(2, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(Bound().eval(), (ids,), check_trace=False), str(tmp_path / "bound.pt"))
    with pytest.raises(ArtifactError, match="The code names a device, and without it the answers are others"):
        add(tmp_path, tmp_path / "bound.pt", "spoilt", inputs=["INT64:-1"])


def test_a_device_that_stays_is_said(tmp_path: Path) -> None:
    """It is an attribute, which nothing here replaces."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = torch.device("cpu")

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.zeros([1], device=self.place)

    said: list[str] = []
    add_model(script(Kept(), tmp_path / "kept.pt"), "kept", project=tmp_path, tell=said.append, inputs=["FP32:1"])
    assert "its code names a device, and runs on that one only: `shoal check` names the line" in said


def test_a_traced_module_says_its_inputs(tmp_path: Path) -> None:
    class Weighed(nn.Module):
        def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
            return ids.float().sum(1, keepdim=True) + weights

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(Weighed().eval(), (torch.ones(2, 7, dtype=torch.int64), torch.ones(2, 3)))
        traced.save(str(tmp_path / "traced.pt"))
    config, said = add(tmp_path, tmp_path / "traced.pt", "weighed")
    assert declared(config) == ["INPUT__0 INT64 [-1]", "INPUT__1 FP32 [3]", "OUTPUT__0 FP32 [3]"]
    assert said[1] == "inputs of the example that it was traced with: INPUT__0 for ids, INPUT__1 for weights"
    config, _ = add(tmp_path, tmp_path / "traced.pt", "fixed", inputs=["INT64:5", "FP32:3"])
    assert declared(config)[0] == "INPUT__0 INT64 [5]"

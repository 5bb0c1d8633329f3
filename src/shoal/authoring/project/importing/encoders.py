"""Import of Hugging Face encoders, by name or folder, to return embeddings or the answers of their own trained head.

Also contains the PyTorch modules that are exported.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.authoring.project.importing.imported import MAX_BATCH_SIZE, Imported, make_config, stage, write_labels
from shoal.authoring.project.importing.sentences import Sentences, read_sentences
from shoal.authoring.project.importing.tasks import (
    CLASSIFY,
    CROSS_ENCODER,
    EMBEDDINGS,
    OLD_CROSS_ENCODER,
    PREDICT,
    RERANK,
)
from shoal.authoring.project.scaffold.clone import draft_like
from shoal.errors import InputError, needs
from shoal.kit.component.files import sha256
from shoal.kit.component.spec import TensorSpec
from shoal.kit.encoders.encoder import (
    HEADS,
    Trunked,
    check_tokenizer,
    count_positions,
    describe_revision,
    pool,
    published,
    read_tokenizer,
)
from shoal.kit.encoders.export import NAMES, SEGMENTS, TOLERANCE, export_encoder
from shoal.kit.encoders.length_bucketing import ATTENTION_MASK
from shoal.kit.text.tokens import LENGTHS
from shoal.system.progress import OnProgress

FORMATS = {"torchscript": ("pytorch", "model.pt"), "onnx": ("onnxruntime", "model.onnx")}
VOCABULARY, TOKENIZER = "vocab.txt", "tokenizer.json"
SOFTMAX, SIGMOID, NOTHING = "softmax", "sigmoid", ""  # activations of heads
_OTHER_TASK = re.compile(r"For(?!SequenceClassification)[A-Z]")  # in the name of an architecture
_LEAF, _PAIR_LEAF = "tokenizer", "pair_tokenizer"  # shoal's model folders to copy
_ONE_TEXT = (
    "note: it takes one text per row, without a second text and without segment ids (token_type_ids are 0). If its head"
    " was trained on pairs of texts (a cross-encoder), its answers would be wrong: add it with --task rerank"
)


def draft_encoder(
    source: Path | str,
    name: str,
    *,
    task: str | None = None,
    pooling: str | None = None,
    normalise: bool | None = None,
    revision: str | None = None,
    max_length: int | None = None,
    format: str = "torchscript",  # noqa: A002  # as the command line has it
    tokenizer: str | None = None,
    max_batch_size: int = MAX_BATCH_SIZE,
    scratch: Path,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Imported:
    """Draft a model folder that runs an encoder. Its inputs are token ids and attention mask, INT64 ``[-1]`` each.

    The output is FP32; ``task`` chooses it. ``embeddings`` returns ``[size]``: the mean of the tokens' last
    hidden states (``pooling`` is ``mean``) or the last hidden state of the first token (``cls``), scaled to length 1 if
    ``normalise`` is true. The defaults of ``pooling`` and ``normalise``, and dense layers after the pooling, are read
    from the encoder's files for sentence-transformers; without these files ``pooling`` must be given, and
    ``normalise`` is false. ``classify`` returns ``[num_classes]``, the probabilities from the checkpoint's own
    trained head; the class names become the parameter ``labels``, and the file of ``label_filename``. ``predict``
    returns ``[1]``, the score from that head; so does ``rerank``, for two texts, with segment ids as a third input, and
    with the activation of ``CrossEncoder`` of sentence-transformers.

    ``format`` is ``torchscript`` or ``onnx``. If ``tokenizer`` is given, a second model folder of that name is drafted,
    which converts texts to at most ``max_length`` tokens each. The default of ``max_length`` is the encoder's maximum,
    or a lower maximum in its files for sentence-transformers. ``revision`` is a commit on the Hugging Face hub; its
    default is the commit that shoal has pinned for this name, if any.

    Raises:
        InputError: the encoder cannot be loaded or has no trained head for ``task``, or an option is missing, unknown
            or does not fit the others.
        ArtifactError: the exported model's answers differ from the encoder's by more than 1e-5.
    """
    task = _check_task(task, pooling, normalise, format)
    if max_length is not None and tokenizer is None:
        raise InputError("max_length is for a tokenizer, and none is given.", "Add --tokenizer NAME, or leave it out.")
    if max_batch_size < 1:
        raise InputError(f"max_batch_size is {max_batch_size}; an encoder takes rows.", "Give 1 or more.")
    _, file = FORMATS[format]
    with stage(on_progress, f"loading {source}"):
        encoder = _load(str(source), revision, task)
    made = _embed(encoder, pooling, normalise) if task == EMBEDDINGS else _classify(encoder, task)
    tokens = _write_tokens(encoder, scratch, is_whole=task == RERANK)
    with stage(on_progress, f"exporting {file} and comparing its answers"):
        export_encoder(made.module, scratch / file, ties={tokens.name: sha256(tokens)})
    (ids, mask), (out,) = NAMES
    message = _configure(name, f"{encoder.title}, {made.what}", made, task, format, max_batch_size)
    proof = f"the file was read again: its answers match the published model, within {TOLERANCE:g}"
    more = f"; {SEGMENTS}: segment ids" if made.module.takes_segments else ""
    said = [encoder.title, f"{ids}: token ids; {mask}: attention mask{more}; {out}: {made.what}", *made.notes, proof]
    beside: Mapping[str, str | bytes | Path] = {}
    if tokenizer is not None:
        length = _find_length(encoder, max_length)
        leaf = _PAIR_LEAF if task == RERANK else _LEAF
        beside = _copy_tokenizer(leaf, tokenizer, encoder, tokens, length, scratch)
        said.append(f"its tokens come from preprocess/{tokenizer}, at most {length} per {made.row}")
    labels = write_labels(message, made.labels) if made.labels else {}
    return Imported(message, {f"1/{file}": scratch / file, **labels}, tuple(said), beside)


def _configure(name: str, content: str, made: _Made, task: str, form: str, max_batch_size: int) -> Any:
    """Return the configuration of the exported encoder."""
    (ids, mask), (out,) = NAMES
    backend, file = FORMATS[form]
    more = {} if task == PREDICT else {"api": task}
    if task == EMBEDDINGS and made.dimensions:
        more["dimensions"] = " ".join(map(str, made.dimensions))
    return make_config(
        name,
        backend,
        [TensorSpec(each, "TYPE_INT64", (-1,)) for each in (ids, mask, *([SEGMENTS] * made.module.takes_segments))],
        [TensorSpec(out, "TYPE_FP32", (made.width,))],
        artifact=file,
        max_batch_size=max_batch_size,
        parameters={ATTENTION_MASK: mask, "content": content, **more},
    )


def _check_task(task: str | None, pooling: str | None, normalise: bool | None, form: str) -> str:
    """Return ``task``, if the options are known and fit each other."""
    for option, value, known in (("pooling", pooling, HEADS), ("format", form, FORMATS)):
        if value is not None and value not in known:
            raise InputError(f"Unknown {option} {value!r}.", f"Known: {', '.join(known)}.")
    if not task:
        raise InputError(
            "The model's task is not given.",
            "Add --task embeddings, --task classify or --task predict, of which the last two use the checkpoint's own"
            " trained head; or --task generate.",
        )
    if task != EMBEDDINGS and (pooling is not None or normalise is not None):
        given = "pooling" if pooling is not None else "normalise"
        raise InputError(f"{given} is for embeddings; a trained head pools as it was.", f"Leave {given} out.")
    return task


# --- what was published ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Encoder:
    """A loaded checkpoint; ``model`` and ``tokenizer`` are objects of transformers.

    ``title`` is the encoder's name and revision. ``vocabulary`` is empty if the tokenizer is not a WordPiece.
    """

    name: str
    title: str
    model: Any
    tokenizer: Any
    vocabulary: tuple[str, ...]
    is_lowercase: bool
    sentences: Sentences


def _load(name: str, revision: str | None, task: str) -> _Encoder:
    with needs("train"):
        from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
    kind = AutoModel if task == EMBEDDINGS else AutoModelForSequenceClassification
    with published(name, revision) as (place, pinned), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old settings; missing weights are checked below
        tokenizer = AutoTokenizer.from_pretrained(place, revision=pinned)
        check_tokenizer(name, place, pinned, tokenizer)
        model, report = kind.from_pretrained(place, revision=pinned, dtype=torch.float32, output_loading_info=True)
        sentences = read_sentences(place, pinned)
    other = next((kind for kind in model.config.architectures or () if _OTHER_TASK.search(str(kind))), None)
    if other and task != EMBEDDINGS:
        raise InputError(
            f"{name} has no trained head for {task}: it is a {other}.",
            "Take a checkpoint that was trained for it, or --task embeddings. For its own answers, trace it"
            " (torch.jit.trace), and add that file: shoal add-model model.pt NAME --input INT64:-1 --input INT64:-1",
        )
    missing = sorted(key for key in report["missing_keys"] if task != EMBEDDINGS or not key.startswith("pooler."))
    if missing and task != EMBEDDINGS:
        raise InputError(
            f"{name} has no trained head for {task}: its checkpoint lacks {_few(missing)}.",
            "Take a checkpoint that was trained for it, or --task embeddings.",
        )
    if missing or not hasattr(model.config, "max_position_embeddings"):
        why = f"its checkpoint lacks {_few(missing)}" if missing else "its configuration has no max_position_embeddings"
        raise InputError(f"{name} is not an encoder that can be served: {why}.", "Take an encoder of BERT's family.")
    if len(tokenizer) > model.config.vocab_size:
        raise InputError(
            f"The tokenizer of {name} has {len(tokenizer):,} tokens; the model has {model.config.vocab_size:,}.",
            "Take both from one checkpoint.",
        )
    try:
        vocabulary, is_lowercase = read_tokenizer(name, tokenizer)
    except InputError:
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise
        vocabulary, is_lowercase = (), False
    shown = Path(name).resolve().name if Path(name).is_dir() else name  # without the path on this machine
    title = f"{shown} {describe_revision(model, name, place)}".rstrip()
    return _Encoder(name, title, model.eval(), tokenizer, vocabulary, is_lowercase, sentences)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


# --- what it gives -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Made:
    """A module to export; its output has size ``width`` per row, and ``what`` describes the output.

    ``notes`` are for the user; ``labels`` are the names of its classes, if there are any; ``dimensions`` are sizes that
    it was trained to be cut to.
    """

    module: Trunked
    width: int
    what: str
    notes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    row: str = "text"
    dimensions: tuple[int, ...] = ()


def _embed(encoder: _Encoder, pooling: str | None, normalise: bool | None) -> _Made:
    model, sentences, notes = encoder.model, encoder.sentences, [*encoder.sentences.notes]
    if sentences.foreign:
        raise InputError(
            f"The embedding of {encoder.name} cannot be computed: {sentences.foreign}.",
            "Known are Transformer, Pooling, Dense, Normalize. For the encoder alone, take modules.json out of a copy.",
        )
    hidden = int(model.config.hidden_size)
    if sentences.width and sentences.dense[0].in_features != hidden:
        raise InputError(
            f"The layers after the pooling of {encoder.name} take {sentences.dense[0].in_features} numbers, and the"
            f" encoder gives {hidden}.",
            "Take all files of the same model.",
        )
    if pooling is None and not sentences.pooling:
        raise InputError(
            f"The pooling of {encoder.name} is not given: {sentences.why}.",
            f"Add --pooling {' or --pooling '.join(HEADS)}, as it was trained.",
        )
    if pooling is None:
        notes.append(f"pooling {sentences.pooling}: as its files for sentence-transformers say")
    if normalise is None:
        whence = "as its files for sentence-transformers say" if sentences.has_modules else "the default"
        notes.append(f"{'' if sentences.is_normalised else 'not '}normalised: {whence}")
    if sentences.width:
        notes.append(f"with the layers after its pooling: {sentences.width} numbers per text")
    whole = sentences.width or hidden
    width = min(sentences.size or whole, whole)
    if width < whole:
        notes.append(f"the first {width} of {whole} numbers per text: its files for sentence-transformers cut the rest")
    if pooling and sentences.pooling not in ("", pooling):
        notes.append(f"pooling {pooling}, as given: its files for sentence-transformers say {sentences.pooling}")
    pooling = pooling or sentences.pooling
    is_normalised = sentences.is_normalised if normalise is None else normalise
    model.pooler = None  # the pooler's output is not used, and its weights would only add size
    dense = ", and its dense layers" if sentences.width else ""
    cut = f", cut to {width} numbers" if width < whole else ""
    unit = ", of length 1" if is_normalised else ""
    what = f"the embedding, {HEADS[pooling]}{dense}{f'{cut}{unit}' if normalise else f'{unit}{cut}'}"
    size = width if width < whole else None
    module = Embedder(
        model, pooling, sentences.dense, is_normalised=is_normalised, size=size, cuts_first=bool(normalise)
    )
    known = getattr(model.config, "matryoshka_dimensions", None) or ()  # as vLLM reads it
    return _Made(module, width, what, tuple(notes), dimensions=tuple(size for size in known if size <= width))


def _classify(encoder: _Encoder, task: str) -> _Made:
    config = encoder.model.config
    width, problem = int(config.num_labels), config.problem_type
    pairs = (_ONE_TEXT,) if getattr(config, "type_vocab_size", 0) > 1 else ()
    if task in (PREDICT, RERANK) and width != 1:
        raise InputError(f"The head of {encoder.name} gives {width} numbers, not a score.", "Use --task classify.")
    if task == CLASSIFY and (width == 1 or problem == "regression"):
        what = "a score" if width == 1 else f"{width} scores"
        raise InputError(
            f"The head of {encoder.name} gives {what}, not classes.",
            "Use --task predict, or --task rerank if it is of two texts.",
        )
    if task == RERANK:
        activation = _find_activation(config)
        shown = f", {activation}" if activation else ""
        module = Headed(encoder.model, activation, takes_segments=True)
        return _Made(module, width, f"the score of its own trained head for two texts{shown}", row="pair")
    if task == PREDICT:
        return _Made(Headed(encoder.model, NOTHING), width, "the score of its own trained head", pairs)
    activation = SIGMOID if problem == "multi_label_classification" else SOFTMAX
    labels = tuple(str(config.id2label.get(index, "")) for index in range(width))
    is_named = all(labels)
    what = f"{width} probabilities, the {activation} of its own trained head"
    notes = [f"labels: {', '.join(labels)}" if is_named else "its configuration names no labels"]
    if activation == SIGMOID:
        notes.append("one sigmoid per class: its configuration says multi_label_classification")
    return _Made(Headed(encoder.model, activation), width, what, (*notes, *pairs), labels if is_named else ())


# --- its tokens --------------------------------------------------------------------------------------------------


def _find_activation(config: Any) -> str:
    """Return what CrossEncoder of sentence-transformers puts on a score: a sigmoid, if its files say no other."""
    own = getattr(config, CROSS_ENCODER, None) or {}
    name = own.get("activation_fn") or getattr(config, OLD_CROSS_ENCODER, None) or "Sigmoid"
    known = {"Sigmoid": SIGMOID, "Identity": NOTHING}
    if (kind := str(name).rpartition(".")[2]) not in known:
        raise InputError(f"The model's files name the activation {name!r:.60}.", f"Known: {', '.join(known)}.")
    return known[kind]


def _write_tokens(encoder: _Encoder, folder: Path, *, is_whole: bool) -> Path:
    """Write the tokenizer's file, and return its path: ``vocab.txt`` for a WordPiece, else ``tokenizer.json``."""
    if is_whole or not encoder.vocabulary:
        text = encoder.tokenizer.backend_tokenizer.to_str(pretty=True)
        (folder / TOKENIZER).write_text(text, encoding="utf-8")
        return folder / TOKENIZER
    path = folder / VOCABULARY
    path.write_text("".join(f"{token}\n" for token in encoder.vocabulary), encoding="utf-8")
    return path


def _find_length(encoder: _Encoder, wanted: int | None) -> int:
    """Return the maximum number of tokens per text: ``wanted`` if given, else the encoder's own maximum."""
    known = [count_positions(encoder.model), encoder.tokenizer.model_max_length]
    most = int(min(known))
    if wanted is None:
        return min(encoder.sentences.max_length or most, most)
    if not LENGTHS[0] <= wanted <= most:
        raise InputError(f"max_length is {wanted}; {encoder.name} takes {LENGTHS[0]} to {most} tokens.")
    return wanted


def _copy_tokenizer(
    leaf: str, name: str, encoder: _Encoder, tokens: Path, max_length: int, scratch: Path
) -> Mapping[str, str | bytes | Path]:
    """Draft a copy of shoal's model folder ``leaf``, called ``name``, with the encoder's token file ``tokens``.

    Return the files by their paths in the project.
    """
    settings = {"max_length": str(max_length)}
    if tokens.name == VOCABULARY:
        settings["lowercase"] = "true" if encoder.is_lowercase else "false"
    copy = draft_like(name, leaf, settings=settings, artifacts={tokens.name: tokens}, project=scratch)
    return {path: content for path, content in copy.draft.files.items() if path.startswith(f"preprocess/{name}/")}


# --- modules to export -----------------------------------------------------------------------------------------------


class Embedder(Trunked):
    """Embedding module: it pools the last hidden states of ``trunk``, a BERT-family model.

    ``dense`` are layers on the pooled states, in FP32. ``is_normalised``: each row is divided by its Euclidean length.
    Rows are cut to ``size`` numbers, as ``encode`` of sentence-transformers does: after its layer Normalize, but before
    its own option ``normalize_embeddings`` (``cuts_first``).
    """

    def __init__(
        self,
        trunk: nn.Module,
        pooling: str,
        dense: nn.Module,
        *,
        is_normalised: bool,
        size: int | None = None,
        cuts_first: bool = False,
    ) -> None:
        super().__init__(trunk)
        self.dense, self.pooling, self.size = dense, pooling, size
        self.is_normalised, self.cuts_first = is_normalised, cuts_first

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return embeddings, FP32 ``[rows, size]``, for ids and attention mask, INT64 ``[rows, width]`` each."""
        hidden = self.trunk(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        pooled: Tensor = self.dense(pool(hidden, mask, self.pooling))
        if self.size and self.cuts_first:
            pooled = pooled[:, : self.size]
        if self.is_normalised:
            pooled = nn.functional.normalize(pooled, dim=1)
        return pooled[:, : self.size] if self.size else pooled


class Headed(Trunked):
    """Sequence classifier of transformers, split into its trunk, a BERT-family model, and the head on top of it.

    The head computes in FP32, as it was published, whatever the trunk's dtype is. ``activation`` (softmax, sigmoid or
    empty) is applied to the head's logits. The split changes ``model``, which cannot be used alone afterwards.
    """

    def __init__(self, model: Any, activation: str, *, takes_segments: bool = False) -> None:
        prefix = model.base_model_prefix
        super().__init__(getattr(model, prefix))
        self._given = _Given()
        setattr(model, prefix, self._given)
        self.head, self.activation, self.takes_segments = model, activation, takes_segments

    def forward(self, ids: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return scores or probabilities, FP32 ``[rows, num_labels]``, for ids and mask, INT64 ``[rows, width]``."""
        more = {}
        if segments is not None and getattr(self.trunk.config, "type_vocab_size", 0) > 1:
            more = {"token_type_ids": segments}
        elif segments is not None:  # such an encoder has none, and an exporter would drop an input without use
            ids = ids + 0 * segments
        self._given.box.outputs = _in_fp32(self.trunk(input_ids=ids, attention_mask=mask, **more))
        logits: Tensor = self.head(input_ids=ids, attention_mask=mask).logits
        self._given.box.outputs = None
        if self.activation == SOFTMAX:
            return logits.softmax(dim=-1)
        return logits.sigmoid() if self.activation == SIGMOID else logits


class _Box:
    """Container for the trunk's outputs. PyTorch's tracer inspects a module's attributes, but not a plain object's."""

    outputs: Any = None


class _Given(nn.Module):
    """Module that replaces the trunk in a published model and returns the outputs that the trunk already computed."""

    def __init__(self) -> None:
        super().__init__()
        self.box = _Box()

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.box.outputs


def _in_fp32(outputs: Any) -> Any:
    """Convert the tensors among a model's outputs to FP32, in place."""
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            outputs[name] = value.float()
    return outputs

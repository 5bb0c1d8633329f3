"""Engine on vLLM. vLLM computes in its own processes, which end with this process and are replaced when they die.

vLLM is imported only when an engine is made: by then, ``TritonModel.initialize`` has set the locale that vLLM needs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import secrets
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.errors import ServerError, SetupError, ShoalError
from shoal.kit.component.ledger import ACCEPTED, DRAFTED, Ledger
from shoal.kit.component.parameters import Parameters
from shoal.kit.component.stream import Stream
from shoal.kit.component.tensors import Device
from shoal.kit.generation.answering import Answering
from shoal.kit.generation.contract import PROMPT_PLACES, Limits, LogProbs, TokenRequest
from shoal.kit.generation.guides import ENDED, GOES_ON, GUIDE
from shoal.kit.generation.sampling import NUMBERS
from shoal.kit.generation.weights import Weights
from shoal.system.processes import Reaper

DTYPES = ("auto", "float32", "bfloat16", "float16")
_OWN = {"model": "model", "dtype": "dtype", "max_num_seqs": "slots", "max_model_len": "context"}  # parameters for these
# Guides are read by llguidance, as in other engines; blanks that a schema does not ask for could go on without end.
_GUIDES = {"backend": "guidance", "disable_any_whitespace": True}
_DEFAULTS = {"load_format": "safetensors", "disable_log_stats": True, "structured_outputs_config": _GUIDES}
# Settings by request alone; token ids in and out, but guides need the tokenizer.
_FIXED = {"skip_tokenizer_init": False, "generation_config": "vllm"}
_FURTHER = frozenset(("echo", "bad_words", "embedding_bias", GUIDE, PROMPT_PLACES))  # what it applies beside numbers
_HOST_CACHE = 2**30  # bytes; vLLM's default is nearly all memory
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOOK_SECONDS = 0.1  # between two checks whether vLLM's processes have died
_AGAIN_SECONDS = 10
_PAUSE_SECONDS = 5.0  # after a restart that failed
_STOP_SECONDS = 1.0  # for vLLM's processes to end by themselves

_log = logging.getLogger("shoal")


def read_arguments(parameters: Parameters) -> dict[str, Any]:
    """Return the parameter ``engine_args``, a JSON object of vLLM's own arguments.

    Raises:
        ArtifactError: the parameter is not an object, or has an argument that another parameter or this engine sets.
    """
    example = '{"gpu_memory_utilization": 0.8}'
    try:
        found = json.loads(parameters.text("engine_args", "{}"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise parameters.refusal("engine_args", "expected a JSON object of vLLM's arguments", example)
    for name in found:
        if name in _OWN:
            raise parameters.refusal("engine_args", f"{name} is set by the parameter {_OWN[name]}", example)
        if name in _FIXED:
            raise parameters.refusal("engine_args", f"{name} is always {_FIXED[name]} here", example)
    return found


class VllmEngine:
    """Continuous batching by vLLM, on a GPU or the host.

    ``limits.slots`` requests are computed at the same time, further requests wait in order. The ``dtype`` ``auto``
    takes the dtype from the weights' config.json. ``arguments`` are vLLM's own, as `vllm serve` takes them, such as
    ``{"tensor_parallel_size": 2}``. On a GPU, the engine computes on the ``device`` and the following ones, as many as
    the arguments need, and sees no others; with KIND_MODEL, vLLM chooses from all that this process sees. ``threads``
    is the number of compute threads on the host; None leaves them to vLLM, which binds them to all cores but one. The
    ledger of the ``device`` gets the numbers of vLLM's metrics.

    Raises:
        SetupError: vLLM is not installed, computes on another kind of device, or does not start, for example because it
            does not know one of ``arguments`` or a GPU is missing.
    """

    settings = frozenset(row.name for row in NUMBERS if row.vllm) | _FURTHER

    def __init__(
        self,
        weights: Weights,
        limits: Limits,
        *,
        dtype: str,
        threads: int | None,
        arguments: Mapping[str, Any],
        device: Device,
    ) -> None:
        most = arguments.get("max_logprobs", limits.top_logprobs)  # vLLM checks its type; -1: all tokens
        is_fewer = isinstance(most, int) and 0 <= most < limits.top_logprobs
        self.limits = replace(limits, top_logprobs=most) if is_fewer else limits
        own = weights.config.get("dtype") or weights.config.get("torch_dtype") or "auto"
        self._sockets = Path(tempfile.gettempdir()) / f"shoal-vllm-{secrets.token_hex(4)}"
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._sockets)
        _set_variables(threads)
        _show_gpus(device, arguments)
        self._arguments = _complete({**_DEFAULTS, **arguments}, device) | {
            **_FIXED,
            "model": str(weights.folder),
            "dtype": own if dtype == "auto" else dtype,
            "max_num_seqs": limits.slots,
            "max_model_len": limits.context,
        }
        self._ledger = device.ledger
        self._numbers = itertools.count()
        self._changing = threading.Lock()
        self._answerings: dict[Stream, Answering] = {}
        self._running: tuple[Any, asyncio.AbstractEventLoop] | None = None  # AsyncLLM, while it can be asked
        self._fault: Exception | None = None  # error of the first start
        self._is_ready, self._is_closing = threading.Event(), threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="shoal-vllm", daemon=True)
        self._keeper.start()
        self._is_ready.wait()
        if self._fault is not None:
            raise SetupError(
                f"vLLM does not start: {_in_one_line(self._fault)}",
                "Its messages above say why. Where memory is short: a smaller context or slots, or engine_args.",
            ) from self._fault

    def is_running(self) -> bool:
        """Whether the engine computes."""
        return self._running is not None

    def admit(self, request: TokenRequest, stream: Stream) -> None:
        """Begin to answer a checked request, and return at once.

        Raises:
            ServerError: vLLM is being started again.
        """
        with self._changing:
            if self._running is None:
                raise _unavailable("its process died, and is being started again")
            llm, loop = self._running
            if request.guide is not None:  # where it ends, only an end token can come next
                ends = {*(request.end_ids or self.limits.end_ids), llm.get_tokenizer().eos_token_id} - {None}
                request = replace(request, end_ids=tuple(ends), sampling=replace(request.sampling, min_tokens=0))
            answering = self._answerings[stream] = Answering(request, stream)
            task = asyncio.run_coroutine_threadsafe(self._answer(llm, answering), loop)

        def leave() -> None:
            task.cancel()  # vLLM aborts what is cancelled

        stream.on_leave(leave)

    def close(self) -> None:
        """End all streams with an error, and end all processes of vLLM."""
        self._is_closing.set()
        self._keeper.join(10 * _STOP_SECONDS)

    async def _answer(self, llm: Any, answering: Answering) -> None:
        request, stream = answering.request, answering.stream
        prompt, request_id = {"prompt_token_ids": list(request.ids)}, str(next(self._numbers))
        number = request.sampling.top_logprobs
        try:
            async with aclosing(llm.generate(prompt, _make_params(request), request_id)) as outputs:
                async for output in outputs:
                    new = output.outputs[0]
                    if output.prompt_logprobs and not answering.ids:
                        answering.begin(_read_prompt(request.ids, output.prompt_logprobs, number))
                    for index, token in enumerate(new.token_ids):
                        place = _read_place(token, new.logprobs[index], number) if request.returns else None
                        guided = _follow(request, token)
                        if not answering.add(token, place, beside=len(self._answerings), guided=guided):
                            return
            if request.follower is not None:
                raise request.follower.explain()
            stream.end(ShoalError("The model ended this answer too early.", "See the server's log."))
        except Exception as error:
            stream.end(_explain_death(error, answering) if llm.errored else error)
        finally:
            self._answerings.pop(stream, None)

    # --- the thread that vLLM's client lives in ------------------------------------------------------------------

    def _keep(self) -> None:
        """Run vLLM, and start it again whenever its processes die, until the engine is closed."""
        while not self._is_closing.is_set():
            try:
                with Reaper(self._sockets) as reaper:
                    asyncio.run(self._run(reaper))
            except Exception as error:
                if not self._is_ready.is_set():
                    self._fault = error
                    self._is_closing.set()
                else:
                    _log.exception("vLLM did not start again")
                    self._is_closing.wait(_PAUSE_SECONDS)
            self._is_ready.set()

    async def _run(self, reaper: Reaper) -> None:
        """Start vLLM, and serve until its processes die or the engine is closed; then end all requests."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        loggers = [_recording(self._ledger)]
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments), stat_loggers=loggers)
        try:
            reaper.note()
            self._running = llm, asyncio.get_running_loop()
            self._is_ready.set()
            while not (llm.errored or self._is_closing.is_set()):
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            with self._changing:
                self._running = None
                answerings = list(self._answerings.values())
                self._answerings.clear()
            if is_dead := not self._is_closing.is_set():
                _log.error("vLLM's processes died; they are started again")
            for each in answerings:
                unloaded = _unavailable("it is being unloaded")
                each.stream.end(_explain_death(llm.dead_error, each) if is_dead else unloaded)
            llm.shutdown(timeout=_STOP_SECONDS)


def _in_one_line(error: Exception) -> str:
    """Return the error's text without line breaks, and without the parts that pydantic adds."""
    return " ".join(str(error).split()).partition(" [type=")[0].rpartition("Value error, ")[2]


def _unavailable(why: str) -> ServerError:
    """Return an error after which shoal's clients retry; in a stream, they recognize it by its message."""
    return ServerError(f"The model is unavailable: {why}.", f"Try again in {_AGAIN_SECONDS} s.")


def _explain_death(error: Exception, answering: Answering) -> Exception:
    """Return why an answer ends with vLLM's processes: one that has no tokens may be asked for again."""
    return error if answering.ids else _unavailable("its process died")


def _set_variables(threads: int | None) -> None:
    """Set the environment variables that vLLM reads, at its import or in its processes."""
    # Requests come through other threads, and after a fork these would be missing.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"):
        os.environ.setdefault(name, "1")
    if threads is not None and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # other models have threads too
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _show_gpus(device: Device, arguments: Mapping[str, Any]) -> None:
    """Let CUDA, which is not loaded yet, show vLLM the GPUs of ``device``; none if it is the host."""
    if device.kind == "model":
        return
    sizes = (arguments.get(f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data"))
    number = math.prod(size for size in sizes if type(size) is int and size > 0)
    wanted = range(device.index, device.index + number) if device.kind == "gpu" else range(0)
    said = os.environ.get(_VISIBLE)
    names = map(str, range(wanted.stop)) if said is None else filter(str.strip, said.split(","))
    known = list(names)[wanted.start :]
    if len(known) < len(wanted):
        raise SetupError(
            f"vLLM is to compute on GPU {', '.join(map(str, wanted))}, and {_VISIBLE} is {said!r}.",
            "Compose with other GPUs (--gpu), or with a smaller tensor_parallel_size.",
        )
    os.environ[_VISIBLE] = ",".join(known[: len(wanted)])


def _complete(arguments: dict[str, Any], device: Device) -> dict[str, Any]:
    """Return vLLM's arguments; add a cache size if vLLM computes on the host and no argument sets this size."""
    try:
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        raise SetupError(
            f"{error.name} is not installed in this model's environment.",
            "Make one with vLLM, and compose with it: shoal env build --for llm-vllm --out build/env-vllm; "
            "shoal compose ... --env llm-vllm=build/env-vllm",
        ) from None
    except Exception as error:  # libraries that do not fit one another
        raise SetupError(
            f"vLLM cannot be imported ({type(error).__name__}: {error}).",
            "Install vLLM into an environment of its own.",
        ) from error
    if device.kind != "model" and current_platform.is_cpu() != (device.kind == "cpu"):
        where, other = ("a GPU", "cpu") if device.kind == "gpu" else ("the host", "gpu:0")
        raise SetupError(
            f"The model is placed on {where}, and the vLLM in its environment does not compute there.",
            f"Compose with --place MODEL={other}, or with another environment.",
        )
    sizes = ("kv_cache_memory_bytes", "gpu_memory_utilization")
    if current_platform.is_cpu() and not any(size in arguments for size in sizes):
        arguments.setdefault("kv_cache_memory_bytes", _HOST_CACHE)  # VLLM_CPU_KVCACHE_SPACE precedes it
    return arguments


def _recording(ledger: Ledger) -> Any:
    """Return a class of vLLM statistics loggers that pass the numbers of vLLM's metrics on to ``ledger``.

    With data parallelism, there is a logger for each engine, by its index.
    """
    from vllm.v1.metrics.loggers import StatLoggerBase

    levels: dict[int, tuple[int, int, float]] = {}  # requests that run and that wait, and the share of the cache

    class Recorder(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:  # noqa: ARG002
            self._index = engine_index
            self._set_levels(0, 0, 0.0)  # also after vLLM's processes died

        def _set_levels(self, *found: Any) -> None:
            levels[self._index] = found
            running, waiting, shares = zip(*levels.values(), strict=True)
            ledger.levels["vllm:num_requests_running"] = sum(running)
            ledger.levels["vllm:num_requests_waiting"] = sum(waiting)
            ledger.levels["vllm:kv_cache_usage_perc"] = max(shares)

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if (now := scheduler_stats) is not None:
                self._set_levels(now.num_running_reqs, now.num_waiting_reqs, now.kv_cache_usage)
                ledger.count("vllm:prefix_cache_queries", now.prefix_cache_stats.queries)
                ledger.count("vllm:prefix_cache_hits", now.prefix_cache_stats.hits)
                if found := now.spec_decoding_stats:
                    ledger.count(DRAFTED, found.num_draft_tokens)
                    ledger.count(ACCEPTED, found.num_accepted_tokens)
            if (new := iteration_stats) is not None:
                ledger.count("vllm:prompt_tokens", new.num_prompt_tokens)
                ledger.count("vllm:generation_tokens", new.num_generation_tokens)
                ledger.count("vllm:num_preemptions", new.num_preempted_reqs)

        def log_engine_initialized(self) -> None:
            pass

    return Recorder


def _follow(request: TokenRequest, token: int) -> str:
    """Return how the request's guide ends with a token. Where nothing may follow, vLLM lets only end tokens come.

    Raises:
        InputError: the answer ends there, and the guide does not.
    """
    if request.follower is None:
        return GOES_ON
    if token not in request.end_ids:
        return request.follower.take(token)
    if not request.follower.may_end():
        raise request.follower.explain()
    return ENDED


def _read_place(token: int, found: Mapping[int, Any], number: int) -> LogProbs:
    """Convert vLLM's log probabilities at one place: the chosen token's, which are first, and the most probable ones'.

    If the chosen token is one of the ``number`` most probable ones, vLLM has it once.
    """
    top = sorted([*found.items()][len(found) > number :], key=lambda item: item[1].rank)[:number]
    return LogProbs(found[token].logprob, [each for each, _ in top], [each.logprob for _, each in top])


def _read_prompt(ids: Sequence[int], found: Sequence[Mapping[int, Any] | None], number: int) -> list[LogProbs]:
    """Convert vLLM's log probabilities of a prompt, which has none of its first token."""
    places = zip(ids[1:], found[1:], strict=True)
    return [LogProbs.make_first(number), *(_read_place(token, each or {}, number) for token, each in places)]


def _make_params(request: TokenRequest) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    sampling = request.sampling
    given = {row.vllm: getattr(sampling, row.name) for row in NUMBERS if row.vllm}
    if sampling.is_greedy:
        given["temperature"] = 0.0
    if not request.end_ids:
        given["min_tokens"] = 0
    if not request.returns:
        given["logprobs"] = None
    if request.is_scored:
        given["prompt_logprobs"] = sampling.top_logprobs
    if request.bias:
        given["logit_bias"] = dict(request.bias)
    if (guide := request.guide) is not None:
        kind = "json" if guide.schema else guide.kind
        value = guide.choices if kind == "choice" else guide.schema or guide.value
        given["structured_outputs"] = StructuredOutputsParams(**{kind: value})
    params = SamplingParams(
        **given,
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.end_ids),
        ignore_eos=True,  # the request's end tokens alone count
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    if request.bans:  # vLLM itself takes texts alone
        params._bad_words_token_ids = [list(word) for word in request.bans]
    return params
